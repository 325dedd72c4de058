"""`automodel predict`: texts, files and stdin in; predictions out; every wrong use in words."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.cli.main import main
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

FAST = "step_scheduler: {num_epochs: 8, val_every_steps: 100}\n"
ROWS = [{"id": 7, "text": "good great film"}, {"id": 8, "text": "bad awful plot"}, {"id": 9, "text": "lovely and warm"}]


def quietly(config: Path) -> Path:
    return finetune(load_run_config([config], ["optimizer.lr=1e-2"]), console=Console(file=io.StringIO())).folder


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a trained classifier in `out`, and a language model in `chat/out`."""
    folder = tmp_path_factory.mktemp("predict")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        (folder / "chat").mkdir()
        labels = ["bad", "good"]
        run = tiny.write_run(folder, kind="distilbert", text=FAST)
        tiny.write_jsonl(
            folder / "train.jsonl", [{"review": r["text"], "label": labels[r["label"]]} for r in tiny.reviews(32)]
        )
        run.write_text(run.read_text().replace("train.jsonl}", "train.jsonl, text_column: review}"))
        tiny.write_jsonl(folder / "test.jsonl", [{"review": "good film", "label": "good"}])
        (folder / "axolotl.yaml").write_text("base_model: a/b\nsequence_len: 2048\ndatasets: [{path: c}]\n")
        quietly(run)
        chat = tiny.write_run(folder / "chat", kind="llama", text="step_scheduler: {max_steps: 2}\n")
        rows = [{"instruction": "what is good", "input": "", "output": "fine"}] * 2
        tiny.write_jsonl(folder / "chat" / "train.jsonl", rows)
        tiny.write_jsonl(folder / "chat" / "test.jsonl", rows)
        chat.write_text(chat.read_text().replace("text-classification", "causal-lm"))
        quietly(chat)
        yield folder


@pytest.fixture
def predict(work, monkeypatch, capsys):
    """The command in this process: exit code, lines on stdout, text on stderr."""
    monkeypatch.chdir(work)

    def run(*arguments: object, stdin: str = "") -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "argv", ["automodel", "predict", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out.splitlines(), printed.err

    return run


def test_the_real_command(work):
    done = tiny.automodel("predict", work / "out", "good great film", "awful dull plot", "--json")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["text"], first["prediction"], second["prediction"]) == ("good great film", "good", "bad")
    assert first["scores"].keys() == {"bad", "good"}
    assert sum(first["scores"].values()) == pytest.approx(1)
    assert first["score"] == first["scores"]["good"] > 0.5


def test_readable(predict):
    code, lines, errors = predict("out", "good film", "bad " * 40)
    assert (code, errors) == (0, "")
    assert lines[0].startswith("good  [good 0.")
    assert lines[0].endswith("]  good film")
    assert lines[1].endswith("bad bad bad…")


def test_files_keep_their_columns_and_order(predict, work):
    source = tiny.write_jsonl(work / "new.jsonl", ROWS)
    # The run was trained on a column `review`; this file calls it `text`.
    code, lines, errors = predict("out", "--input", source, "--output", work / "a.jsonl")
    assert (code, lines) == (2, [])
    assert errors == (
        "error: --input has no column 'review', which the run was trained on. It has: id (integers), text (text). "
        "Name the right one with --text-column, or rename it.\n"
    )
    code, lines, errors = predict("out", "--input", source, "--text-column", "text", "--output", work / "a.jsonl")
    assert (code, lines, errors) == (0, [], f"Wrote 3 rows to {work / 'a.jsonl'}\n")
    written = [json.loads(line) for line in (work / "a.jsonl").read_text().splitlines()]
    assert [row["id"] for row in written] == [7, 8, 9]
    again = ("out", "--input", source, "--text-column", "text", "--output", work / "a.jsonl")
    refusal = f"error: --output: '{work / 'a.jsonl'}' exists. Name another file, or replace it with --overwrite.\n"
    assert predict(*again) == (2, [], refusal)
    assert predict(*again, "--overwrite")[0] == 0
    assert [row["prediction"] for row in written] == ["good", "bad", "good"]
    predict("out", "-i", source, "--text-column", "text", "-o", work / "a.csv", "--batch-size", 1)
    with open(work / "a.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["id", "text", "prediction", "score", "scores"]
    for row, other in zip(table, written):
        assert (row["text"], row["prediction"]) == (other["text"], other["prediction"])
        assert json.loads(row["scores"]) == pytest.approx(other["scores"], abs=1e-6)


def test_csv_text_and_stdin(predict, work):
    (work / "new.csv").write_text("review,who\ngood great film,a\nawful,b\n")
    _, from_csv, _ = predict("out", "-i", work / "new.csv", "--json")
    assert [json.loads(line)["who"] for line in from_csv] == ["a", "b"]
    (work / "new.txt").write_text("good great film\nawful\n")
    _, from_text, _ = predict("out", "-i", work / "new.txt", "--text-column", "text", "--json")
    _, from_stdin, _ = predict("out", "-", "--json", stdin="good great film\nawful\n")
    assert [json.loads(line) for line in from_text] == [json.loads(line) for line in from_stdin]
    assert [json.loads(line)["scores"] for line in from_csv] == [json.loads(line)["scores"] for line in from_stdin]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_is_one_text_whatever_is_in_it(predict, work, end):
    """`str.splitlines` ends lines at these too."""
    texts = ["good\u2028great film", "awful\x0cplot", "lovely\x85and\x1cwarm", "bad\u2029\x0bfilm"]
    (work / "odd.txt").write_bytes(end.join(texts).encode())
    asked = {"stdin": ("-",), "file": ("-i", work / "odd.txt", "--text-column", "text")}
    for where, arguments in asked.items():
        target = work / f"odd-{where}-{len(end)}.jsonl"
        code, _, errors = predict("out", *arguments, "-o", target, stdin=end.join(texts) + end)
        assert (code, errors) == (0, f"Wrote 4 rows to {target}\n")
        rows = [json.loads(line) for line in target.read_text().split("\n")[:-1]]
        assert [row["text"] for row in rows] == texts


def test_blank_lines_of_a_text_file_are_named_as_those_of_stdin(predict, work):
    text = "good film\n\nbad film\nawful\n \n"
    (work / "gaps.txt").write_text(text)
    asked = {"stdin": ("-",), "file": ("-i", work / "gaps.txt", "--text-column", "text")}
    refused = [predict("out", *arguments, stdin=text) for arguments in asked.values()]
    assert refused[0] == refused[1]
    assert "2 of 5 rows cannot be used" in refused[0][2]
    assert "row 1: the text is empty\n  row 4: the text is empty\n" in refused[0][2]
    skipped = [predict("out", *a, "--json", "--on-bad-row", "skip", stdin=text) for a in asked.values()]
    assert skipped[0] == skipped[1]
    assert [json.loads(line)["prediction"] for line in skipped[1][1]] == ["good", None, "bad", "bad", None]


def test_a_folder_of_text_files_has_a_text_in_each(predict, work):
    (work / "letters").mkdir()
    for name in ("a", "b"):
        (work / "letters" / f"{name}.txt").write_text("good film\n\nlovely\n")
    code, lines, _ = predict("out", "-i", work / "letters", "--text-column", "text", "--json")
    assert (code, [json.loads(line)["text"] for line in lines]) == (0, ["good film\n\nlovely\n"] * 2)


def test_both_texts_of_a_pair_are_shown(predict):
    code, lines, _ = predict("out", "good film " * 9, "good", "--pair", "bad plot " * 9, "--pair", "awful")
    assert code == 0
    assert lines[0].endswith("]  good film good film good fi… | bad plot bad plot bad plot …")
    assert lines[1].endswith("]  good | awful")


def test_the_split_of_a_folder_can_be_chosen(predict, work):
    (work / "splits").mkdir()
    for name, text in (("train", "good"), ("test", "bad"), ("validation", "plot")):
        tiny.write_jsonl(work / "splits" / f"{name}.jsonl", [{"review": text}] * 2)
    code, lines, errors = predict("out", "-i", "splits", "--json")
    assert (code, json.loads(lines[0])["review"]) == (0, "good")
    told = "note: --input: the rows are those of the split train; there is also test, validation. Choose with --split\n"
    assert errors == told
    code, lines, errors = predict("out", "-i", "splits", "--split", "test[:1]", "--json")
    assert (code, [json.loads(line)["review"] for line in lines], errors) == (0, ["bad"], "")
    assert predict("out", "-i", "splits/test.jsonl", "--json")[2] == ""
    code, _, errors = predict("out", "-i", "splits", "--split", "dev")
    assert (code, errors.startswith("error: --split: the data has no split 'dev'. It has: ")) == (2, True)
    (work / "splits" / "train.jsonl").unlink()
    code, _, errors = predict("out", "-i", "splits")
    assert code == 2
    assert "error: --split: the data has no train split. It has: test, validation. Say which one to use" in errors
    assert "e.g. --split test." in errors


def test_empty_texts(predict, work):
    code, lines, errors = predict("out", "good", "", " ")
    assert (code, lines) == (2, [])
    assert "row 1: the text is empty\n  row 2: the text is empty\n" in errors
    (work / "gaps.csv").write_text("review,who\n,a\ngood,b\n")
    code, lines, errors = predict("out", "-i", work / "gaps.csv", "--json", "--on-bad-row", "skip")
    first, second = map(json.loads, lines)
    assert (code, first["who"], first["prediction"], second["prediction"]) == (0, "a", None, "good")
    assert errors == "note: 1 of 2 rows cannot be used and have no prediction\n"


def test_language_model(predict, work):
    code, lines, errors = predict("chat/out", "what is good", "--max-new-tokens", 4, "--json")
    assert (code, errors) == (0, "")
    answer = json.loads(lines[0])
    assert set(answer) == {"text", "prediction", "finish_reason"}
    source = tiny.write_jsonl(work / "ask.jsonl", [{"instruction": "what is good", "input": ""}])
    _, lines, _ = predict("chat/out", "-i", source, "--max-new-tokens", 4, "--json")
    row = json.loads(lines[0])
    assert (row["instruction"], row["prediction"]) == ("what is good", answer["prediction"])


WRONG = [
    (["out"], "there is nothing to predict"),
    (["out", "good", "-i", "train.jsonl"], "give texts or --input, not both"),
    (["out", "-", "good"], "`-` reads all texts from stdin"),
    (["out", "-"], "stdin is empty"),
    (["uot", "good"], "there is no folder 'uot'. Give the run folder (checkpoint.checkpoint_dir). Did you mean 'out'?"),
    (["axolotl.yaml", "good"], "`automodel migrate axolotl.yaml -o run.yaml` makes one of it."),
    (["out/run", "good"], "'out/run' is the record of a run; the model lies beside it. Give 'out'."),
    (["cache", "good"], "'cache' holds no model: there is no config.json in it"),
    (["model", "good"], "holds DistilBertForMaskedLM, which has no head for any of"),
    (["out", "-i", "trian.jsonl"], "--input: there is no file or folder 'trian.jsonl'"),
    (["out", "-i", "nothing.txt"], "--input: 'nothing.txt' has no rows"),
    (["out", "-i", "latin.txt"], "--input: 'latin.txt'"),
    (["out", "-i", "train.jsonl", "-o", "x.parquet"], "must end in .jsonl or .csv"),
    (["out", "-i", "train.jsonl", "-o", "nowhere/x.csv"], "the folder 'nowhere' does not exist"),
    (["out", "-i", "train.jsonl", "-o", "train.jsonl"], "--output is the same file as --input"),
    (["out", "-i", "train.jsonl", "--text-column", "txt"], "--input has no column 'txt', as --text-column says"),
    (["out", "-i", "train.jsonl", "--pair-column", "other"], "which holds the second text of each pair"),
    (["out", "good", "--text-column", "x"], "--text-column names a column of --input, which is not given"),
    (["out", "good", "--split", "test"], "--split chooses rows of --input, which is not given"),
    (
        ["out", "-i", "latin.txt", "--split", "test"],
        "--split chooses rows of a table, a folder or a dataset of the hub",
    ),
    (["out", "good", "--pair", "a", "--pair", "b"], "there are 1 texts but 2 second texts"),
    (["out", "good", "--max-new-tokens", "5"], "--max-new-tokens is for models that generate text"),
    (["out", "good", "--raw"], "--raw is for models that generate text"),
    (["chat/out", "good", "--temperature", "-1"], "--temperature must be 0 or more; got -1.0"),
    (["chat/out", "good", "--pair", "bad"], "--pair is for text classification; this is a causal-lm model"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_wrong_uses(predict, work, arguments, message):
    (work / "nothing.txt").write_text("")
    (work / "latin.txt").write_bytes("good\ncaf\u00e9\n".encode("latin-1"))
    code, lines, errors = predict(*arguments)
    assert (code, lines) == (2, [])
    assert errors.startswith("error: ")
    assert message in errors


def test_predicted_columns_are_not_replaced(predict, work):
    source = tiny.write_jsonl(work / "again.jsonl", [{"review": "good", "prediction": "x"}])
    assert "has a column 'prediction', which the prediction would replace" in predict("out", "-i", source)[2]
    source = tiny.write_jsonl(work / "again.jsonl", [{"review": "good", "words": 1, "finish_reason": "mine"}])
    _, lines, _ = predict("out", "-i", source, "--json")  # which the class of a text has nothing of
    assert json.loads(lines[0])["words"] == 1
    assert json.loads(lines[0])["finish_reason"] == "mine"


def unfinished(work: Path, **changes: str) -> Path:
    """The run folder without its model."""
    import shutil

    folder = work / "unfinished"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "out" / "run", folder / "run")
    config = (folder / "run" / "config.yaml").read_text()
    (folder / "run" / "config.yaml").write_text(
        config.replace("enabled: true", changes.get("enabled", "enabled: true"))
    )
    return folder


def test_folders_without_a_model_say_why(predict, work):
    import shutil

    folder = unfinished(work)
    summary = folder / "run" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "interrupted", "steps": 5}))
    command = f"automodel finetune llm -c {folder / 'run' / 'config.yaml'}"
    _, _, errors = predict(folder, "good")
    assert errors == (
        f"error: the run in '{folder}' was interrupted after step 5, and its model is saved when a run ends. "
        f"Continue it: {command} --resume\n"
        f"or make a model of its last checkpoint: automodel checkpoint convert {folder} --out FOLDER\n"
    )
    (checkpoint,) = (folder / "run" / "steps").glob("step-*")
    _, _, errors = predict(checkpoint, "good")
    step = int(checkpoint.name[5:])
    assert f"of this step: automodel checkpoint convert {folder} --step {step} --out FOLDER" in errors
    summary.unlink()
    shutil.rmtree(folder / "run" / "steps")
    _, _, errors = predict(folder, "good")
    assert (
        f"did not finish, or is still going, and its model is saved when a run ends. Start it again: {command}"
        in errors
    )
    folder = unfinished(work, enabled="enabled: false")
    _, _, errors = predict(folder, "good")
    assert f"saved no model, because checkpoint.enabled was false. Train again with it: {command}" in errors


def test_a_save_that_was_killed_is_finished(predict, work):
    """A complete staging folder, as `save_hf_folder` leaves it when it is killed before its files moved in."""
    import shutil

    folder = work / "killed"
    shutil.copytree(work / "out" / "run", folder / "run")
    files = [path for path in (work / "out").iterdir() if path.is_file()]
    staged = folder / ".model-to-move-in"
    staged.mkdir()
    for path in files:
        shutil.copy(path, staged)
    (staged / ".files.json").write_text(json.dumps([path.name for path in files]))
    code, lines, _ = predict(folder, "good great film", "--json")
    assert code == 0
    assert json.loads(lines[0])["prediction"] == "good"
    assert not staged.exists()
