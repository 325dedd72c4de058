"""What a newcomer gets wrong, typed at the real command; each message is here whole, to be read as prose.

The config's and the data's own errors have files of their own (wrong_configs.md, test_wrong_datasets.py); these are the
ones in between, found by trying.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tiny_runs as tiny

BASE = "model: model\ntask: text-classification\ndataset: train.jsonl\n"


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Types a command in a folder with a model, some data and run.yaml; returns exit code and message."""
    tiny.make_model_folder(tmp_path / "model")
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.reviews(24))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()

    def type_in(*words: str, config: str = BASE) -> tuple[int, str]:
        from automodel.cli.main import main

        Path("run.yaml").write_text(config)
        monkeypatch.setattr(sys, "argv", ["automodel", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        return stopped.value.code, (said.err or said.out).rstrip("\n")

    return type_in


def test_the_kind_of_model_left_out(typed):
    assert typed("finetune", "-c", "run.yaml", "optimizer.lr=1e-5") == (
        2,
        "error: the kind of model comes first: automodel finetune llm -c run.yaml optimizer.lr=1e-5",
    )
    assert typed("finetune", "run.yaml") == (
        2,
        "error: `automodel finetune run.yaml` is not known. Write `automodel finetune llm -c run.yaml`.",
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            BASE.replace("model: model", "model: {name: model, attn_implementation: flash_atention_2}"),
            (
                "1 problem in the config\n  run.yaml:1: model.attn_implementation: there is no 'flash_atention_2'; "
                "use one of flash_attention_2, flash_attention_3, flash_attention_4, sdpa, eager. "
                "Did you mean `flash_attention_2`?"
            ),
        ),
        (
            BASE + "validation_dataset: train.jsonl\ncheckpoint: {best_metric: f1}\nearly_stopping: {metric: loss}\n",
            (
                "1 problem in the config\n  run.yaml:6: early_stopping.metric: is loss, but checkpoint.best_metric is "
                "f1; one metric decides both. Keep one of the two."
            ),
        ),
        (
            BASE + "lr_scheduler: {name: cosine, power: 2}\n",
            (
                "1 problem in the config\n  run.yaml:4: lr_scheduler.power: belongs to `name: polynomial`, but the "
                "name is `cosine`."
            ),
        ),
        (BASE.replace("train.jsonl", "empty.jsonl"), "dataset.path: 'empty.jsonl' has no rows."),
        (BASE.replace("train.jsonl", "model"), "dataset.path: the folder 'model' holds a model, not data."),
        (
            BASE.replace("train.jsonl", "excel.csv"),
            (
                "dataset.path: 'excel.csv' has one column, called 'text;label'. Its cells seem to be separated by ';': "
                "save it with commas, or with tabs as .tsv."
            ),
        ),
    ],
    ids=["attention", "two metrics", "power", "empty file", "a model as data", "semicolons"],
)
def test_messages(typed, config, message):
    Path("empty.jsonl").touch()
    Path("excel.csv").write_text("text;label\ngood film;1\nbad film;0\n")
    assert typed("finetune", "llm", "-c", "run.yaml", config=config) == (2, f"error: {message}")
    assert not Path("checkpoints").exists()


def test_the_plan_says_what_was_made_of_the_labels(typed):
    rows = [{"text": row["text"], "label": float(row["label"])} for row in tiny.reviews(24)]
    tiny.write_jsonl(Path("decimals.jsonl"), rows)
    code, said = typed("plan", "-c", "run.yaml", "dataset=decimals.jsonl", "validation_dataset=decimals.jsonl")
    assert code == 0
    assert (
        "columns      text → label  (regression, since the labels are decimals; for classes set model.problem_type)"
        in said
    )
    assert (
        "note         data  (validation_dataset has the same texts as dataset: its numbers say nothing about new data)"
        in said
    )
    classes = "model.problem_type=single_label_classification"
    assert "2 classes" in typed("plan", "-c", "run.yaml", "dataset=decimals.jsonl", classes)[1]
    assert "regression, since model.num_labels is 1;" in typed("plan", "-c", "run.yaml", "model.num_labels=1")[1]


def test_a_metric_that_is_not_measured_is_the_fault_of_the_key_that_names_it(typed):
    wrong = "validation_dataset: train.jsonl\nearly_stopping: {patience: 1, metric: acuracy}\n"
    said = (
        "error: early_stopping.metric: 'acuracy' is not measured for this task. Choose from loss, accuracy, f1, "
        "precision, recall, mcc, auroc. Did you mean 'accuracy'?"
    )
    assert typed("plan", "-c", "run.yaml", config=BASE + wrong) == (2, said)


def test_the_plan_as_json_is_only_json(typed):
    code, said = typed("plan", "-c", "run.yaml", "--json")
    assert code == 0
    assert json.loads(said)["total_steps"] == 9


def test_a_warm_up_longer_than_the_run_and_steps_in_words(typed):
    code, said = typed(
        "plan",
        "-c",
        "run.yaml",
        "step_scheduler.max_steps=2",
        "lr_scheduler.warmup_steps=100",
        "dataset.split=train[:8]",
    )
    assert code == 0
    assert "schedule     linear  (100 warm-up steps, but only 2 steps: it ends at 5.0e-7)" in said
    assert "checkpoints  every step  " in said


def test_a_checkpoint_that_is_in_few_bits_already(typed):
    """Trained to its end and then not saved, or stopped by a product of the wrong shapes."""
    config = json.loads(Path("model/config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    Path("model/config.json").write_text(json.dumps(config))
    message = (
        "error: model: the weights of 'model' are in few bits already (quantization_config: bitsandbytes), which "
        "cannot be trained. Name the model that they were made from; with `peft:`, "
        "`quantization: {load_in_4bit: true}` packs it while it is loaded."
    )
    for adapter in ("", "peft: {dim: 4}\nquantization: {load_in_4bit: true}\n"):
        assert typed("finetune", "llm", "-c", "run.yaml", config=BASE + adapter) == (2, message)


def test_a_file_that_the_disk_refuses_is_named(typed, monkeypatch):
    """Such errors came with a traceback, as if they were ours."""
    from safetensors import SafetensorError

    import automodel.plan.check as verb

    for error, said in (
        (OSError(28, "No space left on device", "out.md"), "refused out.md: No space left on device. Make room"),
        (PermissionError(13, "Permission denied", "out.md"), "refused out.md: Permission denied. Allow it"),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "refused a file: No space left on device. Make room",
        ),
    ):
        monkeypatch.setattr(verb, "load_run_config", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        message = f"error: the file system {said}, or name another place."
        assert typed("config", "validate", "-c", "run.yaml") == (1, message)
