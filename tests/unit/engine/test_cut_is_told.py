"""The plan, the report and an evaluation say what `max_length` cuts off, of the training and of the validation data."""

import json

import pytest

import tiny_runs as tiny
from automodel.engine.prepare import prepare_run
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    path = tiny.write_run(tmp_path, text="step_scheduler: {max_steps: 1}\n")
    for name, lengths in (("train", (3, 5, 12, 28)), ("test", (2, 6, 40))):
        rows = [{"text": " ".join(["good"] * n), "label": i % 2} for i, n in enumerate(lengths)]
        tiny.write_jsonl(tmp_path / f"{name}.jsonl", rows)
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_in_the_plan(run, packed):
    def lines(**overrides):
        given = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        plan = prepare_run(load_run_config([run], [f"packed_sequence.enabled={packed}", *given])).plan
        assert plan.path == ("packed" if packed else "padded")
        return [(d.name, d.value, d.reason) for d in plan.decisions if d.name in ("data", "cut")]

    assert lines(dataset__max_length=10) == [
        ("data", "4 examples", "32 tokens, mean 8, longest 30, cut at 10"),  # 5 and 7, and two of 10
        ("cut", "2 of 4 samples (50.0%)", "dataset: longer than max_length 10; the longest has 30 tokens"),
        ("cut", "1 of 3 samples (33.3%)", "validation_dataset: longer than max_length 10; the longest has 42 tokens"),
    ]
    assert lines() == [("data", "4 examples", "56 tokens, mean 14, longest 30, none is cut at 128")]


def test_text_that_is_split_is_as_long_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "model", "llama")
    (tmp_path / "notes.txt").write_text("good film\n" + "the plot " * 20 + "\n")
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path}/model\ntask: causal-lm\ndataset: {{path: {tmp_path}/notes.txt, max_length: 16}}\n"
    )
    plan = prepare_run(load_run_config([tmp_path / "run.yaml"])).plan
    assert "longest 41, continued in further samples of up to 16" in next(
        d.reason for d in plan.decisions if d.name == "data"
    )
    assert not [d for d in plan.decisions if d.name == "cut"]


def test_in_the_report_and_in_an_evaluation(run, tmp_path, monkeypatch, capsys):
    from automodel.cli.evaluate import _print
    from automodel.engine.assess import assess

    done = finetune(load_run_config([run], ["dataset.max_length=10"]))
    kept = json.loads((done.folder / "run" / "data.json").read_text())
    assert (kept["train"]["truncated"], kept["train"]["longest"]) == (2, 30)
    page = done.report.read_text()
    assert "train: 2 of 4 samples (50.0%) were cut at max_length 10; the longest has 30 tokens." in page
    assert "validation: 1 of 3 samples (33.3%) were cut at max_length 10; the longest has 42 tokens." in page
    capsys.readouterr()
    found = assess(done.folder)
    _print(found)
    told = "1 of 3 samples (33.3%) cut (longer than max_length 10; the longest has 42 tokens)"
    assert told in capsys.readouterr().out
    assert (found.to_json()["truncated"], found.to_json()["longest"]) == (1, 42)
