"""Real data with real tokenizers, in place beside the checkout; numbers as the data's own README states them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from automodel.data.batch import IGNORE
from automodel.data.collate import PackedCollator
from automodel.data.config import DatasetConfig
from automodel.data.prepare import prepare
from automodel.tasks.registry import task_named
from automodel.tasks.squad_dataset import make_squad_dataset
from automodel.tasks.text_classification_dataset import TextClassificationDataset
from tiers import quick


@pytest.fixture(scope="module")
def tokenizers(shared_data):
    from transformers import AutoTokenizer

    names = {"bert": "bert-base-uncased", "gpt2": "gpt2", "smollm2": "smollm2-135m-instruct"}
    return {k: AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name) for k, name in names.items()}


@pytest.fixture
def run(shared_data, tokenizers, tmp_path):
    def prepared(path, task, tokenizer, positions=8192, **settings):
        cfg = DatasetConfig(path=str(shared_data / path), cache_dir=str(tmp_path / "cache"), **settings)
        kind = tokenizers[tokenizer]
        return prepare(
            cfg,
            row_format=task_named(task).rows,
            tokenizer=kind,
            max_positions=positions,
            type_vocab_size=2 if tokenizer == "bert" else 0,
        )

    return prepared


def learned(data, tokenizer, index: int) -> str:
    store = data.store
    part = slice(store.offsets[index], store.offsets[index + 1])
    labels = store.token_labels[part]
    return tokenizer.decode(store.input_ids[part][labels != IGNORE])


@pytest.mark.parametrize(
    ("path", "rows", "classes", "mean"),
    [
        ("imdb-small/train.jsonl.gz", 1000, 2, 319.8),
        ("rt-polarity/train.jsonl.gz", 8529, 2, 27.4),
        ("ag-news/test.jsonl.gz", 7600, 4, 43.3),
        ("sst2/test.tsv.gz", 872, 2, 25.2),
    ],
)
def test_classification_lengths_are_the_published_ones(run, path, rows, classes, mean):
    data = run(path, "text-classification", "bert", max_length=4096)
    assert (data.stats.rows, data.stats.used, data.num_labels) == (rows, rows, classes)
    assert data.stats.truncated == 0
    assert data.store.lengths.mean() == pytest.approx(mean, abs=0.06)
    assert sum(data.stats.label_counts) == rows
    assert data.store.input_ids.dtype == np.uint16


def test_every_sample_equals_the_tokenizer_alone(run, tokenizers, shared_data):
    data = run("rt-polarity", "text-classification", "bert", split="validation")
    cfg = DatasetConfig(path=str(shared_data / "rt-polarity"), split="validation")
    from automodel.data.sources import load_rows

    rows = load_rows(cfg)
    for i in (0, 17, len(rows) - 1):
        expected = tokenizers["bert"](rows[i]["text"], truncation=True, max_length=512)["input_ids"]
        store = data.store
        assert store.input_ids[store.offsets[i] : store.offsets[i + 1]].tolist() == expected
        assert store.labels[i] == rows[i]["label"]


def test_squad_dev(run, tokenizers):
    data = run("squad-v1.1-dev/dev-v1.1.json.gz", "causal-lm", "smollm2", split="train[:300]")
    assert data.description == "context + question → answers (chat template)"
    assert learned(data, tokenizers["smollm2"], 0) == "October 1973<|im_end|>"
    plain = run("squad-v1.1-dev/dev-v1.1.json.gz", "causal-lm", "gpt2", positions=1024, split="train[:300]")
    assert learned(plain, tokenizers["gpt2"], 0) == " October 1973<|endoftext|>"
    assert plain.max_length == 1024


@pytest.mark.parametrize("example", quick(["smollm2_squad", "llama_3_2_1b_squad"], "llama_3_2_1b_squad"))
def test_every_question_fits_into_the_examples(run, example):
    wanted = yaml.safe_load((Path(__file__).parents[3] / "examples" / "llm" / f"{example}.yaml").read_text())["dataset"]
    mapping = {"column_mapping": wanted["column_mapping"]} if "column_mapping" in wanted else {}
    tokenizer = "smollm2" if mapping else "gpt2"
    data = run("squad-v1.1-dev/dev-v1.1.json.gz", "causal-lm", tokenizer, max_length=wanted["max_length"], **mapping)
    assert (data.stats.rows, data.stats.skipped, data.stats.truncated) == (10_570, 0, 0)


def test_alpaca_and_gsm8k(run, tokenizers):
    alpaca = run("llamafactory-demos/alpaca_en_demo.json.gz", "causal-lm", "smollm2")
    assert (alpaca.stats.rows, alpaca.stats.used) == (999, 999)
    assert learned(alpaca, tokenizers["smollm2"], 0).endswith("<|im_end|>")
    gsm8k = run("gsm8k", "causal-lm", "gpt2", positions=1024, split="test")
    assert gsm8k.stats.rows == 1319
    assert all("#### " in learned(gsm8k, tokenizers["gpt2"], i) for i in (0, 500, 1318))


def test_tool_calls(run, tokenizers):
    data = run("llamafactory-demos/glaive_toolcall_en_demo.json.gz", "causal-lm", "smollm2", on_bad_row="skip")
    assert data.stats.skipped == 1  # one prompt of 5,866 tokens
    turns = learned(data, tokenizers["smollm2"], 0).split("<|im_end|>")
    assert turns[0].startswith("Of course!")
    assert turns[1].startswith('{"name": "search_recipes"')
    assert len(turns) == 5


def test_tool_calls_are_written_as_qwen_writes_them(run, tokenizers, shared_data, tmp_path):
    import gzip
    import shutil

    from transformers import AutoTokenizer

    given, folder = shared_data / "tokenizers" / "qwen2.5", tmp_path / "qwen"
    folder.mkdir()
    shutil.copy(given / "tokenizer_config.json", folder)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((given / "tokenizer.json.gz").read_bytes()))
    tokenizers["qwen"] = AutoTokenizer.from_pretrained(folder)
    data = run("llamafactory-demos/glaive_toolcall_en_demo.json.gz", "causal-lm", "qwen", split="train[:20]")
    turns = learned(data, tokenizers["qwen"], 0).split("<|im_end|>")
    assert turns[0].startswith("Of course!")
    assert turns[1].startswith('<tool_call>\n{"name": "search_recipes", "arguments": {')
    assert turns[1].endswith("}\n</tool_call>")


def test_plain_text_loses_no_token(run, tokenizers):
    data = run("text-lm/tinyshakespeare.txt.gz", "causal-lm", "gpt2", positions=64)
    assert data.stats.rows == 7222
    assert data.stats.used > 7222
    assert data.stats.truncated == 0
    predicted = sum(PackedCollator(data.store, "next_token", micro_batch_size=1)([i]).num_labels for i in range(50))
    assert predicted == int((data.store.lengths[:50] - 1).sum())


def test_dataset_class_from_python(shared_data, tokenizers, tmp_path):
    from torch.utils.data import DataLoader

    data = TextClassificationDataset(
        str(shared_data / "imdb-small"),
        "train[:40]",
        tokenizer=tokenizers["bert"],
        max_length=64,
        text_column="text",
        label_column="label",
        num_samples_limit=10,
        cache_dir=str(tmp_path),
    )
    assert len(data) == 10
    assert data.num_labels == 2
    assert data[0]["input_ids"].tolist()[0] == tokenizers["bert"].cls_token_id
    assert data[-1]["labels"].item() in (0, 1)
    with pytest.raises(IndexError):
        data[10]
    batch = next(iter(DataLoader(data, batch_size=4, collate_fn=data.collate_fn)))
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["labels"].shape == (4,)
    by_name = TextClassificationDataset(
        str(shared_data / "imdb-small"),
        tokenizer=str(shared_data / "tokenizers/bert-base-uncased"),
        cache_dir=str(tmp_path),
    )
    assert len(by_name) == 1000


def test_squad_from_python(shared_data, tokenizers, tmp_path):
    file = str(shared_data / "squad-v1.1-dev/dev-v1.1.json.gz")
    data = make_squad_dataset(tokenizers["gpt2"], file, limit_dataset_samples=5, cache_dir=str(tmp_path))
    assert len(data) == 5
    item = data[0]
    assert tokenizers["gpt2"].decode(item["labels"][item["labels"] != IGNORE]) == " October 1973<|endoftext|>"
