"""Fields of TrainingArguments whose effect is not a number of the run: in log files, a loader, a resumed run, a device.

Each test names the fields it stands for (`shows`). The last one holds the table against them: a field that is called
honoured and has neither a case in `trainer_fields.py` nor a test here fails it, by name.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import logging
import re
import sys
import types

import numpy as np
import pytest
import torch
import transformers

from automodel.plan.hardware import Hardware
from automodel.tasks.registry import TEXT_CLASSIFICATION
from automodel.trainer import fast_evaluation, fast_path
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.fields import FIELDS
from automodel.trainer.obstacles import why_stock
from automodel.trainer.trainer import Trainer
from tiny_models import tiny
from trainer_fields import CASES, SAVES, SHOWN, logged, made, rows, shows, start


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@shows("disable_tqdm")
def test_a_progress_bar(tmp_path, capsys):
    for hidden in (False, True):
        made(Trainer, tmp_path, disable_tqdm=hidden).train()
        said = capsys.readouterr()
        assert ("4/4" in said.out + said.err) is not hidden


@shows("report_to", "run_name")
def test_trackers_get_what_is_logged_and_the_name_of_the_run(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = made(Trainer, tmp_path / "out", report_to="tensorboard", run_name="a run of mine")
    trainer.train()
    assert trainer.acceleration.path == "packed"
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(logged(trainer, "loss"))
    said = [t for tag in events.Tags()["tensors"] for t in events.Tensors(tag)]
    assert any(b"a run of mine" in value for t in said for value in t.tensor_proto.string_val)


@shows("use_cpu", "fp16", "tf32", "dataloader_pin_memory")
def test_what_belongs_to_a_gpu(tmp_path, monkeypatch):
    gpu = Hardware("cuda", "H200", 1, 139.0, True, True, 16, True)
    monkeypatch.setattr(fast_path, "read_hardware", lambda: gpu)
    assert fast_path.hardware_of(torch.device("cpu")).device == "cpu"
    assert fast_path.hardware_of(torch.device("cuda")).device == "cuda"
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert args.device.type == "cpu"
    for pins in (True, False):
        trainer = made(Trainer, tmp_path)
        trainer.args.dataloader_pin_memory = pins  # which `use_cpu` switches off
        assert trainer.get_train_dataloader().pin_memory is pins

    half = dataclasses.replace(args)
    half.fp16 = True  # which the constructor refuses without a GPU
    trainer = made(Trainer, tmp_path)
    trainer.args = half
    assert why_stock(trainer, Trainer) == "fp16 on the CPU"
    for asked, precision in ((half, "fp16"), (args, "fp32")):
        cfg = fast_path.run_config(asked, TEXT_CLASSIFICATION, 4, torch.float32)
        assert cfg.training_optimizations.precision == precision

    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    switched = []
    monkeypatch.setattr("transformers.training_args.enable_tf32", switched.append)
    for value in (True, False):
        TrainingArguments(str(tmp_path), tf32=value, use_cpu=True, report_to="none")
    assert switched == [True, False]


@shows("log_level", "skip_memory_metrics", "use_cache")
def test_how_much_is_said(tmp_path):
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger, level = logging.getLogger("transformers"), transformers.logging.get_verbosity()
    logger.addHandler(handler)
    try:
        for chosen, count in (("error", 0), ("info", 1)):
            heard.clear()
            trainer = made(Trainer, tmp_path, log_level=chosen, skip_memory_metrics=chosen == "error")
            metrics = trainer.train().metrics
            assert sum("Running training" in line for line in heard) == count
            assert ("train_mem_cpu_alloc_delta" in metrics) is (chosen == "info")
    finally:
        logger.removeHandler(handler)
        transformers.logging.set_verbosity(level)
    for keeps in (True, False):
        assert made(Trainer, tmp_path, use_cache=keeps).model.config.use_cache is keeps


@shows(
    "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
)  # fmt: skip
def test_the_loader_of_the_engine_is_the_one_that_was_asked_for(tmp_path):
    plain = made(Trainer, tmp_path, max_steps=1)
    asked = made(
        Trainer, tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=3,
        dataloader_multiprocessing_context="fork", dataloader_in_order=False, max_steps=6, eval_strategy="no",
        eval_steps=None,
    )  # fmt: skip
    seen, loaders = [], {}

    class Workers(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(loaders[asked]._iterator._workers[0].pid)

    for trainer in (plain, asked):
        of_rows = trainer._rows_loader
        trainer._rows_loader = lambda rows, trainer=trainer, of_rows=of_rows: loaders.setdefault(trainer, of_rows(rows))
        if trainer is asked:
            trainer.add_callback(Workers())
        trainer.train()
        assert trainer.acceleration.path == "packed"
    other, loader = loaders[plain], loaders[asked]
    assert (loader.prefetch_factor, loader.in_order, loader.persistent_workers) == (3, False, True)
    assert (other.prefetch_factor, other.in_order, other.persistent_workers) == (None, True, False)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert other.multiprocessing_context is None
    assert len(seen) == 6
    assert len(set(seen)) == 1  # two epochs, one process


@shows("bf16_full_eval", "fp16_full_eval")
@pytest.mark.parametrize(("field", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_evaluating_in_half_precision(tmp_path, field, dtype):
    found = []
    for kind in (Trainer, transformers.Trainer):
        trainer = made(kind, tmp_path, **{field: True})
        found.append(trainer.evaluate()["eval_loss"])
        assert trainer.model.dtype == dtype
    assert found[0] == pytest.approx(found[1], abs=2e-3)
    assert made(Trainer, tmp_path).evaluate()["eval_loss"] != found[0]


@shows("remove_unused_columns", "label_names")
def test_columns(tmp_path):
    taken = []

    def collate(features):
        taken.append(sorted(features[0]))
        return {
            "input_ids": torch.ones(len(features), 3, dtype=torch.int64),
            "labels": torch.zeros(len(features)).long(),
        }

    for removes in (True, False):
        made(Trainer, tmp_path, {"data_collator": collate}, remove_unused_columns=removes, max_steps=1).train()
    assert "size" not in taken[0]
    assert "size" in taken[-1]
    for kind in (Trainer, transformers.Trainer):
        named = made(kind, tmp_path, label_names=["answers"], max_steps=2)
        named.train()
        assert not logged(named, "eval_loss")
        assert logged(made_and_trained(kind, tmp_path, max_steps=2), "eval_loss")


def made_and_trained(kind, folder, **options):
    trainer = made(kind, folder, **options)
    trainer.train()
    return trainer


class Counter(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self, steps=0):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


@shows("ignore_data_skip", "restore_callback_states_from_checkpoint")
def test_what_a_resumed_run_takes_up_again(tmp_path):
    found = {}
    for kind in (Trainer, transformers.Trainer):
        folder = tmp_path / kind.__module__
        made(kind, folder, {"callbacks": [Counter()]}, **SAVES).train()
        for skips in (True, False):
            options = {"ignore_data_skip": not skips, "restore_callback_states_from_checkpoint": skips}
            trainer = made(kind, folder, {"callbacks": [Counter()]}, **SAVES, **options)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            counter = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Counter))
            found[kind.__module__, skips] = logged(trainer, "loss")
            assert counter.steps == (4 if skips else 2)
    ours, stock = Trainer.__module__, transformers.Trainer.__module__
    for skips in (True, False):
        assert found[ours, skips] == pytest.approx(found[stock, skips], abs=1e-4)
    assert found[ours, True] != pytest.approx(found[ours, False], abs=1e-4)


@shows("eval_accumulation_steps")
def test_predictions_leave_the_device_every_few_batches(tmp_path, monkeypatch):
    moved = []
    kind = fast_evaluation.EvalLoopContainer
    plain = kind.to_cpu_and_numpy

    def to_host(self):
        if self.tensors is not None:
            moved.append(len(self.tensors))
        plain(self)

    monkeypatch.setattr(kind, "to_cpu_and_numpy", to_host)
    right = {"compute_metrics": lambda p: {"sum": float(np.abs(p.predictions).sum())}}
    sums = []
    for every, parts in ((None, [6]), (2, [2, 2, 2])):
        trainer = made(
            Trainer, tmp_path, right, eval_accumulation_steps=every, per_device_eval_batch_size=1, max_steps=2
        )
        trainer.train()
        assert moved == parts
        moved.clear()
        sums.append(logged(trainer, "eval_sum"))
    assert sums[0] == sums[1]


@shows("gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps")
def test_memory_is_saved_in_trainers_own_steps(tmp_path, monkeypatch):
    calls, cleared = [], []
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        "transformers.modeling_utils.checkpoint",
        lambda *a, **k: calls.append(k["use_reentrant"]) or checkpoint(*a, **k),
    )
    monkeypatch.setattr("transformers.trainer.clear_device_cache", lambda: cleared.append(1))
    plain = made_and_trained(Trainer, tmp_path)
    assert not calls
    assert not cleared
    for reentrant in (True, False):
        saving = made(
            Trainer, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        saving.train()
        assert "gradient checkpointing" in str(saving.acceleration)
        assert logged(saving, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-5)
        assert calls == [reentrant] * 4  # one layer, four steps
        calls.clear()
    made_and_trained(Trainer, tmp_path, torch_empty_cache_steps=2)
    assert len(cleared) == 2


@shows("auto_find_batch_size")
def test_batches_are_halved_until_they_fit(tmp_path, monkeypatch):
    sizes = []

    class Narrow(transformers.BertForSequenceClassification):
        def forward(self, input_ids, **given):
            sizes.append(len(input_ids))
            if len(input_ids) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(input_ids, **given)

    model = copy.deepcopy(start())
    model.__class__ = Narrow
    trainer = made(Trainer, tmp_path, {"model": model}, auto_find_batch_size=True, eval_strategy="no", eval_steps=None)
    trainer.train()
    assert sizes[0] == 4
    assert set(sizes[-4:]) == {2}
    assert trainer.state.global_step == 4


@shows("use_liger_kernel", "liger_kernel_config")
def test_ligers_kernels_are_asked_for_as_in_trainer(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match="liger-kernel"):
        made(Trainer, tmp_path, use_liger_kernel=True).train()
    asked = []
    module = types.ModuleType("liger_kernel.transformers")
    module.__dict__["_apply_liger_kernel_to_instance"] = lambda **given: asked.append(given)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    trainer = made(Trainer, tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": False})
    trainer.train()
    assert asked == [{"model": trainer.model, "rope": False}]
    assert "use_liger_kernel" in str(trainer.acceleration)


@shows("optim_target_modules")
def test_low_rank_optimizers_get_the_modules_that_were_named(tmp_path, monkeypatch):
    module = types.ModuleType("galore_torch")
    for name in ("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"):
        module.__dict__[name] = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    monkeypatch.setattr("transformers.trainer_optimizer.is_galore_torch_available", lambda: True)
    trainer = made(Trainer, tmp_path, optim="galore_adamw", optim_target_modules=["query"])
    trainer.train()
    named = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = [[named[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups if "rank" in group]
    assert groups == [["bert.encoder.layer.0.attention.self.query.weight"]]
    assert "optim_target_modules" in str(trainer.acceleration)


@shows("debug")
def test_debugging_finds_the_module_with_a_number_that_is_none(tmp_path):
    model = copy.deepcopy(start())
    model.bert.pooler.dense.weight.data[0, 0] = float("inf")
    model.set_attn_implementation("eager")  # whose mask is of numbers: what transformers' own hooks can look at
    made(Trainer, tmp_path, {"model": copy.deepcopy(model)}).train()
    with pytest.raises(ValueError, match="DebugUnderflowOverflow"):
        made(Trainer, tmp_path, {"model": model}, debug="underflow_overflow").train()


@shows("accelerator_config")
def test_accelerates_own_settings(tmp_path):
    seeded, plain, batchwise = (
        [made_and_trained(kind, tmp_path, accelerator_config=config) for kind in (Trainer, transformers.Trainer)]
        for config in (
            {"use_seedable_sampler": True},
            {"use_seedable_sampler": False},
            {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        )
    )
    for ours, stock in (seeded, plain, batchwise):
        assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), abs=1e-4)
    assert logged(seeded[0], "loss") != pytest.approx(logged(plain[0], "loss"), abs=1e-4)
    assert seeded[0].acceleration.path == "packed"
    assert "sync_each_batch" in str(batchwise[0].acceleration)


def test_several_devices_are_left_to_transformers(tmp_path):
    trainer = made(Trainer, tmp_path)
    assert why_stock(trainer, Trainer) is None
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        setattr(trainer, name, True)
        assert "deepspeed, fsdp" in str(why_stock(trainer, Trainer))
        setattr(trainer, name, False)
    trainer.args.parallelism_config = object()
    assert "parallelism_config" in str(why_stock(trainer, Trainer))


def test_whatever_reads_an_inherited_field_is_transformers_own_code_or_calls_it():
    """No method of ours takes the place of one that reads such a field, unless it hands over to it."""
    ours = {name: function for name, function in vars(Trainer).items() if inspect.isfunction(function)}
    inherited = {name for name, field in FIELDS.items() if field.state == "inherited"}
    assert inherited
    for name, function in ours.items():
        stock = getattr(transformers.Trainer, name, None)
        if stock is None:
            continue
        read = set(re.findall(r"args\.(\w+)", inspect.getsource(stock))) & inherited
        assert not read or f"super().{name}(" in inspect.getsource(function), (name, read)


def test_every_honoured_field_has_a_test_that_shows_its_effect():
    honoured = {name for name, field in FIELDS.items() if field.state in ("engine", "trainer")}
    shown = set(CASES) | SHOWN
    assert honoured - shown == set(), "called honoured, and nothing shows it"
    assert shown - honoured == set(), "shown, but the table says something else"
    assert not set(CASES) & SHOWN


def test_a_causal_language_model_takes_use_cache(tmp_path):
    """The field's default switches the cache of a decoder off, as in stock Trainer."""
    model = tiny("llama", "causal-lm")[1]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert Trainer(model, args, train_dataset=rows(8, 0)).model.config.use_cache is False
