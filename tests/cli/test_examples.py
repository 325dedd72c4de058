"""Examples: listed, copied without ever replacing anything, valid, and those that bring data really train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from automodel.cli.config import app as config_app
from automodel.cli.examples import all_examples, app, examples_root, find_example
from automodel.config.errors import UserError
from automodel.plan.check import load_run_config, not_yet
from tiny_runs import make_model_folder

NAMES = [example.name for example in all_examples()]
WITH_DATA = [example.name for example in all_examples() if example.data()]
TINY = {"text-classification": "bert", "token-classification": "bert", "causal-lm": "llama", "seq2seq": "t5"}
EXPECTED = {
    "text_classification_minimal", "imdb_distilbert", "text_pairs", "multi_label", "regression", "token_classification",
    "t5_summarisation", "bart_summarisation", "chat_sft", "instruction_sft", "plain_text_lm", "trackers",
    "early_stopping", "llama_3_2_1b_squad", "smollm2_squad", "long_context", "qlora_chat",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model_folder(root / kind, kind) for kind in set(TINY.values())}


def copy(name: str, *dest: str):
    result = CliRunner().invoke(app, ["cp", name, *dest])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_every_kind_of_run_has_an_example():
    assert set(NAMES) >= EXPECTED
    assert len(NAMES) == len(set(NAMES))


def test_ls_shows_each_name_with_what_it_is():
    output = CliRunner().invoke(app, ["ls"]).output
    lines = {line.split()[0]: line for line in output.splitlines() if line}
    for example in all_examples():
        assert lines[example.name].endswith(example.description)
        assert 20 < len(example.description) < 120, example.name
    assert "data" not in lines


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_valid_and_asks_for_nothing_unbuilt(name: str):
    path = find_example(name).path
    result = CliRunner().invoke(config_app, ["validate", "-c", str(path)])
    assert result.exit_code == 0, result.exception
    assert result.output.startswith("ok: ")
    assert not_yet(load_run_config([path])) == []


def test_the_minimal_example_has_four_lines():
    lines = find_example("text_classification_minimal").path.read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == 4


@pytest.mark.parametrize("name", [name for name in WITH_DATA if name != "trackers"])
def test_examples_that_bring_data_train_where_they_are_copied_to(name, models, tmp_path, monkeypatch):
    from automodel.engine.run import finetune

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "tokens"))
    copy(name)
    task = load_run_config([f"{name}.yaml"]).task
    assert task is not None
    overrides = [f"model={models[TINY[task]]}", "step_scheduler.max_steps=2", "dataset.max_length=100"]
    problem = load_run_config([f"{name}.yaml"]).model.problem_type
    overrides += [f"model.problem_type={problem}"] if problem else []
    finished = finetune(load_run_config([f"{name}.yaml"], overrides))
    assert finished.summary["steps"] == 2
    assert finished.summary["problem_type"] == (problem or finished.summary["problem_type"])
    assert 0 < finished.summary["train_loss"] < 50
    assert any((finished.folder / name).is_file() for name in ("model.safetensors", "adapter_model.safetensors"))


def test_cp_takes_the_data_along_and_says_how_to_run_it(tmp_path):
    output = copy("chat_sft", str(tmp_path))
    assert f"Copied {tmp_path / 'chat_sft.yaml'}" in output
    assert "automodel finetune llm -c chat_sft.yaml" in output
    assert {p.name for p in (tmp_path / "data").iterdir()} == {
        "json_answers_train.jsonl",
        "json_answers_held_out.jsonl",
    }


def test_cp_to_a_file_name(tmp_path):
    copy("text/multi_label.yaml", str(tmp_path / "mine.yaml"))
    assert (tmp_path / "mine.yaml").read_bytes() == find_example("multi_label").path.read_bytes()
    assert (tmp_path / "data" / "support_tickets.jsonl").is_file()


def test_cp_never_replaces_a_file(tmp_path):
    mine = tmp_path / "regression.yaml"
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"regression.yaml already exists and is not replaced. Name another file"):
        copy("regression", str(tmp_path))
    assert mine.read_text() == "mine"
    assert not (tmp_path / "data").exists()


def test_cp_never_replaces_changed_data_but_shares_what_is_the_same(tmp_path):
    copy("text_classification_minimal", str(tmp_path))
    copy("trackers", str(tmp_path))
    (tmp_path / "data" / "film_opinions.csv").write_text("text,label\nmine,positive\n")
    with pytest.raises(UserError, match="film_opinions.csv already exists"):
        copy("trackers", str(tmp_path / "again.yaml"))
    assert not (tmp_path / "again.yaml").exists()


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(UserError, match=r"no example `multi-lable`. Did you mean `multi_label`\?"):
        copy("multi-lable")


def test_questions_held_out_from_the_chat_example_are_not_in_its_training_data():
    def questions(name: str) -> list[str]:
        lines = (examples_root() / "data" / f"json_answers_{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line)["messages"] for line in lines]
        for row in rows:
            assert set(json.loads(row[1]["content"])) == {"answer", "topic"}
        return [row[0]["content"].lower() for row in rows]

    train, held_out = questions("train"), questions("held_out")
    assert len(train) == len(set(train)) >= 60
    assert len(held_out) == len(set(held_out)) >= 10
    assert not set(train) & set(held_out)
