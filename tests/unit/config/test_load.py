"""Layers, settings, variables, types: what the loader accepts and what it makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from automodel.config.errors import ConfigError
from automodel.config.load import dump_config, load_config
from automodel.plan.check import load_run_config
from automodel.plan.config import RunConfig

SMALL = "model: bert\ndataset: reviews.csv\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def load(*files: Path, settings: tuple[str, ...] = ()) -> RunConfig:
    return load_config(RunConfig, files, settings)


def test_three_lines_are_a_config(write):
    cfg = load(write(SMALL + "task: text-classification\n"))
    assert cfg.model.pretrained_model_name_or_path == "bert"
    assert cfg.dataset.path == "reviews.csv"
    assert cfg.task == "text-classification"
    assert cfg.optimizer.lr == 5e-5


@pytest.mark.parametrize("spelling", ["1e-4", "1E-4", "0.0001", ".0001", "1.0e-4", "+1e-4"])
def test_numbers_of_science_are_numbers(write, spelling):
    assert load(write(SMALL + f"optimizer:\n  lr: {spelling}\n")).optimizer.lr == 1e-4
    assert load(write(SMALL), settings=(f"optimizer.lr={spelling}",)).optimizer.lr == 1e-4


@pytest.mark.parametrize(("spelling", "value"), [("1e5", 100_000), ("8.0", 8), ("1_000", 1000), ("12", 12)])
def test_a_whole_number_may_be_written_as_a_float(write, spelling, value):
    steps = load(write(SMALL + f"step_scheduler:\n  max_steps: {spelling}\n")).step_scheduler.max_steps
    assert steps == value
    assert type(steps) is int


@pytest.mark.parametrize("spelling", ["none", "None", "null", "~", ""])
def test_none_is_null_where_null_is_allowed(write, spelling):
    cfg = load(
        write(SMALL + f"distributed:\n  dp_size: {spelling}\ntraining_optimizations:\n  gradient_clipping: null\n")
    )
    assert cfg.distributed.dp_size is None
    assert cfg.training_optimizations.gradient_clipping is None


def test_text_stays_as_it_is_written(write):
    cfg = load(
        write(SMALL + "wandb:\n  name: 2024\n  project: no\n  tags: [1.10, on, none]\n  notes: 'null'\n  group: 0123\n")
    )
    assert cfg.wandb is not None
    assert cfg.wandb.name == "2024"
    assert cfg.wandb.project == "no"
    assert cfg.wandb.tags == ("1.10", "on", "none")
    assert cfg.wandb.notes == "null"
    assert cfg.wandb.group == "0123"


@pytest.mark.parametrize(
    ("spelling", "value"), [("yes", True), ("On", True), ("true", True), ("no", False), ("off", False)]
)
def test_truth_values_are_yaml_s(write, spelling, value):
    assert load(write(SMALL + f"checkpoint:\n  enabled: {spelling}\n")).checkpoint.enabled is value
    assert load(write(SMALL + f"compile: {spelling}\n")).compile.enabled is value


def test_later_files_win_key_by_key(write):
    base = write(SMALL + "optimizer:\n  lr: 1e-3\n  weight_decay: 0.1\nwandb:\n  tags: [a, b]\n", "a.yaml")
    more = write("optimizer:\n  lr: 1e-4\nwandb:\n  tags: [c]\n", "b.yaml")
    cfg = load(base, more)
    assert cfg.optimizer.lr == 1e-4
    assert cfg.optimizer.weight_decay == 0.1
    assert cfg.wandb is not None
    assert cfg.wandb.tags == ("c",)


def test_layers_may_spell_keys_differently(write):
    base = write("model: {name: bert}\ndataset: {dataset_name: imdb, split: train}\n", "a.yaml")
    more = write("model: roberta\ndataset: {path: sst2}\n", "b.yaml")
    cfg = load(base, more)
    assert cfg.model.pretrained_model_name_or_path == "roberta"
    assert (cfg.dataset.path, cfg.dataset.split) == ("sst2", "train")


def test_an_empty_section_is_its_defaults_and_null_is_none(write):
    base = write(SMALL + "wandb:\n  name: x\ntensorboard:\n", "a.yaml")
    cfg = load(base)
    assert cfg.tensorboard is not None
    assert cfg.tensorboard.enabled
    assert load(base, write("wandb:\n", "b.yaml")).wandb == cfg.wandb
    assert load(base, write("wandb: null\n", "c.yaml")).wandb is None
    assert load(write(SMALL + "optimizer:\n  lr: 1\n"), settings=("optimizer=null",)).optimizer.lr == 5e-5


def test_a_new_target_drops_the_old_one_s_arguments_and_keeps_the_section_s_keys(write):
    base = write(SMALL + "optimizer:\n  _target_: torch.optim.AdamW\n  lr: 1e-3\n  amsgrad: true\n", "a.yaml")
    more = write("optimizer:\n  _target_: torch.optim.SGD\n  momentum: 0.9\n", "b.yaml")
    optimizer = load(base, more).optimizer
    assert optimizer.target == "torch.optim.SGD"
    assert optimizer.lr == 1e-3
    assert optimizer.extra == {"momentum": 0.9}
    same = write("optimizer:\n  _target_: torch.optim.adamw.AdamW\n", "c.yaml")
    assert load(base, same).optimizer.extra == {"amsgrad": True}


def test_settings_in_every_form(write):
    path = write(SMALL + "wandb:\n  tags: [a, b]\n")
    cfg = load(
        path,
        settings=(
            "--optimizer.lr=1e-5",
            "wandb.tags.1=x",
            "wandb.tags.2=y",
            "model.num_labels=3",
            "optimizer.betas.0=0.8",
            "checkpoint.checkpoint_dir=out=dir",
            "dataset.prompt_template={question} ",
            "lr_scheduler=cosine",
            "optimizer.amsgrad=true",
            "mlflow={experiment: e, tags: {a: 1}}",
        ),
    )
    assert cfg.optimizer.lr == 1e-5
    assert cfg.wandb is not None
    assert cfg.wandb.tags == ("a", "x", "y")
    assert cfg.model.pretrained_model_name_or_path == "bert"
    assert cfg.model.num_labels == 3
    assert cfg.optimizer.betas == (0.8, 0.999)
    assert cfg.checkpoint.checkpoint_dir == "out=dir"
    assert cfg.dataset.prompt_template == "{question}"
    assert cfg.lr_scheduler.name == "cosine"
    assert cfg.optimizer.extra == {"amsgrad": True}
    assert cfg.mlflow is not None
    assert cfg.mlflow.tags == {"a": "1"}


def test_a_mapping_in_braces_sets_the_whole_section_and_a_name_only_the_name(write):
    path = write("model: {name: bert, num_labels: 2}\ndataset: {path: a.csv, split: test}\n")
    cfg = load(path, settings=("dataset={path: b.csv}", "model=roberta"))
    assert (cfg.dataset.path, cfg.dataset.split) == ("b.csv", None)
    assert (cfg.model.pretrained_model_name_or_path, cfg.model.num_labels) == ("roberta", 2)


def test_settings_apply_in_order(write):
    cfg = load(write(SMALL), settings=("wandb.name=a", "wandb=null", "wandb.tags=[t]", "wandb.tags.0=u"))
    assert cfg.wandb is not None
    assert (cfg.wandb.name, cfg.wandb.tags) == (None, ("u",))


def test_variables(write, monkeypatch):
    monkeypatch.setenv("STEPS", "20")
    monkeypatch.setenv("EVIL", "{_target_: os.system}")
    monkeypatch.delenv("NOT_SET", raising=False)
    cfg = load(
        write(
            SMALL + "seed: ${NOT_SET,7}\nstep_scheduler:\n  max_steps: '${STEPS}'\n"
            "wandb:\n  name: run-${STEPS}-${NOT_SET,x}\n  notes: $${STEPS}\n  group: ${EVIL}\n"
            "  entity: ${NOT_SET,none}\n"
        )
    )
    assert cfg.seed == 7
    assert cfg.step_scheduler.max_steps == 20
    assert cfg.wandb is not None
    assert cfg.wandb.name == "run-20-x"
    assert cfg.wandb.notes == "${STEPS}"
    assert cfg.wandb.group == "{_target_: os.system}"
    assert cfg.wandb.entity is None


def test_a_missing_variable_that_is_overridden_is_no_problem(write, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    assert load(write(SMALL + "seed: ${NOT_SET}\n"), settings=("seed=3",)).seed == 3


def test_json_with_comments(write):
    path = write(
        '{\n\t"model": "bert", // the model\n\t# a note\n\t"dataset": {"path": "http://x/y.csv"},\n'
        '\t"optimizer": {"lr": 2e-5}, "wandb": {"name": "\\ud83d\\ude00 #1"}\n}\n',
        "run.json",
    )
    cfg = load(path)
    assert cfg.dataset.path == "http://x/y.csv"
    assert cfg.optimizer.lr == 2e-5
    assert cfg.wandb is not None
    assert cfg.wandb.name == "😀 #1"


def test_anchors_and_merge_keys(write):
    cfg = load(
        write(
            "model: bert\ndataset: &d {path: imdb, max_length: 64, split: train}\n"
            "validation_dataset: {<<: *d, split: test}\n"
        )
    )
    assert cfg.validation_dataset is not None
    assert (cfg.validation_dataset.path, cfg.validation_dataset.split) == ("imdb", "test")
    assert cfg.validation_dataset.max_length == 64


def test_exponential_aliases_are_refused_quickly(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="repeat without end"):
        load(write("\n".join(lines)))


def test_dump_reads_back_to_the_same_config(write):
    text = (
        "model: {_target_: nemo_automodel.NeMoAutoModelForSequenceClassification.from_pretrained, name: bert,"
        " hidden_dropout_prob: 0.0, names: ['none', '1e-4', yes]}\n"
        "dataset: {path: a.csv, prompt_template: '$${x} {y}'}\n"
        "optimizer: {_target_: torch.optim.SGD, momentum: 0.9}\n"
        "training_optimizations: {gradient_clipping: null}\nwandb: {name: 'null', tags: [a, 'no']}\nfp8:\n"
    )
    cfg = load(write(text))
    dumped = dump_config(cfg)
    assert load(write(dumped, "again.yaml")) == cfg
    assert "_target_: torch.optim.SGD" in dumped
    assert "betas" not in dumped
    assert cfg.model.extra["names"] == ["none", "1e-4", True]


def test_the_smallest_config_s_dump_names_every_default(write):
    cfg = load(write(SMALL))
    assert "lr: 5.0e-05" in dump_config(cfg)
    assert load(write(dump_config(cfg), "again.yaml")) == cfg


def test_configs_are_frozen(write):
    cfg = load(write(SMALL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.seed = 1  # ty: ignore[invalid-assignment]


def test_unknown_keys_of_a_model_go_to_its_own_config(write):
    assert load(write("model: {name: bert, attention_dropout: 0.1}\ndataset: x\n")).model.extra == {
        "attention_dropout": 0.1
    }


def test_remote_code_needs_the_command_line_too(write):
    path = write("model: {name: bert, trust_remote_code: true}\ndataset: x\n")
    with pytest.raises(ConfigError, match="--trust remote_code"):
        load_run_config([path])
    assert load_run_config([path], trust=["remote_code"]).model.trust_remote_code
