"""Multilingual encoder-decoders: the codes of both languages are where training and generating expect them."""

from typing import Any

import numpy as np
import pytest
import torch

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.predict import Predictor
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

PAIRS = [(f"{a} {b}", f"{b} {a}") for a in tiny.GOOD for b in tiny.BAD]


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A tiny mBART of either kind, and a run of it with some keys of `dataset`."""
    import transformers as t
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator([" ".join(pair) for pair in PAIRS], trainer)
    pieces = sorted(inner.get_vocab(), key=lambda piece: inner.get_vocab()[piece])
    tiny.write_jsonl(tmp_path / "train.jsonl", [{"source": a, "target": b} for a, b in PAIRS])

    def start(kind: str, keys: str) -> Any:
        tokenizer = getattr(t, f"{kind}Tokenizer")(vocab=[(piece, -2.0) for piece in pieces])
        torch.manual_seed(0)
        config = t.MBartConfig(
            vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=160,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        t.MBartForConditionalGeneration(config).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "run.yaml").write_text(
            f"task: seq2seq\nmodel: {tmp_path}/model\ndataset: {{path: {tmp_path}/train.jsonl{keys}}}\n"
            "optimizer: {lr: 0.01}\nstep_scheduler: {max_steps: 6}\n"
            f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\n{tiny.FP32}"
        )
        return finetune(load_run_config([tmp_path / "run.yaml"]))

    return start


@pytest.mark.parametrize("kind", ["MBart", "MBart50"])
def test_targets_are_in_the_target_language(started, tmp_path, kind):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    started(kind, ", source_lang: en_XX, target_lang: de_DE")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    code = tokenizer.convert_tokens_to_ids("de_DE")
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("en_XX", "de_DE")
    assert code in tokenizer(text_target=PAIRS[0][1])["input_ids"]
    learned = np.load(next((tmp_path / "cache").rglob("target_ids.npy")))
    assert (learned == code).sum() == len(PAIRS)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    made = model.generate(**tokenizer(PAIRS[0][0], return_tensors="pt"), max_new_tokens=8, num_beams=1)[0].tolist()
    assert made.index(code) == (0 if kind == "MBart" else 1)  # where the training targets have it
    (ours,) = Predictor(tmp_path / "out").generate([PAIRS[0][0]], max_new_tokens=8)
    assert ours is not None
    assert ours.prediction == tokenizer.decode(made, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("", "dataset.target_lang: the tokenizer writes the code of a language"),
        (", target_lang: de", "dataset.target_lang: the tokenizer has no language 'de'"),
        (", target_lang: de_DD", "Did you mean 'de_DE'"),
    ],
)
def test_languages_that_are_not_named_or_unknown(started, keys, said):
    with pytest.raises(UserError, match=said):
        started("MBart50", keys)
