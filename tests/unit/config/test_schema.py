"""The JSON Schema accepts what the loader accepts, and the reference page is up to date."""

from __future__ import annotations

import typing
from pathlib import Path

import jsonschema
import pytest
from annotated_types import Ge, Gt, Le, Lt

from automodel.config.complaints import Complaints
from automodel.config.dump import to_plain
from automodel.config.fields import arms, bare, fields_of, sections_of
from automodel.config.load import load_config
from automodel.config.read import read_text
from automodel.config.schema import json_schema, markdown
from automodel.config.section import Fits
from automodel.config.tree import to_python
from automodel.plan.config import RunConfig
from automodel.plan.places import KEYS

SCHEMA = json_schema(RunConfig)


def valid(text: str) -> bool:
    node = read_text(text, "run.yaml", 0, Complaints())
    assert node is not None
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(to_python(node))


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "model: bert\ndataset: x.csv\n",
        "model: {path: bert}\ndataset: {dataset_name: imdb}\n",
        "model: {_target_: a.b, name: bert, hidden_dropout_prob: 0}\ndataset: x\noptimizer: {learning_rate: 1e-5}\n",
        "model: bert\ndataset: x\noptimizer:\nwandb: null\ndistributed: {dp_size: none}\n",
        "model: bert\ndataset: x\nseed: ${SEED,1}\nwandb: {name: 2024}\ncompile: true\nlr_scheduler: cosine\n",
        "model: bert\ndataset: x\noptimizer: {betas: [0.9, 0.99]}\nloss_fn: {class_weights: [1, 2.5]}\n",
        "model: bert\ndataset: {mixture: [a.csv, {path: b.csv, weight: 0.3}]}\n",
        "model: bert\ndataset: {path: x, mixture: null}\n",
        "model: bert\ndataset: x\noptim: lion_8bit\nwarmup_steps: 0.1\nlr_scheduler_kwargs: {num_cycles: 2}\n",
        "model: bert\ndataset: x\ngradient_checkpointing: full\nlr_scheduler: {lr_scheduler_kwargs: {lr_end: 0}}\n",
    ],
)
def test_accepts(text):
    assert valid(text)


@pytest.mark.parametrize(
    "text",
    [
        "dataset: x.csv\n",
        "model: {num_labels: 2}\ndataset: x.csv\n",
        "model: bert\ndataset: x\nsede: 1\n",
        "model: bert\ndataset: x\nseed: -1\n",
        "model: bert\ndataset: x\noptimizer: {lr: fast}\n",
        "model: bert\ndataset: x\noptimizer: {lr: 0}\n",
        "model: bert\ndataset: x\nlr_scheduler: cosin\n",
        "model: bert\ndataset: x\ncheckpoint: {flavour: vanilla}\n",
        "model: bert\ndataset: x\noptim: lyon\n",
        "model: bert\ndataset: x\nlr_scheduler_kwargs: {num_cyles: 2}\n",
        "model: bert\ndataset: {mixture: a.csv}\n",
        "model: bert\ndataset: {mixture: [{path: a, weight: 0}]}\n",
        "model: bert\ndataset: {mixture: [{weight: 1}]}\n",
    ],
)
def test_refuses(text):
    assert not valid(text)


def test_a_resolved_config_fits_its_own_schema(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: bert\ndataset: x.csv\npeft: {}\nfp8: {}\nwandb: {}\nmlflow: {}\nquantization: {}\n")
    jsonschema.Draft202012Validator(SCHEMA).validate(to_plain(load_config(RunConfig, [path])))


def test_every_key_has_a_description():
    silent = [
        f"{path}.{f.name}" for path, section in sections_of(RunConfig) for f in fields_of(section).values() if not f.doc
    ]
    assert silent == []


def test_every_key_has_one_meaning():
    """An alias never hides a field, and every alias leads somewhere."""
    for _, section in sections_of(RunConfig):
        assert not set(section.ALIASES) & set(fields_of(section))
        assert set(section.ALIASES.values()) <= set(fields_of(section))
        assert section.SHORTHAND is None or section.SHORTHAND in fields_of(section)


def test_docs_are_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == markdown(RunConfig), (
        "run `automodel config schema --markdown > docs/config.md`"
    )


def numbers_of(hint):
    """Every number type in a field's type, those in lists and mappings too."""
    for arm in arms(hint):
        if bare(arm) in (int, float):
            yield arm
        for inner in typing.get_args(arm) if typing.get_origin(arm) in (tuple, dict) else ():
            yield from numbers_of(inner) if inner is not Ellipsis else ()


def test_every_number_has_a_range():
    """Both ends stand in the schema; what a number means there is checked nowhere else."""
    found = 0
    for path, section in sections_of(RunConfig, items=True):
        for f in fields_of(section).values():
            for number in numbers_of(f.hint):
                limits = {type(limit) for limit in getattr(number, "__metadata__", ())}
                assert limits & {Ge, Gt}, f"{path}.{f.key} has no smallest value"
                assert limits & {Le, Lt}, f"{path}.{f.key} has no largest value"
                found += 1
    assert found > 60


def test_every_key_that_may_be_a_path_is_checked_as_one():
    for key in KEYS:
        section, *names = RunConfig, *key.split(".")
        for name in names[:-1]:
            if name != "*":
                f = fields_of(section)[name]
                section = f.section or f.items or section
        if names[-1] not in ("tracking_uri", "data_files"):  # which may be addresses
            texts = [arm for arm in arms(fields_of(section)[names[-1]].hint) if bare(arm) is str]
            assert any(isinstance(limit, Fits) for text in texts for limit in getattr(text, "__metadata__", ())), key
