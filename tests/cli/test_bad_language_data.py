"""What can be wrong with the data of a language model is said before its weights are read, everything at once and with
row numbers. The model folder of these tests has no weights: whoever tried to load them would say something else."""

from __future__ import annotations

import json

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "what is good ?"}, {"role": "assistant", "content": "the film"}]}
SILENT = {"messages": [{"role": "user", "content": "what is good ?"}]}
ASKED = {"context": "the film is good", "question": "what is good ?", "answer": "the film"}
LONG = {**ASKED, "context": "good film " * 100}
MASKED = {"input_ids": [5, 6, 7, 8], "labels": [-100] * 4}
LABELLED = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}
SQUAD = {**{k: ASKED[k] for k in ("context", "question")}, "answers": {"text": ["the film"], "answer_start": [0]}}
UNANSWERED = {**SQUAD, "answers": {"text": [], "answer_start": []}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "model", "llama")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path


def config(folder, train: list[dict], validation: list[dict] | None = None, text: str = "", keys: str = ""):
    tiny.write_jsonl(folder / "train.jsonl", train)
    lines = [
        f"model: {folder / 'model'}",
        "task: causal-lm",
        f"dataset: {{path: {folder / 'train.jsonl'}{keys}}}",
        f"checkpoint: {{checkpoint_dir: {folder / 'out'}}}",
    ]
    if validation is not None:
        tiny.write_jsonl(folder / "test.jsonl", validation)
        lines.append(f"validation_dataset: {{path: {folder / 'test.jsonl'}}}")
    (folder / "run.yaml").write_text("\n".join([*lines, text]) + "\n")
    return folder / "run.yaml"


def complaint(path) -> str:
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    with pytest.raises(UserError) as caught:
        finetune(load_run_config([path]))
    assert not (path.parent / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "keys", "lines"),
    [
        ([GOOD, SILENT, GOOD, SILENT], "", ["2 of 4 rows", "row 1: the conversation has no assistant", "row 3: "]),
        ([SILENT] * 30, "", ["30 of 30 rows", "row 0: ", "row 19: ", "… and 10 more"]),
        ([LABELLED, MASKED, MASKED], "", ["2 of 3 rows", "row 1: no token of the row carries a label", "row 2: "]),
        ([MASKED], "", ["1 of 1 rows", "row 0: no token of the row carries a label"]),
        ([ASKED, LONG], "", ["row 1: nothing of the answer is left: the prompt has 2", "max_length is 128"]),
        ([ASKED], ", max_length: 4096", ["dataset.max_length is 4,096, but the model has only 128 positions"]),
        (
            [ASKED],
            ", column_mapping: {context: ctx, question: question, answer: answr}",
            ["2 problems", "no column 'ctx'", "Did you mean 'answer'?"],
        ),
        ([SQUAD, UNANSWERED], "", ["1 of 2 rows", "row 1: the answer is missing"]),
        ([{"text": " "}, {"text": "good film"}], "", ["row 0: the text is empty"]),
        ([], "", ["has no rows"]),
    ],
    ids=["silent", "all silent", "masked", "all masked", "long", "limit", "columns", "squad", "empty text", "no rows"],
)
def test_named_before_the_weights_are_read(folder, rows, keys, lines):
    message = complaint(config(folder, rows, keys=keys))
    for line in lines:
        assert line in message


def test_everything_wrong_with_both_parts_is_one_list(folder):
    path = config(folder, [GOOD], [SILENT, GOOD], keys=", messages_column: mesages, max_length: 4096")
    result = tiny.automodel("finetune", "llm", "-c", path, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: 4 problems with the data\n- dataset.max_length is 4,096")
    assert result.stderr.count("problems with the data") == 1
    assert "\n- dataset.messages_column: the data has no column 'mesages'" in result.stderr
    assert "\n- validation_dataset.messages_column: the data has no column 'mesages'" in result.stderr
    assert "Traceback" not in result.stderr
    message = complaint(config(folder, [GOOD, SILENT], [SILENT, GOOD]))
    assert "- dataset: 1 of 2 rows cannot be used" in message
    assert "- validation_dataset: 1 of 2 rows cannot be used" in message
    assert "\n    row 1: the conversation has no assistant message" in message


def test_rows_that_are_left_out_are_a_line_of_the_plan(folder):
    path = config(folder, [GOOD, SILENT, GOOD], keys=", on_bad_row: skip")
    plan = json.loads(tiny.automodel("plan", "-c", path, "--json").stdout)
    reasons = [line["reason"] for line in plan["decisions"] if line["name"] == "note"]
    why = "row 1: the conversation has no assistant message"
    assert reasons == [f"1 of 3 rows are left out (dataset.on_bad_row: skip); the first, {why}"]


def test_a_missing_chat_template_is_an_error_and_one_that_is_named_is_kept_with_the_model(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    model = tiny.make_model_folder(tmp_path / "model", "llama")
    (model / "chat_template.jinja").unlink()
    path = config(tmp_path, [GOOD] * 4, text="step_scheduler: {max_steps: 1}")
    refused = tiny.automodel("plan", "-c", path, check=False)
    assert refused.returncode == 2
    assert "Set dataset.chat_template to a Jinja template's file, or to `plain`" in refused.stderr
    path = config(tmp_path, [GOOD] * 4, keys=", chat_template: plain", text="step_scheduler: {max_steps: 1}")
    finished = finetune(load_run_config([path]))
    assert "### Assistant:" in AutoTokenizer.from_pretrained(finished.folder).chat_template


def test_a_template_that_is_not_there_hides_nothing(folder):
    keys = f", chat_template: {folder / 'chat.jinja'}, max_length: 4096"
    message = complaint(config(folder, [GOOD, SILENT], [SILENT, GOOD], keys=keys))
    for line in ("dataset.chat_template: there is no file", "dataset.max_length is 4,096"):
        assert f"- {line}" in message
    assert "row 1: the conversation has no assistant" in message
    assert "row 0: the conversation has no assistant" in message
