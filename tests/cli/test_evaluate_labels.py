"""`automodel evaluate` on data that write the labels in another way than training did: both verbs read them alike."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.cli.main import main
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

CLASSES = ["alpha", "beta", "gamma"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and data of several kinds, all with the same texts."""
    folder = tmp_path_factory.mktemp("labels")
    tiny.make_model_folder(folder / "model", "bert")
    texts = [row["text"] for row in tiny.reviews(12)]
    vectors = [[i % 2, int(i % 3 == 0), int(i % 5 < 2)] for i in range(12)]
    lists = [[name for name, there in zip(CLASSES, vector) if there] for vector in vectors]
    rows = {
        "lists": [{"text": t, "label": names} for t, names in zip(texts, lists)],
        "vectors": [{"text": t, "label": v} for t, v in zip(texts, vectors)],
        "columns": [{"text": t, **dict(zip(CLASSES, v))} for t, v in zip(texts, vectors)],
        "unseen": [{"text": t, "label": ["epsilon"] if i == 1 else n} for i, (t, n) in enumerate(zip(texts, lists))],
        "numbers": [{"text": t, "joy": i / 4, "anger": 3.5 - i} for i, t in enumerate(texts)],
    }
    for name, data in rows.items():
        tiny.write_jsonl(folder / f"{name}.jsonl", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def train(folder):
    def trained(out: str, data: str, validation: str, *settings: str):
        file = folder / f"{out}.yaml"
        file.write_text(
            f"model: {folder / 'model'}\ntask: text-classification\n"
            f"dataset: {{path: {folder / data}.jsonl}}\nvalidation_dataset: {{path: {folder / validation}.jsonl}}\n"
            f"step_scheduler: {{max_steps: 2}}\ncheckpoint: {{checkpoint_dir: {folder / out}}}\n{tiny.FP32}"
        )
        finetune(load_run_config([file], settings), console=Console(file=io.StringIO()))
        return json.loads((folder / out / "run" / "summary.json").read_text())["validation"]

    return trained


@pytest.fixture
def evaluate(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["automodel", "evaluate", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out, printed.err

    return run


def test_targets_in_another_order(train, evaluate):
    order = ["dataset.label_columns=[joy, anger]", "validation_dataset.label_columns=[anger, joy]"]
    expected = train("numbers", "numbers", "numbers", *order)
    code, out, err = evaluate("numbers", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["metrics"] == pytest.approx(expected, abs=1e-4)


def test_classes_in_every_form(train, evaluate):
    expected = train("multi", "lists", "lists")
    columns = "validation_dataset.label_columns=[gamma, alpha, beta]"
    for data, settings in (("lists", ()), ("vectors", ()), ("columns", (columns,))):
        code, out, err = evaluate("multi", "--dataset", f"{data}.jsonl", *settings, "--json")
        assert code == 0, err
        assert json.loads(out)["metrics"] == pytest.approx(expected, abs=1e-4)
        noted = "read by their place: 0 = alpha, 1 = beta, 2 = gamma" in err
        assert noted == (data == "vectors")
        assert train(f"on_{data}", "lists", data, *settings) == pytest.approx(expected, abs=1e-4)
    code, _, err = evaluate("multi", "--dataset", "unseen.jsonl")
    assert code == 2
    assert "row 1: label 'epsilon' does not occur in the model's classes" in err
    code, out, _ = evaluate("multi", "--dataset", "unseen.jsonl", "validation_dataset.on_bad_row=skip", "--json")
    assert (code, json.loads(out)["used"], json.loads(out)["skipped"]) == (0, 11, 1)
