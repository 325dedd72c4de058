"""`automodel evaluate`: the numbers of training, on the run's data or on other data."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.cli.evaluate import _confusion, shortened
from automodel.cli.main import main
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

SETTINGS = "step_scheduler: {num_epochs: 6, val_every_steps: 100}\n"
LABELS = ["bad", "good"]


def named(rows):
    return [{"text": row["text"], "label": LABELS[row["label"]]} for row in rows]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a trained classifier in `out`; `bare` is the same run without a validation set."""
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        tiny.write_run(folder, kind="bert", text=SETTINGS)
        tiny.write_jsonl(folder / "train.jsonl", named(tiny.reviews(32)))
        tiny.write_jsonl(folder / "test.jsonl", named(tiny.reviews(16, seed=1)))
        tiny.write_jsonl(folder / "other.jsonl", named(tiny.reviews(10, seed=2)))
        finetune(load_run_config([folder / "run.yaml"], ["optimizer.lr=1e-2"]), console=Console(file=io.StringIO()))
        shutil.copytree(folder / "out", folder / "bare")
        config = folder / "bare" / "run" / "config.yaml"
        kept = load_run_config([config], ["validation_dataset=null", "step_scheduler.val_every_steps=null"])
        from automodel.config.load import dump_config

        config.write_text(dump_config(kept))
        (folder / "axolotl.yaml").write_text("base_model: a/b\nsequence_len: 2048\ndatasets: [{path: c}]\n")
        yield folder


@pytest.fixture
def evaluate(work, monkeypatch, capsys):
    """The command in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(work)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["automodel", "evaluate", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out, printed.err

    return run


def test_the_real_command_gives_the_last_validation(work):
    done = tiny.automodel("evaluate", work / "out", "--json", "--output", work / "metrics.json")
    found = json.loads(done.stdout)
    summary = json.loads((work / "out" / "run" / "summary.json").read_text())
    assert summary["exported_step"] == summary["steps"]
    assert found["metrics"] == pytest.approx(summary["validation"], abs=1e-6)
    assert found["confusion_matrix"] == summary["confusion_matrix"]
    assert (found["label_names"], found["rows"], found["task"]) == (LABELS, 16, "text-classification")
    assert json.loads((work / "metrics.json").read_text()) == found


def test_readable(evaluate):
    code, out, errors = evaluate("out")
    assert (code, errors) == (0, "")
    assert "test.jsonl: 16 examples" in out
    assert "\naccuracy" in out
    lines = out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split() == LABELS)
    assert [line.split()[0] for line in lines[header + 1 : header + 3]] == LABELS
    assert sum(int(n) for line in lines[header + 1 : header + 3] for n in line.split()[1:]) == 16


def test_other_data(evaluate, work):
    code, out, _ = evaluate("out", "--dataset", "other.jsonl", "--json")
    assert code == 0
    assert (json.loads(out)["rows"], json.loads(out)["dataset"]) == (10, "other.jsonl")
    _, sliced, _ = evaluate("bare", "--split", "train[:6]", "--json")
    assert (json.loads(sliced)["rows"], json.loads(sliced)["split"]) == (6, "train[:6]")
    _, limited, _ = evaluate(
        "out", "validation_dataset.num_samples_limit=4", "--validation_dataloader.batch_size", "3", "--json"
    )
    assert json.loads(limited)["rows"] == 4
    (work / "extra.yaml").write_text("validation_dataset: {num_samples_limit: 5}\n")
    _, layered, _ = evaluate("out", "-c", "extra.yaml", "--json")
    assert json.loads(layered)["rows"] == 5


def test_the_split_that_was_chosen_is_said(evaluate, work):
    (work / "splits").mkdir()
    for name in ("train", "test"):
        shutil.copy(work / "other.jsonl", work / "splits" / f"{name}.jsonl")
    assert "on splits (test): 10 examples" in evaluate("out", "--dataset", "splits")[1]
    assert "on splits (train): 10 examples" in evaluate("out", "--dataset", "splits", "--split", "train")[1]
    assert json.loads(evaluate("out", "--dataset", "splits", "--json")[1])["split"] == "test"
    assert json.loads(evaluate("out", "--dataset", "other.jsonl", "--json")[1])["split"] is None


def test_numbers_for_named_classes_are_said(evaluate, work):
    """Whether 0 means the first class, only a person can know."""
    tiny.write_jsonl(work / "numbered.jsonl", tiny.reviews(10, seed=2))
    code, out, err = evaluate("out", "--dataset", "numbered.jsonl", "--json")
    note = "validation_dataset: its labels are numbers, read as classes by their place: 0 = bad, 1 = good"
    assert (code, json.loads(out)["notes"], err) == (0, [note], f"note: {note}\n")
    named_code, named_out, named_err = evaluate("out", "--dataset", "other.jsonl", "--json")
    assert (named_code, json.loads(named_out)["notes"], named_err) == (0, [], "")
    assert json.loads(named_out)["metrics"] == json.loads(out)["metrics"]


def test_numbers_that_count_classes_in_another_order(evaluate, work):
    """`labels` says what they stand for."""
    rows = [{"text": row["text"], "label": 1 - row["label"]} for row in tiny.reviews(10, seed=2)]
    tiny.write_jsonl(work / "turned.jsonl", rows)
    _, expected, _ = evaluate("out", "--dataset", "other.jsonl", "--json")
    for key in ("validation_dataset", "dataset"):
        code, out, err = evaluate("out", "--dataset", "turned.jsonl", "--json", f"{key}.labels=[good, bad]")
        assert (code, err) == (0, "")
        assert json.loads(out)["metrics"] == json.loads(expected)["metrics"]
    code, _, err = evaluate("out", "--dataset", "turned.jsonl", "validation_dataset.labels=[good, middling]")
    assert code == 2
    assert "label 'middling' does not occur in the model's classes" in err


@pytest.fixture(scope="module")
def stars(work):
    """A classifier whose classes were listed, with names that are numbers."""
    rows = [{"text": row["text"], "label": row["label"] + 1} for row in tiny.reviews(16)]
    tiny.write_jsonl(work / "stars.jsonl", rows)
    file, data = work / "stars.yaml", work / "stars.jsonl"
    file.write_text(
        f"model: {work / 'model'}\ntask: text-classification\n"
        f"dataset: {{path: {data}, labels: ['1', '2']}}\nvalidation_dataset: {{path: {data}}}\n"
        f"step_scheduler: {{max_steps: 2}}\ncheckpoint: {{checkpoint_dir: {work / 'stars'}}}\n"
    )
    finetune(load_run_config([file]), console=Console(file=io.StringIO()))
    return work / "stars"


def test_names_that_are_numbers(evaluate, stars):
    code, out, _ = evaluate(stars, "--json")
    summary = json.loads((stars / "run" / "summary.json").read_text())
    assert code == 0
    assert json.loads(out)["metrics"] == pytest.approx(summary["validation"], abs=1e-6)


def test_the_training_data_need_not_be_there(evaluate, work):
    aside = work / "train.jsonl.aside"
    (work / "train.jsonl").rename(aside)
    try:
        assert evaluate("out", "--dataset", "other.jsonl")[0] == 0
    finally:
        aside.rename(work / "train.jsonl")


def test_plain_folder(evaluate, work):
    plain = work / "plain"
    plain.mkdir()
    for path in (work / "out").iterdir():
        if path.is_file():
            shutil.copy(path, plain)
    code, out, _ = evaluate("plain", "--dataset", "test.jsonl", "--json")
    summary = json.loads((work / "out" / "run" / "summary.json").read_text())
    assert code == 0
    assert json.loads(out)["metrics"] == pytest.approx(summary["validation"], abs=1e-6)
    code, _, errors = evaluate("plain")
    assert (code, "Say what to measure: --dataset" in errors) == (2, True)


def test_labels_the_model_does_not_know(evaluate, work):
    tiny.write_jsonl(work / "odd.jsonl", [{"text": "good", "label": "good"}, {"text": "bad", "label": "middling"}])
    code, _, errors = evaluate("out", "--dataset", "odd.jsonl")
    assert code == 2
    assert "row 1: label 'middling' does not occur in the model's classes" in errors


WRONG = [
    (["bare"], "has no validation_dataset. Name the data to measure it on with --dataset"),
    (["nowhere"], "there is no folder 'nowhere'"),
    (
        ["axolotl.yaml"],
        "is an Axolotl file (it has `base_model`), not a config of automodel. `automodel migrate axolotl",
    ),
    (["run.yaml"], "'run.yaml' is a file. Give the folder of a run that is finished (its checkpoint.checkpoint_dir)."),
    (["train.jsonl"], "'train.jsonl' is a file."),
    (["out", "--dataset", "tset.jsonl"], "there is no file or folder 'tset.jsonl' in /"),
    (["out", "--split", "dev"], "the data has no split 'dev'"),
    (["out", "--output", "metrics.txt"], "must be a .json file in a folder that exists"),
    (["out", "validation_dataset.num_sample_limit=4"], "num_samples_limit"),
    (["out", "task=causal-lm"], "a model for text-classification, but the config says task: causal-lm"),
    (["--dataloader.batch_size", "4", "out"], "the run folder comes first"),
    (["out", "--batch-size", "4"], "Did you mean `validation_dataloader.batch_size=4`?"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_wrong_uses(evaluate, arguments, message):
    code, out, errors = evaluate(*arguments)
    assert (code, out) == (2, "")
    assert errors.startswith("error: ")
    assert message in errors


def test_classes_in_the_head_of_a_matrix_stay_different():
    assert shortened(["bad", "good"], 8) == ["bad", "good"]
    assert shortened(["politics", "business"], 5) == ["poli…", "busi…"]
    assert shortened([f"LABEL_{i}" for i in range(12)], 4) == [f"…L_{i}" if i < 10 else f"…_{i}" for i in range(12)]
    assert shortened(["a long one at last", "a short one at last"], 3) is None
    assert shortened(["aa", "ab"], 1) is None


@pytest.mark.parametrize("names", [[f"LABEL_{i}" for i in range(12)], [f"the class {i} of all" for i in range(12)]])
def test_a_wide_matrix_is_readable(names):
    output = io.StringIO()
    Console(file=output, width=80).print(_confusion([[i * 12 + j for j in range(12)] for i in range(12)], names, 80))
    heads = output.getvalue().splitlines()[0].split()
    assert len(set(heads)) == 12
    assert "143" in output.getvalue()
    assert all(str(i) in head for i, head in enumerate(heads))
