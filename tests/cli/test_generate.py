"""`automodel generate` and `automodel evaluate` of language models: prompts written as in training, answers out; every
wrong use in words. The model learns three answers by heart, so that right and wrong ones are known."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys

import pytest
import torch
import transformers
from rich.console import Console

import tiny_runs as tiny
from automodel.cli.main import main
from automodel.engine.run import finetune
from automodel.metrics.answers import answer_scores
from automodel.plan.check import load_run_config

QUESTIONS = {"what is good": "fine film", "what is bad": "awful plot", "what is warm": "lovely music"}
RUN = """
step_scheduler: {max_steps: 60}
dataloader: {batch_size: 3}
"""


def finetuned(folder, rows, dataset="", test=None, chat=True):
    config = tiny.write_run(folder, kind="llama", text=RUN)
    if not chat:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = None
        (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder / "model")
    tiny.write_jsonl(folder / "train.jsonl", rows)
    tiny.write_jsonl(folder / "test.jsonl", test or rows)
    text = config.read_text().replace("text-classification", "causal-lm")
    config.write_text(text.replace("train.jsonl}", f"train.jsonl{dataset}}}"))
    finetune(load_run_config([config], ["optimizer.lr=1e-2"]), console=Console(file=io.StringIO()))
    return folder / "out"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Trained models: `qa/out` on columns of other names through the chat template, `plain/out` without one, `chat/out`
    on conversations, `text/out` on bare text."""
    folder = tmp_path_factory.mktemp("generate")
    mapping = ", column_mapping: {question: ask, answer: say}"
    rows = [{"ask": question, "say": answer} for question, answer in QUESTIONS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(folder / "cache"))
        test = [
            {"ask": "what is good", "say": ["dull", "The fine film ."]},
            {"ask": "what is bad", "say": ["awful actor"]},
        ]
        finetuned(folder / "qa", rows, mapping)
        finetuned(folder / "plain", [{"question": q, "answer": a} for q, a in QUESTIONS.items()], chat=False)
        turns = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in QUESTIONS.items()
        ]
        finetuned(folder / "chat", turns)
        finetuned(folder / "text", [{"text": f"{q} {a}"} for q, a in QUESTIONS.items()])
        tiny.write_jsonl(folder / "test.jsonl", test)
        yield folder


@pytest.fixture
def run(work, monkeypatch, capsys):
    """A verb in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(work)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["automodel", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out, printed.err

    return run


def test_the_real_command_streams_one_answer(work):
    done = tiny.automodel("generate", work / "qa" / "out", "--prompt", "what is good")
    assert done.stdout == "fine film\n"


@pytest.mark.parametrize("folder", ["qa/out", "plain/out", "chat/out"])
def test_each_layout_is_asked_as_it_was_trained(run, folder):
    for question, answer in QUESTIONS.items():
        assert run("generate", folder, "-p", question) == (0, f"{answer}\n", "")


def test_plain_text_is_continued(run):
    code, out, _ = run("generate", "text/out", "--prompt", "what is good", "--max-new-tokens", 2)
    assert (code, out.split()) == (0, ["fine", "film"])


def test_the_layout_is_noted_in_the_run_and_the_data_is_not_looked_for(run, work):
    noted = json.loads((work / "plain" / "out" / "run" / "layout.json").read_text())
    assert noted == {
        "kind": "instructions", "prompt": {"question": "question"}, "answer": "answer", "prompt_template": None,
        "chat_template": False,
    }  # fmt: skip
    assert json.loads((work / "chat" / "out" / "run" / "layout.json").read_text())["kind"] == "chats"
    aside = work / "plain" / "train.jsonl.aside"
    (work / "plain" / "train.jsonl").rename(aside)
    try:
        assert run("generate", "plain/out", "-p", "what is bad") == (0, "awful plot\n", "")
    finally:
        aside.rename(work / "plain" / "train.jsonl")


def test_a_file_keeps_its_columns_and_its_order(run, work):
    rows = [{"id": i, "ask": q, "note": None} for i, q in enumerate([*QUESTIONS, "what is good"])]
    tiny.write_jsonl(work / "in.jsonl", rows)
    code, out, errors = run("generate", "qa/out", "-i", "in.jsonl", "-o", "out.jsonl", "--batch-size", 3)
    assert (code, out, errors) == (0, "", "Wrote 4 rows to out.jsonl\n")
    done = [json.loads(line) for line in (work / "out.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in done] == [*QUESTIONS.values(), "fine film"]
    assert [{k: row[k] for k in ("id", "ask", "note")} for row in done] == rows
    assert {row["finish_reason"] for row in done} == {"stop"}
    code, _, errors = run("generate", "qa/out", "-i", "in.jsonl", "-o", "out.jsonl")
    assert (code, "--overwrite" in errors) == (2, True)
    assert run("generate", "qa/out", "-i", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--max-new-tokens", 1)[0] == 0
    short = [json.loads(line) for line in (work / "out.jsonl").read_text().splitlines()]
    assert [(row["prediction"], row["finish_reason"]) for row in short][:1] == [("fine", "length")]
    assert run("generate", "qa/out", "-i", "in.jsonl", "-o", "out.csv")[0] == 0
    with open(work / "out.csv", newline="") as file:
        assert [row["prediction"] for row in csv.DictReader(file)] == [*QUESTIONS.values(), "fine film"]


def test_the_split_of_a_folder_can_be_chosen(run, work):
    (work / "asked").mkdir()
    for name, question in zip(("train", "test"), QUESTIONS):
        tiny.write_jsonl(work / "asked" / f"{name}.jsonl", [{"ask": question}])
    first, second = list(QUESTIONS.values())[:2]
    told = "note: --input: the rows are those of the split train; there is also test. Choose with --split\n"
    assert run("generate", "qa/out", "-i", "asked") == (0, f"{first}\n", told)
    assert run("generate", "qa/out", "-i", "asked", "--split", "test") == (0, f"{second}\n", "")
    assert run("generate", "qa/out", "-p", "what", "--split", "test")[0] == 2


def test_several_prompts_and_json(run):
    assert run("generate", "qa/out", "-p", "what is bad", "-p", "what is good")[1] == "awful plot\nfine film\n"
    _, out, _ = run("generate", "qa/out", "-p", "what is bad", "--json")
    assert json.loads(out) == {"prompt": "what is bad", "prediction": "awful plot", "finish_reason": "stop"}


def test_answers_are_those_of_stock_transformers(run, work):
    """Greedy, from the folder alone, with the chat template applied by hand."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "chat" / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "chat" / "out")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a dark scene"}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    made = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    _, out, _ = run("generate", "chat/out", "-p", "a dark scene", "--max-new-tokens", 6)
    assert out.strip() == tokenizer.decode(made, skip_special_tokens=True).strip()


def test_a_batch_answers_as_each_prompt_alone(run, work):
    """Greedy, padded on the left. The longest prompts leave room for 8 tokens; the others must not be cut with them."""
    tiny.make_model_folder(work / "random", "llama", seed=1)  # which goes on and on
    words = ["good", "film", "bad", "plot", "the", "fine", "actor", "dull", "music"]
    counts = (1, 120, 3, 40, 120, 9, 2, 17)
    tiny.write_jsonl(work / "many.jsonl", [{"prompt": " ".join((words * 14)[:count])} for count in counts])
    answers = {}
    for size in (1, 8):
        asked = ("--raw", "--max-new-tokens", 20, "--batch-size", size, "--overwrite")
        code, _, errors = run("generate", "random", "-i", "many.jsonl", "-o", "many-out.jsonl", *asked)
        assert (code, "2 of 8 answers ended early: the model has only 128 positions" in errors) == (0, True)
        answers[size] = [json.loads(line) for line in (work / "many-out.jsonl").read_text().splitlines()]
    assert answers[8] == answers[1]
    lengths = [len(row["prediction"].split()) for row in answers[8]]
    assert lengths == [18, 8, 20, 20, 8, 20, 20, 20]


def test_drawn_tokens_follow_the_seed(run):
    asked = ("generate", "qa/out", "-p", "the camera", "--temperature", 5.0, "--max-new-tokens", 12, "--json", "--seed")
    first, again, other = (run(*asked, seed)[1] for seed in (1, 1, 2))
    assert first == again != other


WRONG = {
    "nothing to do": (("qa/out",), "either prompts (--prompt TEXT) or a file"),
    "both": (("qa/out", "-p", "x", "-i", "in.jsonl"), "either prompts"),
    "no folder": (("qa/ou", "-p", "x"), "Did you mean 'qa/out'?"),
    "no file": (("qa/out", "-i", "nowhere.jsonl"), "nowhere.jsonl"),
    "no column": (("qa/out", "-i", "wrong.jsonl", "--text-column", "asks"), "no column 'asks'"),
    "rows without a prompt": (("qa/out", "-i", "gaps.jsonl"), "row 1: "),
    "an output of no known kind": (("qa/out", "-p", "x", "-o", "out.txt"), "must end in .jsonl or .csv"),
    "overwrite what": (("qa/out", "-p", "x", "--overwrite"), "--output names"),
    "no room": (("qa/out", "-p", "good " * 200), "positions"),
    "a device": (("qa/out", "-i", "/dev/null"), "--input: '/dev/null' is no regular file but a pipe or a device"),
    "not a temperature": (("qa/out", "-p", "x", "--temperature", -1), "--temperature must be 0 or more"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_explained(run, work, what):
    tiny.write_jsonl(work / "wrong.jsonl", [{"text": "what"}])
    tiny.write_jsonl(work / "gaps.jsonl", [{"ask": "what is good"}, {"ask": None}, {"ask": "what is bad"}])
    arguments, message = WRONG[what]
    code, out, errors = run("generate", *arguments)
    assert (code, out) == (2, "")
    assert message in errors


def test_bad_rows_can_be_left_unanswered(run, work):
    tiny.write_jsonl(work / "gaps.jsonl", [{"ask": "what is good"}, {"ask": None}])
    code, out, errors = run("generate", "qa/out", "-i", "gaps.jsonl", "--on-bad-row", "skip")
    assert (code, out) == (0, "fine film\n(no answer)\n")
    assert "1 of 2 rows cannot be used" in errors


@pytest.mark.parametrize("verb", ["generate", "predict"])
def test_prompts_come_from_stdin(run, monkeypatch, verb):
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is good\r\nwhat is warm\n"))
    assert run(verb, "qa/out", "-i", "-") == (0, "fine film\nlovely music\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, errors = run(verb, "qa/out", "-i", "-")
    assert code == 2
    assert "stdin is empty; one text is read from each of its lines." in errors


def test_chats_with_a_system_message_keep_it_and_are_counted(run, work):
    asked = {"role": "user", "content": "what is good"}
    own = [{"role": "system", "content": "film"}, asked]
    rows = [{"messages": [asked]}, {"messages": own}]
    tiny.write_jsonl(work / "own.jsonl", rows)
    code, _, errors = run("generate", "chat/out", "-i", "own.jsonl", "--system", "good", "--max-new-tokens", 2)
    assert code == 0
    assert "note: 1 of 2 prompts have a system message of their own: --system is for those without one" in errors
    tiny.write_jsonl(work / "own.jsonl", [{"messages": [asked], "system": "film"}])
    assert "note: 1 of 1 prompts" in run("generate", "chat/out", "-i", "own.jsonl", "--system", "good")[2]
    assert run("generate", "chat/out", "-p", "what is good", "--system", "good")[2] == ""


def test_other_models_are_sent_to_predict(run, work):
    tiny.make_model_folder(work / "classifier", "bert", classifier=True)
    code, _, errors = run("generate", "classifier", "-p", "good film")
    assert code == 2
    assert "holds a text-classification model" in errors
    assert "automodel predict classifier" in errors


def test_a_plain_folder_is_asked_through_its_template(run, work):
    plain = work / "copied"
    shutil.copytree(work / "chat" / "out", plain, ignore=shutil.ignore_patterns("run"), dirs_exist_ok=True)
    assert run("generate", plain, "-p", "what is warm")[1] == "lovely music\n"


def test_a_converted_checkpoint_is_asked_as_it_was_trained(run):
    """Its prompts are in no chat template: bare questions are no prompts of this model."""
    assert run("checkpoint", "convert", "plain/out", "--out", "converted")[0] == 0
    assert run("generate", "converted", "-p", "what is warm")[1] == "lovely music\n"


def test_evaluate_gives_loss_perplexity_and_accuracy(run, work):
    code, out, _ = run("evaluate", "qa/out", "--json")
    found = json.loads(out)["metrics"]
    assert code == 0
    assert found.keys() == {"loss", "perplexity", "accuracy"}
    assert found["accuracy"] == 1
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item(), rel=1e-4)
    summary = json.loads((work / "qa" / "out" / "run" / "summary.json").read_text())
    assert found["loss"] == pytest.approx(summary["validation"]["loss"], abs=1e-6)


@pytest.mark.parametrize("folder", ["qa/out", "plain/out", "chat/out"])
def test_evaluate_counts_generated_answers(run, folder):
    code, out, _ = run("evaluate", folder, "--generate", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["metrics"]["exact_match"], found["metrics"]["f1"]) == (1, 1)
    assert (found["asked"], found["unanswered"]) == (3, 0)


def test_evaluate_takes_the_best_of_several_answers(run):
    code, out, _ = run("evaluate", "qa/out", "--dataset", "test.jsonl", "--generate", "--json")
    found = json.loads(out)["metrics"]
    assert code == 0
    expected = answer_scores(["fine film", "awful plot"], [["dull", "The fine film ."], ["awful actor"]])
    assert expected == pytest.approx({"exact_match": 0.5, "f1": 0.75})
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    _, one, _ = run("evaluate", "qa/out", "--dataset", "test.jsonl", "--generate", "--max-samples", 1, "--json")
    assert (json.loads(one)["asked"], json.loads(one)["metrics"]["exact_match"]) == (1, 1)
    _, readable, _ = run("evaluate", "qa/out", "--dataset", "test.jsonl", "--generate")
    assert "2 of 2 prompts answered" in readable
    assert "exact_match" in readable


def test_evaluate_refuses_what_cannot_be_asked(run, work):
    code, _, errors = run("evaluate", "text/out", "--generate")
    assert (code, "needs prompts with answers" in errors) == (2, True)
    code, _, errors = run("evaluate", "qa/out", "--max-samples", 3)
    assert (code, "give --generate too" in errors) == (2, True)
    tiny.make_model_folder(work / "classifier", "bert", classifier=True)
    tiny.write_jsonl(work / "labelled.jsonl", tiny.reviews(4))
    code, _, errors = run("evaluate", "classifier", "--dataset", "labelled.jsonl", "--generate")
    assert (code, "--generate is for causal language models" in errors) == (2, True)
