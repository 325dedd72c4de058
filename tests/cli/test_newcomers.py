"""What a newcomer gets wrong, typed at the real command; each message is here whole, to be read as prose.

The config's and the data's own errors have files of their own (wrong_configs.md, test_wrong_datasets.py); these are the
ones in between, found by trying.
"""

from __future__ import annotations

import json
import re
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


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "-c", "run.yaml"),
        ("finetune", "run.yaml"),
        ("finetune", "llm", "run.yaml"),
        ("finetune", "--dry-run", "run.yaml"),
        ("plan", "run.yaml"),
        ("plan", "run.yaml", "--json"),
        ("data", "preview", "run.yaml"),
        ("config", "validate", "run.yaml"),
        ("config", "show", "run.yaml"),
        ("benchmark", "run.yaml"),
        ("launch", "ray", "run.yaml", "--workers", "1"),
    ],
)
def test_the_kind_of_model_and_the_flag_of_the_config_may_be_left_out(typed, words):
    """The key that is wrong is read from the file, so the file was found; settings behind it are read, too."""
    code, said = typed(*words, "optimizer.lr=fast", config=BASE + "sede: 3\n")
    assert code == 2
    assert "run.yaml:4: sede: there is no such key; did you mean `seed`?" in said
    assert "command line: optimizer.lr: expected a number" in said


def test_a_run_without_kind_and_flag_trains(typed):
    more = "step_scheduler: {max_steps: 2}\ncheckpoint: {checkpoint_dir: out}\n"
    assert typed("finetune", "run.yaml", config=BASE + more)[0] == 0
    assert (Path("out") / "config.json").is_file()


def test_a_file_that_is_a_value_is_no_config(typed):
    code, said = typed("plan", "run.yaml", "--dataset.path", "gone.json")
    assert (code, "gone.json" in said, "run.yaml" in said) == (2, True, False), said


@pytest.mark.parametrize("verb", ["finetune", "plan", "benchmark", "config validate", "data preview", "launch slurm"])
def test_no_config_at_all(typed, verb):
    code, said = typed(*verb.split(), "seed=3")
    name = "finetune llm" if verb == "finetune" else verb
    assert (code, said) == (
        2,
        f"error: no config file is given. Write `automodel {name} -c run.yaml`; `automodel examples` has some.",
    )


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["train", "-c", "run.yaml"], "`automodel finetune -c run.yaml` trains a model."),
        (["modelforge", "run"], "`modelforge run` is `automodel finetune -c settings.json` here"),
        (["chat"], "`automodel generate RUN` lets a fine-tuned language model answer."),
        (["serve"], "There is no server"),
        (["ui"], "There are no pages for a browser."),
        (["studio"], "There are no pages for a browser."),
        (["compare"], "`automodel benchmark -c run.yaml` compares"),
    ],
)
def test_commands_that_other_tools_have(typed, words, instead):
    code, said = typed(*words)
    assert code == 2
    assert said.startswith(f"error: there is no command `{words[0]}`. {instead}")
    assert "\n" not in said


def test_hints_name_commands_that_are_there():
    from automodel.cli.main import ELSEWHERE, VERBS

    named = {verb for text in ELSEWHERE.values() for verb in re.findall(r"`automodel (\w+)", text)}
    assert named <= {*VERBS}
    assert not {*ELSEWHERE} & {*VERBS}


def test_a_config_given_to_run(typed):
    assert typed("run", "run.yaml") == (
        2,
        "error: run.yaml is no Python script. A config is trained by `automodel finetune -c run.yaml`.",
    )


AXOLOTL = "base_model: some/model\ndatasets: [{path: a.jsonl, type: alpaca}]\nsequence_len: 512\nadapter: lora\n"
FACTORY = "model_name_or_path: some/model\nstage: sft\nfinetuning_type: lora\ndataset: alpaca_en_demo\n"


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "-c", "other.yml"),
        ("finetune", "llm", "-c", "run.yaml", "-c", "other.yml"),
        ("plan", "other.yml"),
        ("config", "validate", "-c", "other.yml"),
        ("config", "show", "-c", "other.yml"),
        ("data", "preview", "-c", "other.yml"),
        ("benchmark", "-c", "other.yml"),
        ("launch", "slurm", "-c", "other.yml"),
        ("evaluate", "model", "-c", "other.yml"),
    ],
)
@pytest.mark.parametrize(
    ("text", "tool", "key"),
    [
        (AXOLOTL, "an Axolotl", "base_model"),
        ("adapter: lora\nlora_r: 16\nmicro_batch_size: 2\n", "an Axolotl", "adapter"),
        (FACTORY, "a LLaMA-Factory", "finetuning_type"),
        ("cutoff_len: 512\nlearning_rate: 1e-4\n", "a LLaMA-Factory", "cutoff_len"),
    ],
)
def test_files_of_other_tools(typed, words, text, tool, key):
    Path("other.yml").write_text(text)
    assert typed(*words) == (
        2,
        (
            f"error: other.yml is {tool} file (it has `{key}`), not a config of automodel. "
            "`automodel migrate other.yml -o run.yaml` makes one of it."
        ),
    )


def test_a_fragment_is_migrated_and_its_holes_are_refused_until_they_are_filled(typed):
    Path("part.yml").write_text("adapter: lora\nlora_r: 16\nlora_target_linear: true\nsequence_len: 256\n")
    code, said = typed("migrate", "part.yml", "-o", "made.yaml")
    assert (code, said) == (
        0,
        "Wrote made.yaml.\nFill in, or give in another -c: model, dataset (written as FILL-IN).\n"
        "Done differently here:\n"
        + "\n".join(
            f"  {key} is not given: the default of this library, where the other files say nothing"
            for key in ("micro_batch_size", "learning_rate", "lr_scheduler", "num_epochs", "bf16")
        ),
    )
    lines = Path("made.yaml").read_text().splitlines()
    assert "model: FILL-IN" in lines
    assert not {"training_optimizations:", "checkpoint:"} & {*lines}, "a fragment changes what it says alone"
    model, data = lines.index("model: FILL-IN") + 1, lines.index("  path: FILL-IN") + 1
    still = "is still FILL-IN. Write the value there, or give it in another file or as"
    code, said = typed("config", "validate", "made.yaml")
    assert (code, said.splitlines()) == (
        2,
        [
            "error: 2 problems in the config",
            f"  made.yaml:{model}: model: {still} `model=…`.",
            f"  made.yaml:{data}: dataset.path: {still} `dataset.path=…`.",
        ],
    )
    assert typed("config", "validate", "made.yaml", "model=model", "dataset.path=train.jsonl")[0] == 0
    for files in (("run.yaml", "made.yaml"), ("made.yaml", "run.yaml")):  # a hole never wins over a value
        config = BASE.replace("text-classification", "causal-lm")
        assert typed("config", "validate", *files, config=config)[0] == 0
    code, said = typed("finetune", "run.yaml", config=BASE.replace("model: model", "model: FILL-IN"))
    assert (code, said.splitlines()[1:]) == (2, [f"  run.yaml:1: model: {still} `model=…`."])


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
        (
            BASE.replace("train.jsonl", "empty.jsonl"),
            "dataset.path: 'empty.jsonl' has no rows. Name a file that has some.",
        ),
        (
            BASE.replace("train.jsonl", "model"),
            "dataset.path: the folder 'model' holds a model, not data. Name a file or a folder of data.",
        ),
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
    assert re.search(r"^schedule +linear  \(100 warm-up steps, but only 2 steps: it ends at 5.0e-7\)$", said, re.M)
    assert re.search(r"^checkpoints +every step  ", said, re.M)


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
