"""Asking a saved model gives what stock transformers gives for the same folder, prepared as in training.

One tiny model is trained for each task, in this process.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.data.batch import IGNORE
from automodel.engine.assess import assess
from automodel.engine.predict import Predictor
from automodel.engine.prompts import BadPrompt, prompt_writer
from automodel.engine.run import finetune
from automodel.engine.saved import open_saved
from automodel.engine.tables import answered, questions_of, read_table
from automodel.plan.check import load_run_config
from automodel.tasks.registry import CAUSAL_LM

SENTIMENT = ["negative", "positive"]
AS_JSON = '[{"role": "user", "content": "q"}]'
TEXTS = [
    "good film",
    "a very dull plot with awful music and a poor camera and a sad story",
    "superb",
    "the story was quite bad",
    "warm and bright and happy the film was lovely with great music",
]


def train(folder: Path, kind: str, task: str, rows: list[dict], settings: str = "", dataset: str = "", **model) -> Path:
    """A run in this process; the rows are the validation data too. Returns the run folder."""
    tiny.make_model_folder(folder / "model", kind, **model)
    tiny.write_jsonl(folder / "rows.jsonl", rows)
    (folder / "run.yaml").write_text(
        f"model: {folder / 'model'}\ntask: {task}\n"
        f"dataset: {{path: {folder / 'rows.jsonl'}, {dataset}}}\n"
        f"validation_dataset: {{path: {folder / 'rows.jsonl'}}}\n"
        f"checkpoint: {{checkpoint_dir: {folder / 'out'}, keep_best: false}}\n"
        f"{settings or 'step_scheduler: {num_epochs: 1}'}\n{tiny.FP32}"
    )
    return finetune(load_run_config([folder / "run.yaml"]), console=Console(file=io.StringIO())).folder


def sentences(count: int) -> list[dict]:
    return [{"text": row["text"], "label": SENTIMENT[row["label"]]} for row in tiny.reviews(count)]


ENTITIES = {
    "tokens": [["good", "actor", "was", "the", "dark", "camera"], ["a", "film", "and", "the", "actor"]],
    "ner_tags": [["B-PER", "I-PER", "O", "O", "B-TOOL", "I-TOOL"], ["O", "O", "O", "O", "B-PER"]],
}
QUESTIONS = [
    {"question": "what is the capital of good", "answer": "great fine"},
    {"question": "what of the sad film", "answer": "dull"},
    {"question": "music ?", "answer": "lovely superb happy"},
]
MEMORISE = "step_scheduler: {num_epochs: 80, val_every_steps: 1000}\noptimizer: {lr: 1e-2}\ndataloader: {batch_size: 4}"


def make(name: str, folder: Path) -> Path:
    if name == "classifier":
        fast = "optimizer: {lr: 1e-2}\nstep_scheduler: {num_epochs: 12, val_every_steps: 100}"
        return train(folder, "distilbert", "text-classification", sentences(24), fast, "max_length: 12")
    if name == "decoder":
        return train(folder, "llama", "text-classification", sentences(8))
    if name == "pairs":
        rows = [{"premise": r["text"], "hypothesis": "good film", "label": r["label"]} for r in tiny.reviews(8)]
        return train(folder, "bert", "text-classification", rows)
    if name == "multi-label":
        rows = [
            {"text": r["text"], "label": [["funny"], ["sad", "slow"], []][i % 3]} for i, r in enumerate(sentences(9))
        ]
        return train(folder, "bert", "text-classification", rows)
    if name == "vectors":
        rows = [{"text": r["text"], "a": i % 2, "b": 1, "c": 0} for i, r in enumerate(sentences(8))]
        return train(folder, "bert", "text-classification", rows, dataset="label_columns: [a, b, c]")
    if name == "regression":
        rows = [{"text": r["text"], "label": 0.25 + i} for i, r in enumerate(sentences(8))]
        return train(folder, "bert", "text-classification", rows)
    if name == "stars":
        rows = [{"text": r["text"], "label": 1 + i % 5} for i, r in enumerate(sentences(10))]
        return train(folder, "bert", "text-classification", rows)
    if name == "tagger":
        rows = [dict(zip(ENTITIES, values)) for values in zip(*ENTITIES.values())]
        return train(folder, "bert", "token-classification", rows, MEMORISE, "max_length: 8")
    if name == "template":
        return train(
            folder, "llama", "causal-lm", QUESTIONS, MEMORISE, "prompt_template: 'question : {question} answer :'"
        )
    if name == "chat":
        rows = [
            {"messages": [{"role": "user", "content": q["question"]}, {"role": "assistant", "content": q["answer"]}]}
            for q in QUESTIONS
        ]
        return train(folder, "llama", "causal-lm", rows, MEMORISE)
    if name == "bart":
        rows = [{"source": q["question"], "target": q["answer"]} for q in QUESTIONS]
        return train(folder, "bart", "seq2seq", rows, MEMORISE)
    assert name == "seq2seq"
    rows = [{"source": q["question"], "target": q["answer"]} for q in QUESTIONS]
    return train(folder, "t5", "seq2seq", rows, MEMORISE, "source_prefix: 'answer : '")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """`run_of("chat")`: the run folder of that run, trained when it is first asked for."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(root / "cache"))

        @cache
        def made(name: str) -> Path:
            (root / name).mkdir()
            return make(name, root / name)

        yield made


# -- text classification ----------------------------------------------------------------------------------------------


def stock_logits(folder: Path, *texts: str, **limits) -> torch.Tensor:
    """What plain transformers says about one text (or pair) alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt", truncation=True, **limits)).logits[0]


@pytest.mark.parametrize(("name", "limit", "cut"), [("classifier", 12, 2), ("decoder", 128, 0)])
def test_classes_and_probabilities_are_those_of_stock_transformers(run_of, name, limit, cut):
    """The classifier reads its first token, the decoder its last; each text alone in stock transformers."""
    folder = run_of(name)
    assert json.loads((folder / "config.json").read_text())["id2label"] == dict(zip("01", SENTIMENT))
    predictor = Predictor(folder, batch_size=2)
    for text, answer in zip(TEXTS, predictor.classify(TEXTS), strict=True):
        expected = stock_logits(folder, text, max_length=limit).softmax(-1)
        assert list(answer.scores) == SENTIMENT
        torch.testing.assert_close(torch.tensor(list(answer.scores.values())), expected, atol=1e-5, rtol=0)
        assert answer.prediction == SENTIMENT[int(expected.argmax())]
        assert answer.score == max(answer.scores.values())
    longest = max(len(predictor.tokenizer(text)["input_ids"]) for text in TEXTS)
    told = f"{cut} of 5 texts were cut at max_length {limit}; the longest has {longest} tokens"
    assert predictor.notes == ([told] if cut else [])


def test_the_model_has_learned_and_order_is_kept(run_of):
    rows = tiny.reviews(20, seed=3)
    answers = Predictor(run_of("classifier"), batch_size=3).classify([row["text"] for row in rows])
    right = [answer.prediction == SENTIMENT[row["label"]] for answer, row in zip(answers, rows)]
    assert sum(right) >= 18


def test_padded_path_gives_the_same(run_of):
    packed, padded = Predictor(run_of("classifier")), Predictor(run_of("classifier"))
    padded.__dict__["packed"] = False
    for a, b in zip(packed.classify(TEXTS), padded.classify(TEXTS)):
        assert a.scores == pytest.approx(b.scores, abs=1e-6)


def test_plain_hugging_face_folder(run_of, tmp_path):
    """The model's files alone, without `run/`: the tokenizer says how long texts may be."""
    for file in run_of("classifier").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    predictor = Predictor(tmp_path)
    assert (predictor.saved.run, predictor.max_length) == (None, 12)
    scores = list(predictor.classify(TEXTS[1:2])[0].scores.values())
    torch.testing.assert_close(torch.tensor(scores), stock_logits(tmp_path, TEXTS[1]).softmax(-1), atol=1e-5, rtol=0)


def test_pairs(run_of):
    folder = run_of("pairs")
    (answer,) = Predictor(folder).classify(["a very dull plot"], ["good film"])
    expected = stock_logits(folder, "a very dull plot", "good film").softmax(-1)
    torch.testing.assert_close(torch.tensor(list(answer.scores.values())), expected, atol=1e-5, rtol=0)


def test_multi_label(run_of):
    folder = run_of("multi-label")
    (answer,) = Predictor(folder).classify(TEXTS[:1])
    expected = stock_logits(folder, TEXTS[0]).sigmoid()
    torch.testing.assert_close(torch.tensor(list(answer.scores.values())), expected, atol=1e-5, rtol=0)
    assert list(answer.scores) == ["funny", "sad", "slow"]
    assert answer.prediction == [name for name, score in answer.scores.items() if score > 0.5]
    assert set(answer.to_json()) == {"prediction", "scores"}
    second = sorted(answer.scores.values())[1]
    (stricter,) = Predictor(folder).classify(TEXTS[:1], threshold=second)
    assert stricter.prediction == [max(answer.scores, key=answer.scores.get)]
    with pytest.raises(UserError, match="--threshold"):
        Predictor(run_of("regression")).classify(TEXTS[:1], threshold=0.3)


def test_regression(run_of):
    folder = run_of("regression")
    (answer,) = Predictor(folder).classify(TEXTS[:1])
    assert answer.to_json() == {"prediction": pytest.approx(float(stock_logits(folder, TEXTS[0])), abs=1e-5)}


def test_bad_rows_are_all_named_or_have_no_answer(run_of):
    predictor = Predictor(run_of("classifier"))
    with pytest.raises(UserError) as caught:
        predictor.classify(["good", "", "bad", "  ", None])
    assert str(caught.value) == (
        "3 of 5 rows cannot be used (rows are counted from 0):\n"
        "  row 1: the text is empty\n  row 3: the text is empty\n  row 4: the text is missing\n"
        "Put them right, or leave them unanswered with --on-bad-row skip."
    )
    skipping = Predictor(run_of("classifier"), on_bad_row="skip")
    answers = skipping.classify(["good", "", "bad", "  ", None])
    assert [answer is None for answer in answers] == [False, True, False, True, True]
    alone = skipping.classify(["bad"])[0]
    assert (answers[2].prediction, answers[2].scores) == (alone.prediction, pytest.approx(alone.scores, rel=1e-5))
    assert skipping.classify([""]) == [None]
    assert "have no prediction" in skipping.notes[0]


def test_wrong_verb(run_of):
    with pytest.raises(UserError, match="holds a text-classification model: use `classify`, not `generate`"):
        Predictor(run_of("classifier")).generate(["good"])


# -- token classification ---------------------------------------------------------------------------------------------


def test_tags_and_entities(run_of):
    folder = run_of("tagger")
    text = "good actor was  the dark camera"
    answer, shorter = Predictor(folder).tag([text, ["a", "film", "and", "the", "actor"]])
    assert answer.prediction == ENTITIES["ner_tags"][0]
    assert shorter.prediction == ENTITIES["ner_tags"][1]
    person, tool = answer.entities
    assert (person["type"], person["text"], person["words"]) == ("PER", "good actor", [0, 2])
    assert (tool["type"], text[tool["start"] : tool["end"]]) == ("TOOL", "dark camera")
    assert "start" not in shorter.entities[0]


def test_tag_scores_are_those_of_stock_transformers(run_of):
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    folder = run_of("tagger")
    tokens = AutoTokenizer.from_pretrained(folder)("good actor was", return_tensors="pt")
    with torch.no_grad():
        expected = AutoModelForTokenClassification.from_pretrained(folder)(**tokens).logits[0, 1:-1].softmax(-1)
    for packed in (True, False):
        predictor = Predictor(folder)
        predictor.__dict__["packed"] = packed
        first, _ = predictor.tag(["good actor was", "the camera was very dark"])
        assert first.scores == pytest.approx(expected.max(-1).values.tolist(), abs=1e-5)


def test_words_beyond_the_limit_have_no_tag(run_of):
    (answer,) = Predictor(run_of("tagger")).tag(["the film, the actor and the camera"])
    assert answer.words == ["the", "film", ",", "the", "actor", "and", "the", "camera"]
    assert [tag is None for tag in answer.prediction] == [False] * 6 + [True] * 2


# -- generation -------------------------------------------------------------------------------------------------------


def stock_answer(folder: Path, prompt: str, special: bool = True) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
    output = AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, do_sample=False, max_new_tokens=8)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_the_prompt_template_is_used(run_of):
    """The model answers only prompts in the form it was trained on, so right answers prove the form."""
    folder = run_of("template")
    predictor = Predictor(folder, batch_size=2)
    questions = [q["question"] for q in QUESTIONS]
    answers = predictor.generate(questions, max_new_tokens=8)
    assert [a.prediction for a in answers] == [q["answer"] for q in QUESTIONS]
    assert {a.finish_reason for a in answers} == {"stop"}
    assert predictor.generate([{"question": questions[2]}])[0] == answers[2]
    assert answers[1].prediction == stock_answer(folder, f"question : {questions[1]} answer :")
    raw = predictor.generate([f"question : {q} answer :" for q in questions], raw=True)
    assert [a.prediction.strip() for a in raw] == [q["answer"] for q in QUESTIONS]


def test_chat(run_of):
    folder = run_of("chat")
    predictor = Predictor(folder)
    texts = predictor.generate([q["question"] for q in QUESTIONS])
    assert [a.prediction for a in texts] == [q["answer"] for q in QUESTIONS]
    turns = [[{"from": "human", "value": q["question"]}] for q in QUESTIONS]
    assert predictor.generate(turns) == texts
    # A conversation that ends with an answer is asked for that answer.
    whole = [{"role": "user", "content": QUESTIONS[0]["question"]}, {"role": "assistant", "content": "bad"}]
    assert predictor.generate([{"messages": whole}])[0] == texts[0]
    prompt = predictor.tokenizer.apply_chat_template(whole[:1], tokenize=False, add_generation_prompt=True)
    assert stock_answer(folder, prompt, special=False) == texts[0].prediction


def test_what_a_generation_config_prefers_does_not_count(run_of, tmp_path):
    import shutil

    folder = shutil.copytree(run_of("chat"), tmp_path / "model")
    prefers = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps({**prefers, "min_new_tokens": 7, "num_beams": 3}))
    answers = Predictor(folder).generate([q["question"] for q in QUESTIONS])
    assert [a.prediction for a in answers] == [q["answer"] for q in QUESTIONS]


def test_limits_and_sampling(run_of):
    predictor = Predictor(run_of("chat"))
    (cut,) = predictor.generate([QUESTIONS[2]["question"]], max_new_tokens=2)
    assert (cut.prediction, cut.finish_reason) == ("lovely superb", "length")
    drawn = [predictor.generate(["music"] * 3, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(UserError, match="row 1: the prompt has 207 tokens and the model only 128 positions"):
        predictor.generate(["music", "film " * 200])
    predictor.generate(["film " * 100], max_new_tokens=100)
    assert predictor.notes == []  # it had room enough
    predictor.generate(["film " * 120], max_new_tokens=100)
    assert predictor.notes == ["1 of 1 answers ended early: the model has only 128 positions"]
    with pytest.raises(UserError, match="give a --temperature above 0 too"):
        predictor.generate(["music"], top_p=0.9)
    with pytest.raises(UserError, match="which --raw leaves out"):
        predictor.generate(["music"], raw=True, system="good")
    with pytest.raises(UserError, match="row 0: the prompt is empty"):
        predictor.generate([" "])


@pytest.mark.parametrize(("name", "prefix"), [("seq2seq", "answer : "), ("bart", "")])
def test_seq2seq(run_of, name, prefix):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = run_of(name)
    answers = Predictor(folder).generate([q["question"] for q in QUESTIONS])
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    for question, answer in zip(QUESTIONS, answers):
        inputs = tokenizer(prefix + question["question"], return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=100)
        assert answer.prediction == tokenizer.decode(output[0], skip_special_tokens=True)
    assert [a.prediction for a in answers] == [q["answer"] for q in QUESTIONS]


@pytest.mark.parametrize("name", ["template", "chat"])
def test_prompts_are_the_beginnings_of_the_training_samples(run_of, name):
    from automodel.data.prepare import prepare

    saved = open_saved(run_of(name))
    data = prepare(
        saved.dataset, row_format=CAUSAL_LM.rows, tokenizer=saved.tokenizer, max_positions=128, type_vocab_size=0
    )
    store, writer = data.store, prompt_writer(saved)
    for i, question in enumerate(QUESTIONS):
        part = slice(store.offsets[i], store.offsets[i + 1])
        prompt = store.input_ids[part][store.token_labels[part] == IGNORE]
        assert writer.tokens(question["question"]) == prompt.tolist()


def test_layout_is_known_from_the_data_or_said_to_be_unknown(run_of, tmp_path):
    """A run of an earlier release, which noted no layout, and whose config leaves it to the data's columns."""
    import shutil

    folder = tmp_path / "out"
    shutil.copytree(run_of("chat"), folder, ignore=shutil.ignore_patterns("layout.json"))
    config = folder / "run" / "config.yaml"
    data = tiny.write_jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "good", "input": "bad", "output": "fine"}])
    rows = (run_of("chat").parent / "rows.jsonl").as_posix()
    config.write_text(config.read_text().replace(rows, str(data)))
    saved = open_saved(folder)
    assert prompt_writer(saved).columns == {"instruction": "instruction", "input": "input"}
    asked = prompt_writer(saved).text({"instruction": "good", "input": "bad"})
    assert "user : good\n\nbad" in asked
    assert asked.endswith("assistant : ")
    data.unlink()
    assert prompt_writer(open_saved(folder)).notes[0].startswith("the training data is not to be found")


def test_prompts_of_several_columns_need_them(run_of, tmp_path):
    import shutil

    folder = tmp_path / "out"
    shutil.copytree(run_of("template"), folder, ignore=shutil.ignore_patterns("layout.json"))
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace("{question} answer", "{question} {style} answer"))
    writer = prompt_writer(open_saved(folder))
    with pytest.raises(BadPrompt, match="made of question, style, so one text is not enough"):
        writer.tokens("what")
    with pytest.raises(BadPrompt, match="the style is missing"):
        writer.tokens({"question": "what"})
    assert writer.text({"question": "what", "style": "fine"}) == "question : what fine answer :"


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "asked"),
    [
        ("classifier", {"label": "good", "text": "a"}, "a"),
        ("classifier", {"label": "good", "id": 3, "remark": "a"}, "a"),
        ("tagger", {"text": "the film", "tokens": ["a", "film"]}, ["a", "film"]),
        ("tagger", {"sentence": "the film"}, "the film"),
        ("template", {"question": "q", "answer": "a"}, {"question": "q"}),
        ("template", {"text": "q"}, "q"),
        ("chat", {"conversations": [{"from": "human", "value": "q"}], "system": "s"}, {"system": "s"}),
        (
            "chat",
            {"messages": '[{"role": "user", "content": "q"}]'},
            {"messages": '[{"role": "user", "content": "q"}]'},
        ),
        ("chat", {"prompt": "q", "other": "x"}, "q"),
        ("template", {"question": "q", "messages": [{"role": "user", "content": "x"}]}, {"question": "q"}),
        ("seq2seq", {"source": "s", "target": "t"}, "s"),
        ("seq2seq", {"translation": {"en": "s", "de": "t"}}, "s"),
    ],
)
def test_the_columns_of_a_file_that_are_asked(run_of, tmp_path, name, row, asked):
    rows = read_table(str(tiny.write_jsonl(tmp_path / "new.jsonl", [row])))
    (item,) = questions_of(rows, Predictor(run_of(name)), None, None).items
    if "conversations" in row:
        asked = {**asked, "messages": row["conversations"]}
    assert item == asked


def test_chats_written_as_json_are_asked_as_chats(run_of):
    turns = [{"role": "user", "content": QUESTIONS[0]["question"]}]
    writer = prompt_writer(open_saved(run_of("chat")))
    assert writer.text({"messages": json.dumps(turns)}) == writer.text({"messages": turns})


def test_lines_of_a_text_file_have_no_column_of_the_run(run_of, tmp_path):
    """Whatever the run calls its texts."""
    (tmp_path / "new.txt").write_text("good film\nbad film\n")
    predictor = Predictor(run_of("classifier"))
    named = replace(predictor.saved.dataset, text_column="Kommentar")
    asked = SimpleNamespace(task=predictor.task, saved=SimpleNamespace(dataset=named, reads_pairs=False))
    assert questions_of(read_table(str(tmp_path / "new.txt")), asked, None, None).items == ["good film", "bad film"]


def test_a_raw_prompt_is_one_text_however_the_model_was_trained(run_of, tmp_path):
    for name, row in (("template", {"question": "q", "text": "t"}), ("chat", {"messages": [], "prompt": "t"})):
        rows = read_table(str(tiny.write_jsonl(tmp_path / f"{name}.jsonl", [row])))
        wanted = ["q"] if name == "template" else ["t"]
        assert questions_of(rows, Predictor(run_of(name)), None, None, raw=True).items == wanted


def test_pairs_are_found_in_a_file(run_of, tmp_path):
    rows = [{"premise": "a", "hypothesis": "b", "label": 1}]
    found = questions_of(
        read_table(str(tiny.write_jsonl(tmp_path / "new.jsonl", rows))), Predictor(run_of("pairs")), None, None
    )
    assert (found.items, found.pairs) == (["a"], ["b"])
    table = read_table(str(tiny.write_jsonl(tmp_path / "new.jsonl", rows)))
    found = questions_of(table, Predictor(run_of("pairs")), None, "hypothesis")
    assert (found.items, found.pairs) == (["a"], ["b"])


def test_a_model_of_pairs_is_not_asked_about_single_texts(run_of, tmp_path):
    """Its columns were found by their names, so only the run's own note says that there were two. A model of single
    texts, on the other hand, is not given two because a file happens to have columns of such names."""
    with pytest.raises(UserError, match="trained on pairs of texts"):
        Predictor(run_of("pairs")).classify(["a very dull plot"])
    rows = [{"question": "a", "sentence": "b", "text": "c"}]
    found = questions_of(
        read_table(str(tiny.write_jsonl(tmp_path / "new.jsonl", rows))), Predictor(run_of("classifier")), None, None
    )
    assert (found.items, found.pairs) == (["c"], None)


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({"words": ["a", "film"]}, None),  # comes back as it is
        ({"words": "the  film"}, "words"),  # would come back in pieces
        ({"tokens": ["a", "film"], "words": "what people said"}, "words"),
        ({"tokens": ["a", "film"], "words": ["what", "people", "said"]}, "words"),
        ({"sentence": "the film", "entities": []}, "entities"),
        ({"sentence": "the film", "score": 3, "finish_reason": "mine"}, None),  # tags have no such columns
    ],
)
def test_no_column_of_a_file_is_lost_to_the_tags(run_of, tmp_path, row, lost):
    predictor = Predictor(run_of("tagger"))
    rows = read_table(str(tiny.write_jsonl(tmp_path / "new.jsonl", [row])))
    if lost is not None:
        with pytest.raises(UserError, match=f"--input has a column '{lost}', which the prediction would replace"):
            questions_of(rows, predictor, None, None)
        return
    (written,) = answered(rows, predictor.tag(questions_of(rows, predictor, None, None).items))
    assert {name: written[name] for name in row} == row


def test_an_ambiguous_file(run_of, tmp_path):
    rows = read_table(str(tiny.write_jsonl(tmp_path / "new.jsonl", [{"left": "a", "right": "b"}])))
    with pytest.raises(UserError, match="no column is known to hold the text. It has: left .text., right .text.."):
        questions_of(rows, Predictor(run_of("classifier")), None, None)


# -- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["classifier", "pairs", "multi-label", "vectors", "regression", "stars", "tagger", "template", "chat", "seq2seq"],
)
def test_measuring_gives_the_numbers_of_the_last_validation(run_of, name):
    folder = run_of(name)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["exported_step"] == summary["steps"]
    found = assess(folder)
    # Training computes the last block for the pooled token alone: the same sums in another order. Predictions of a
    # model that has learned little are nearly equal, and their correlation is that of small differences.
    for key, value in summary["validation"].items():
        most = 1e-3 if key in ("pearson", "spearman") else 1e-5
        assert found.metrics.values[key] == pytest.approx(value, rel=1e-4, abs=most, nan_ok=True), key
    assert found.metrics.values.keys() == summary["validation"].keys()
    assert found.metrics.confusion_matrix == summary["confusion_matrix"]
