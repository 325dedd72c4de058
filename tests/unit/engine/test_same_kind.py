"""A model that learns answers is not measured by every word of other rows, unless that is meant."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.assess import assess
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

TALK = [{"role": "user", "content": "what is good"}, {"role": "assistant", "content": "the film"}]
ROWS = {
    "instructions": {"instruction": "what is good", "output": "the film"},
    "chats": {"messages": TALK},
    "text": {"text": "what is good the film", "ques": "what", "ans": "film"},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny.make_model_folder(tmp_path / "model", "llama")
    for name, row in ROWS.items():
        tiny.write_jsonl(tmp_path / f"{name}.jsonl", [row] * 4)

    def start(trained: str, measured: str, *settings: str):
        data = f"{trained}.jsonl" if trained in ROWS else trained
        (tmp_path / "run.yaml").write_text(
            f"model: {tmp_path / 'model'}\ntask: causal-lm\ndataset: {data}\n"
            f"validation_dataset: {{path: {measured}.jsonl}}\n"
            "step_scheduler: {max_steps: 1}\ncheckpoint: {checkpoint_dir: out}\n"
        )
        cfg = load_run_config([tmp_path / "run.yaml"], settings)
        return finetune(cfg, console=Console(file=io.StringIO()), overwrite=True)

    return start


@pytest.mark.parametrize(
    ("trained", "columns"),
    [("instructions", "column_mapping: {instruction: instruction, answer: output}"), ("chats", "messages_column")],
)
def test_answers_are_not_measured_by_every_word(run, trained, columns):
    with pytest.raises(UserError, match="its rows were read as plain text") as error:
        run(trained, "text")
    assert f"the training data are {trained}" in str(error.value)
    assert f"Name its columns (validation_dataset.{columns}" in str(error.value)
    assert "(validation_dataset.text_column: text)" in str(error.value)
    loss = run(trained, "text", "validation_dataset.text_column=text").summary["validation"]["loss"]
    assert loss > 0, "it was meant"
    folder = run(trained, trained).folder
    with pytest.raises(UserError, match="its rows were read as plain text"):
        assess(str(folder), dataset="text.jsonl")


def test_columns_that_are_named_are_measured_as_the_training_data_are(run):
    named = "validation_dataset.column_mapping={question: ques, answer: ans}"
    assert run("instructions", "text", named).summary["validation"]["loss"] > 0
    assert run("text", "instructions").summary["validation"]["loss"] > 0, "fewer words than were learned are fine"


def test_a_mixture_may_be_measured_on_its_plain_text(run):
    mixture = "{mixture: [{path: instructions.jsonl}, {path: text.jsonl, text_column: text}]}"
    folder = run(mixture, "text").folder
    assert assess(str(folder), dataset="text.jsonl").metrics.values["loss"] > 0


def test_whoever_learns_every_word_may_measure_every_word(run):
    assert run("{path: instructions.jsonl, answer_only_loss: false}", "text").summary["validation"]["loss"] > 0


def test_entries_of_a_mixture_say_themselves_what_they_are(run, tmp_path):
    entries = "[{path: text.jsonl, text_column: text}, {path: instructions.jsonl}]"
    done = run("instructions", "text", f"validation_dataset={{mixture: {entries}}}")
    assert done.summary["validation"]["loss"] > 0
