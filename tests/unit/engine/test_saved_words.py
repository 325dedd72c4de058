"""A tagger's folder: stock transformers reads lists of words as training did, and texts are split where words end."""

from typing import Any

import pytest
import torch

import tiny_runs as tiny
from automodel.engine.predict import Predictor
from automodel.engine.run import finetune
from automodel.engine.words import word_places
from automodel.plan.check import load_run_config


def byte_level_folder(folder, corpus):
    import transformers as t
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = t.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=130, pad_token_id=1, type_vocab_size=1,
    )  # fmt: skip
    t.RobertaForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_stock_transformers_reads_words_as_training_did(tmp_path, monkeypatch):
    """Byte-level tokenizers glue words together unless told to put spaces before them."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    texts = [row["text"] for row in tiny.reviews(64, longest=8)]
    byte_level_folder(tmp_path / "model", texts)
    kinds = {**dict.fromkeys(tiny.GOOD, "B-GOOD"), **dict.fromkeys(tiny.BAD, "B-BAD")}
    rows = [{"tokens": text.split(), "ner_tags": [kinds.get(w, "O") for w in text.split()]} for text in texts]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        f"task: token-classification\nmodel: {tmp_path}/model\noptimizer: {{lr: 5e-3}}\n"
        f"dataset: {tmp_path}/train.jsonl\nvalidation_dataset: {tmp_path}/train.jsonl\n"
        f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\nstep_scheduler: {{max_steps: 24}}\n{tiny.FP32}"
    )
    run = finetune(load_run_config([tmp_path / "run.yaml"]))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    model: Any = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    theirs = []
    for row in rows:
        encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            found = model(**encoded).logits[0].argmax(-1).tolist()
        words = encoded.word_ids()
        theirs.append([model.config.id2label[found[words.index(n)]] for n in range(len(row["tokens"]))])
    ours: Any = Predictor(tmp_path / "out").tag([row["tokens"] for row in rows])
    assert theirs == [one.prediction for one in ours]
    pairs = [(a, b) for row, tags in zip(rows, theirs) for a, b in zip(row["ner_tags"], tags)]
    right = sum(a == b for a, b in pairs) / len(pairs)
    assert right == pytest.approx(run.summary["validation"]["accuracy"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Jean-Luc's (old) ship.", ["Jean-Luc's", "(", "old", ")", "ship", "."]),
        ("हिन्दी में लिखा।", ["हिन्दी", "में", "लिखा", "।"]),
        ("Jose\u0301, mu\u0308de!", ["Jose\u0301", ",", "mu\u0308de", "!"]),
        ("我爱北京abc。", ["我", "爱", "北", "京", "abc", "。"]),
        ("❤️love", ["❤️", "love"]),
    ],
)
def test_words_of_a_text(text, words):
    assert [text[start:end] for start, end in word_places(text)] == words


def test_tags_beyond_the_limit_are_told(tmp_path, monkeypatch):
    """Even one of a hundred: an evaluation would not measure them."""
    from automodel.engine.prepare import prepare_run

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    tiny.make_model_folder(tmp_path / "model")
    rows = [{"tokens": ["good"] * length, "ner_tags": ["B-GOOD", *["O"] * (length - 1)]} for length in (3, 4, 5, 9)]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "run.yaml").write_text(
        f"task: token-classification\nmodel: {tmp_path}/model\n"
        f"dataset: {{path: {tmp_path}/train.jsonl, max_length: 8}}\nvalidation_dataset: {tmp_path}/train.jsonl\n"
    )
    plan = prepare_run(load_run_config([tmp_path / "run.yaml"])).plan
    cut = "longer than max_length 8; the longest has 11 tokens; the tags beyond are not"
    assert [(d.value, d.reason) for d in plan.decisions if d.name == "cut"] == [
        ("1 of 4 samples (25.0%)", f"dataset: {cut} learned"),
        ("1 of 4 samples (25.0%)", f"validation_dataset: {cut} measured"),
    ]
