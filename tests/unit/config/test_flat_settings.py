"""Flat JSON settings of other tools, alone and layered with a config."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from automodel.config.errors import ConfigError
from automodel.plan.check import load_run_config

REFERENCE = Path(__file__).resolve().parents[4] / "shared" / "reference"
BELOW = "model: some/model\ndataset: data.jsonl\ntask: causal-lm\n"
ALONE = {"model": "some/model", "dataset": "data.jsonl", "task": "causal-lm"}


def load(tmp_path, settings: str, *more: str, yaml: str | None = None):
    files = []
    if yaml is not None:
        (tmp_path / "run.yaml").write_text(yaml)
        files.append(tmp_path / "run.yaml")
    (tmp_path / "settings.json").write_text(settings)
    return load_run_config([*files, tmp_path / "settings.json"], more)


def test_every_key_reaches_its_section_and_comments_are_allowed(tmp_path):
    cfg = load(tmp_path, """{
        "provider": "unsloth",  // our own kernels
        "model_name": "some/model", "dataset_path": "data.jsonl", "task": "causal-lm",
        "use_4bit": true, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": "nf4",
        "bf16": true, "fp16": false, "tf32": true, "packing": true, "group_by_length": true,
        "gradient_checkpointing": true, "optim": "paged_adamw_32bit", "lora_r": 16, "lora_alpha": 32,
        "max_seq_length": 1024, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "learning_rate": 3e-4, "warmup_ratio": 0.03, "lr_scheduler_type": "cosine", "dataloader_pin_memory": true,
        "num_train_epochs": 2, "max_grad_norm": 0.3, "output_dir": "out"
    }""")  # fmt: skip
    assert (cfg.provider, cfg.model.pretrained_model_name_or_path) == ("unsloth", "some/model")
    assert (cfg.dataset.path, cfg.dataset.max_length) == ("data.jsonl", 1024)
    assert cfg.quantization is not None
    assert (cfg.quantization.load_in_4bit, cfg.quantization.bnb_4bit_compute_dtype) == (True, "bfloat16")
    assert cfg.peft is not None
    assert (cfg.peft.dim, cfg.peft.alpha) == (16, 32)
    options = cfg.training_optimizations
    assert (options.bf16, options.fp16, options.tf32, options.gradient_checkpointing) == (True, False, True, True)
    assert (options.gradient_clipping, cfg.packed_sequence.enabled) == (0.3, True)
    assert (cfg.dataloader.batch_size, cfg.dataloader.group_by_length, cfg.dataloader.pin_memory) == (4, True, True)
    assert (cfg.step_scheduler.grad_acc_steps, cfg.step_scheduler.num_epochs) == (2, 2)
    assert (cfg.optimizer.name, cfg.optimizer.lr) == ("paged_adamw_32bit", 3e-4)
    assert (cfg.lr_scheduler.name, cfg.lr_scheduler.warmup_ratio) == ("cosine", 0.03)
    assert cfg.checkpoint.checkpoint_dir == "out"


def test_what_the_tool_assumes_is_filled_in_where_no_file_says_otherwise(tmp_path):
    cfg = load(tmp_path, json.dumps(ALONE | {"provider": "unsloth"}))
    assert (cfg.dataloader.batch_size, cfg.step_scheduler.grad_acc_steps, cfg.optimizer.lr) == (1, 4, 2e-4)
    assert cfg.peft is None
    cfg = load(
        tmp_path, '{"use_4bit": true, "bf16": true}', "optimizer.lr=1e-3",
        yaml=f"{BELOW}dataloader: {{batch_size: 16}}\n",
    )  # fmt: skip
    assert (cfg.dataloader.batch_size, cfg.step_scheduler.grad_acc_steps, cfg.optimizer.lr) == (16, None, 1e-3)
    assert cfg.peft is not None


SINGLE = [
    {"group_by_length": True}, {"bf16": True}, {"fp16": False}, {"tf32": True}, {"logging_steps": 5},
    {"provider": "unsloth"}, {"max_grad_norm": 0.5}, {"max_steps": 7}, {"lora_r": 8}, {"dataloader_num_workers": 1},
    {"max_seq_length": 128}, {"output_dir": "out"}, {"use_4bit": True}, {"per_device_eval_batch_size": 4},
    {"model_name": "another/model"}, {"dataset_path": "other.jsonl"},
]  # fmt: skip
UNTOUCHED = ("dataloader.batch_size", "step_scheduler.grad_acc_steps", "optimizer.lr")


@pytest.mark.parametrize("settings", SINGLE, ids=lambda settings: next(iter(settings)))
@pytest.mark.parametrize("below", ["", "dataloader: {batch_size: 16}\noptimizer: {lr: 1e-5}\n"])
def test_a_fragment_changes_what_it_says_and_nothing_else(tmp_path, capsys, settings, below):
    """Batch, accumulation and learning rate stay those of the config below, or our own defaults."""
    (tmp_path / "plain.yaml").write_text(BELOW + below)
    expected = load_run_config([tmp_path / "plain.yaml"])
    cfg = load(tmp_path, json.dumps(settings), yaml=BELOW + below)
    for path in UNTOUCHED:
        section, key = path.split(".")
        assert getattr(getattr(cfg, section), key) == getattr(getattr(expected, section), key), path
    said = capsys.readouterr().err
    assert f"told by the key '{next(iter(settings))}'" in said
    assert "left to the config below and to our defaults" in said


def test_a_fragment_alone_leaves_the_rest_to_us(tmp_path):
    cfg = load(tmp_path, '{"group_by_length": true}', "model=some/model", "dataset=data.jsonl", "task=causal-lm")
    ours = load(tmp_path, "{}", "model=some/model", "dataset=data.jsonl", "task=causal-lm")
    assert cfg.optimizer.lr == ours.optimizer.lr
    assert (cfg.dataloader.batch_size, cfg.step_scheduler.grad_acc_steps) == (None, None)


@pytest.mark.parametrize(
    ("settings", "yaml", "read"),
    [
        ({"max_steps": -1, "num_train_epochs": 2}, "step_scheduler: {max_steps: 500}", (None, 2)),
        ({"max_steps": 20, "num_train_epochs": 2}, "step_scheduler: {num_epochs: 9}", (20, None)),
        ({"num_train_epochs": 2}, "step_scheduler: {num_epochs: 9}", (None, 2)),
    ],
)
def test_what_trainer_reads_as_none_takes_back_what_is_below(tmp_path, settings, yaml, read):
    cfg = load(tmp_path, json.dumps(settings), yaml=f"{BELOW}{yaml}\n")
    assert (cfg.step_scheduler.max_steps, cfg.step_scheduler.num_epochs) == read


def test_a_switch_that_is_off_takes_the_bits_of_the_file_below_back(tmp_path):
    yaml = f"{BELOW}quantization: {{load_in_4bit: true}}\npeft: {{}}\n"
    assert load(tmp_path, '{"use_4bit": false, "bnb_4bit_quant_type": "nf4"}', yaml=yaml).quantization is None
    kept = load(tmp_path, '{"bnb_4bit_quant_type": "fp4"}', yaml=yaml).quantization
    assert kept is not None
    assert (kept.load_in_4bit, kept.bnb_4bit_quant_type) == (True, "fp4")


@pytest.mark.parametrize(
    ("settings", "steps", "epochs", "warmup"),
    [
        ({"max_steps": -1, "num_train_epochs": 3, "warmup_steps": 0, "warmup_ratio": 0.1}, None, 3, (None, 0.1)),
        ({"max_steps": 0, "warmup_steps": 0}, None, None, (0, None)),
        ({"max_steps": 500, "num_train_epochs": 3, "warmup_steps": 5}, 500, None, (5, None)),
        ({"max_steps": None, "num_train_epochs": 2}, None, 2, (None, None)),
    ],
)
def test_lengths_mean_what_they_mean_to_trainer(tmp_path, settings, steps, epochs, warmup):
    cfg = load(tmp_path, json.dumps(ALONE | settings))
    assert (cfg.step_scheduler.max_steps, cfg.step_scheduler.num_epochs) == (steps, epochs)
    assert (cfg.lr_scheduler.warmup_steps, cfg.lr_scheduler.warmup_ratio) == warmup


def test_what_is_assumed_is_said_and_the_command_line_comes_first(tmp_path, capsys):
    quantised = json.dumps(ALONE | {"use_4bit": True})
    cfg = load(tmp_path, quantised, "step_scheduler.global_batch_size=16")
    assert (cfg.dataloader.batch_size, cfg.step_scheduler.grad_acc_steps) == (1, None)
    said = capsys.readouterr().err
    assert said.startswith(
        f"Flat settings in {tmp_path / 'settings.json'}, told by the key 'use_4bit'. They name a model"
    )
    assert said.endswith("Added: dataloader.batch_size=1, optimizer.lr=2e-4, peft={}.\n")
    cfg = load(tmp_path, quantised, "quantization=null")
    assert (cfg.quantization, cfg.peft) == (None, None)


@pytest.mark.parametrize(
    ("started", "says"),
    [({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"RANK": "0", "AUTOMODEL_RANKS_BECAUSE": "2 GPUs"}, False)],
)
def test_of_several_ranks_one_says_it(tmp_path, capsys, monkeypatch, started, says):
    """The first, also under somebody's torchrun; where we start them, whoever starts them has said it."""
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    load(tmp_path, json.dumps(ALONE | {"use_4bit": True}))
    assert ("Flat settings" in capsys.readouterr().err) == says


def test_switches_that_are_off_turn_nothing_on(tmp_path):
    settings = {"use_4bit": False, "bnb_4bit_quant_type": "nf4", "packing": False, "per_device_train_batch_size": 2}
    cfg = load(tmp_path, json.dumps(ALONE | settings))
    assert cfg.quantization is None
    assert cfg.packed_sequence.enabled is None


def test_a_wrong_value_is_complained_about_at_its_line(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(
            tmp_path,
            '{\n"model": "m", "dataset": "d.jsonl", "task": "causal-lm",\n"per_device_train_batch_size": "many"\n}',
        )
    assert "settings.json:3" in str(caught.value)


def test_json_in_the_form_of_a_config_is_no_flat_file(tmp_path):
    cfg = load(tmp_path, json.dumps(ALONE | {"learning_rate": 1e-4, "dataloader": {"batch_size": 3}}))
    assert (cfg.dataloader.batch_size, cfg.step_scheduler.grad_acc_steps) == (3, None)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")
def test_every_json_block_of_the_performance_guide_is_understood(tmp_path):
    blocks = re.findall(r"```json\n(.*?)```", (REFERENCE / "performance-guide.md").read_text(), re.S)
    assert len(blocks) >= 20
    for block in blocks:
        load(tmp_path, block, yaml="model: some/model\ndataset: data.jsonl\ntask: causal-lm\n")


def test_a_norm_of_zero_is_no_clipping(tmp_path):
    cfg = load(tmp_path, json.dumps(ALONE | {"max_grad_norm": 0.0, "bf16": True}))
    assert cfg.training_optimizations.gradient_clipping is None
    with pytest.raises(ConfigError, match=r"gradient_clipping: must be above 0, got 0. Null turns it off."):
        load(tmp_path, json.dumps(ALONE), "training_optimizations.gradient_clipping=0")


@pytest.mark.parametrize(
    ("yaml", "settings", "more", "read"),
    [
        ("step_scheduler: {local_batch_size: 4}", '{"per_device_train_batch_size": 2}', (), (None, 2)),
        ("step_scheduler: {local_batch_size: 4}", "{}", ("dataloader.batch_size=2",), (None, 2)),
        ("dataloader: {batch_size: 4}", "{}", ("step_scheduler.local_batch_size=2",), (2, None)),
        ("step_scheduler: {local_batch_size: 4}", '{"bf16": true}', ("dataloader.batch_size=null",), (4, None)),
    ],
)
def test_the_later_of_two_names_of_the_micro_batch_counts(tmp_path, yaml, settings, more, read):
    cfg = load(tmp_path, settings, *more, yaml=BELOW + yaml)
    assert (cfg.step_scheduler.local_batch_size, cfg.dataloader.batch_size) == read


@pytest.mark.parametrize(
    ("yaml", "more"),
    [
        ("step_scheduler: {local_batch_size: 4}\ndataloader: {batch_size: 2}", ()),
        ("", ("step_scheduler.local_batch_size=4", "dataloader.batch_size=2")),
    ],
)
def test_two_names_of_the_micro_batch_in_one_place_are_refused(tmp_path, yaml, more):
    with pytest.raises(ConfigError, match="local_batch_size: is 4, but dataloader.batch_size is 2"):
        load(tmp_path, "{}", *more, yaml=BELOW + yaml)
