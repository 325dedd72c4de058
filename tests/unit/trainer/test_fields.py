"""Each honoured field of TrainingArguments changes what it says, in the engine's steps as in stock Trainer's.

Every case (`tests/trainer_fields.py`) trains a tiny classifier for a few steps with stock Trainer and with ours; both
must agree in everything that is observed, and differ from the default run in what the field is about.
"""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
import transformers

from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.fields import FIELDS
from automodel.trainer.trainer import Trainer
from tiny_models import tiny
from tiny_runs import make_tokenizer
from trainer_fields import CASES, OWN_STEPS, SEEN_ALONE, observed, rows


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    made: dict = {}

    def get(needs):
        if str(needs) not in made:
            made[str(needs)] = observed(Trainer, tmp_path_factory.mktemp("default"), **needs)[1]
        return made[str(needs)]

    return get


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def differ(a, b):
    numbers = all(isinstance(x, float) for x in [*a, *b])
    return len(a) != len(b) or (not np.allclose(a, b, rtol=1e-6, atol=1e-9) if numbers else list(a) != list(b))


@pytest.mark.parametrize("field", CASES)
def test_the_field_is_honoured(field, tmp_path, default):
    value, about, needs = CASES[field]
    options = {**needs, field: value}
    trainer, ours = observed(Trainer, tmp_path / "ours", **options)
    stock = ours if about in SEEN_ALONE else observed(transformers.Trainer, tmp_path / "stock", **options)[1]
    assert trainer.acceleration.path == ("stock" if field in OWN_STEPS else "packed"), trainer.acceleration
    tolerance = 3e-2 if field == "bf16" else 1e-4
    for name, mine in ours.items():
        if all(isinstance(x, float) for x in mine):
            np.testing.assert_allclose(mine, stock[name], atol=tolerance, rtol=tolerance, err_msg=name)
        else:
            assert mine == stock[name], name
    assert differ(ours[about], default(needs)[about]), f"{field} changed nothing about {about}"


def test_the_table_has_every_field_and_no_other():
    own = {f.name for f in dataclasses.fields(transformers.TrainingArguments) if f.init}
    assert own == set(FIELDS)


def test_compiling_on_the_cpu_is_left_to_trainers_own_steps():
    from automodel.trainer.obstacles import why_stock

    _, model = tiny("bert", "text-classification", pad_token_id=0)
    args = TrainingArguments("out", use_cpu=True, report_to="none")
    trainer = Trainer(model, args, train_dataset=rows(8, 0), processing_class=make_tokenizer())
    assert why_stock(trainer, Trainer) is None
    for name in ("torch_compile", "auto_find_batch_size", "use_liger_kernel", "debug"):
        before = getattr(args, name)
        setattr(args, name, True)
        assert name in why_stock(trainer, Trainer)
        setattr(args, name, before)
