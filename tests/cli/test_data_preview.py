"""`automodel data preview`: the real command on the data of every task; numbers that agree with the run's own."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import sys

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models without weights (a preview needs none), and data."""
    folder = tmp_path_factory.mktemp("preview")
    for kind in ("llama", "bert", "t5"):
        tiny.make_model_folder(folder / kind, kind)
        for weights in (folder / kind).glob("*.safetensors"):
            weights.unlink()
    chance = random.Random(0)
    rows = [
        {"prompt": "what is good ?", "completion": " ".join(chance.choices(tiny.NEUTRAL, k=chance.randint(1, 60)))}
        for _ in range(100)
    ]
    tiny.write_jsonl(folder / "qa.jsonl", rows)
    tiny.write_jsonl(folder / "reviews.jsonl", tiny.reviews(90))
    tags = [{"tokens": ["good", "film", "plot"], "ner_tags": ["O", "B-WORK", "I-WORK"]}] * 12
    tiny.write_jsonl(folder / "tags.jsonl", tags)
    yield folder
    shutil.rmtree(folder)


def config(folder, model: str, task: str, data: str, more: str = "") -> str:
    path = folder / f"{task}.yaml"
    text = f"model: {folder / model}\ntask: {task}\ndataset: {{{data}, cache_dir: {folder / 'cache'}}}\n{more}"
    path.write_text(text)
    return str(path)


def look(path: str, *overrides: str, **options) -> dict:
    """What `--json` prints; in this process, since a fresh one costs seconds of imports."""
    from automodel.engine.preview import preview
    from automodel.plan.check import load_run_config

    return json.loads(json.dumps(preview(load_run_config([path], overrides), **options).to_json()))


def page(path: str, width: int = 80, **options) -> str:
    from rich.console import Console

    from automodel.cli.preview_page import print_preview
    from automodel.engine.preview import preview
    from automodel.plan.check import load_run_config

    said = io.StringIO()
    print_preview(preview(load_run_config([path]), **options), Console(file=said, width=width))
    return said.getvalue()


def test_numbers_of_a_language_model(place):
    path = config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}, max_length: 40")
    seen = look(path, "dataloader.batch_size=4", samples=2)
    rows = [json.loads(line) for line in (place / "qa.jsonl").read_text().splitlines()]
    # [CLS] user : what is good ? [SEP] [CLS] assistant : … [SEP]
    lengths = [11 + len(row["completion"].split()) + 1 for row in rows]
    cut = sum(length > 40 for length in lengths)
    assert 0 < cut < 100
    assert (seen["stats"]["truncated"], seen["truncated_share"]) == (cut, cut / 100)
    assert seen["rows_whose_end_is_not_learned"] == cut
    assert seen["stats"]["tokens"] == sum(min(length, 40) for length in lengths)
    assert seen["stats"]["supervised"] == seen["stats"]["tokens"] - 11 * 100
    assert seen["supervised_share"] == seen["stats"]["supervised"] / seen["stats"]["tokens"]
    assert sum(seen["stats"]["length_histogram"]["counts"]) == 100
    batches = seen["batches"]
    assert (batches["path"], batches["steps"], batches["samples"], batches["examples"]) == ("packed", 25, 100, 4)
    assert 0 < batches["grouped_padding"] < batches["padding"] < 1
    for sample in seen["samples"]:
        learned = "".join(p["text"] for p in sample["pieces"] if p["learned"]).split()
        assert learned == [*rows[sample["row"]]["completion"].split(), "[SEP]"][: 40 - 11]


def test_the_command_prints_a_page_of_80_columns(place):
    path = config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}, max_length: 40")
    printed = tiny.automodel("data", "preview", "-c", path, "--samples", 1, COLUMNS="80").stdout
    assert max(map(len, printed.splitlines())) <= 80
    assert re.search(r"Sample 1/1  row \d+, \d+ tokens, \d+ learned", printed)
    assert re.search(r"«[^»]+»", printed.partition("Sample 1/1")[2])  # what is learned, where there are no colours
    for words in ("Tokens of a sample", "tokens learned", "samples with none", "end learned", "cut", "steps an epoch"):
        assert words in printed
    assert re.search(r"padding avoided +\d+\.\d%", printed)


def test_a_narrow_terminal_has_remarks_below_their_numbers(place):
    text = page(config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}"), width=40)
    learned = text[text.index("What is learned") :]
    assert max(map(len, learned.splitlines())) <= 40
    assert re.search(r"^  samples with none +0\n    checked: a run would not start with\n    one$", learned, re.M)


def test_colours_on_a_terminal(place):
    from rich.console import Console

    from automodel.cli.preview_page import print_preview
    from automodel.engine.preview import preview
    from automodel.plan.check import load_run_config

    cfg = load_run_config([config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}")])
    said = io.StringIO()
    print_preview(preview(cfg, samples=1), Console(file=said, width=80, force_terminal=True, color_system="standard"))
    text = said.getvalue()
    assert re.search(r"\x1b\[1;30;42m ?\[SEP\]", text)  # the learned end: bold black on green
    assert re.search(r"\x1b\[36m ?\[CLS\]", text)  # a special token of the prompt
    assert "\x1b[1;32m" in text
    assert "«" not in text


def test_the_padding_is_that_of_the_runs_own_batches(place):
    """The share that is shown against padded batches of the same samples, made by the collator."""
    import numpy as np

    from automodel.data.collate import PaddedCollator
    from automodel.data.loader import StepLoader
    from automodel.engine.preview import preview
    from automodel.engine.read_data import read_data
    from automodel.plan.check import load_run_config

    cfg = load_run_config(
        [config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}")], ["dataloader.batch_size=6"]
    )
    seen, store = preview(cfg, samples=0), read_data(cfg).train.store
    loader = StepLoader(
        PaddedCollator(store, "next_token", 0), lengths=store.lengths, micro_batch_size=6, seed=cfg.seed
    )
    batches = [b for step in range(len(loader)) for b in loader.order.micro_batches(0, step)]
    padded = [PaddedCollator(store, "next_token", 0)(batch) for batch in batches]
    share = 1 - sum(b.num_tokens for b in padded) / sum(b.input_ids_BS.numel() for b in padded)
    assert seen.batches.padding == pytest.approx(share)
    assert np.sum([b.num_documents for b in padded]) == 100


def test_bins_and_mixtures(place):
    members = f"[{{path: {place / 'qa.jsonl'}, weight: 3}}, {{path: {place / 'reviews.jsonl'}, text_column: text}}]"
    more = "packed_sequence: {packed_sequence_size: 128}"
    seen = look(config(place, "llama", "causal-lm", f"mixture: {members}", more))
    assert seen["mixture"] == "qa.jsonl: 100 of 100, reviews.jsonl: 33 of 90 (0.37 epochs)"
    assert seen["batches"]["bin_tokens"] == 128
    assert seen["batches"]["steps"] == seen["batches"]["bins"]
    assert 0.8 < seen["batches"]["fill"] <= 1
    assert seen["batches"]["samples"] == 133
    assert {sample["dataset"] for sample in seen["samples"]} <= {"qa.jsonl", "reviews.jsonl"}
    assert all(sample["row"] < 100 for sample in seen["samples"])


def test_classes_tags_and_targets(place):
    reviews = config(place, "bert", "text-classification", f"path: {place / 'reviews.jsonl'}")
    seen = look(reviews, samples=1)
    assert seen["samples"][0]["label"] in ("0", "1")
    assert seen["supervised_share"] is None
    assert re.search(r"│ \[CLS\] [^→]*→ «[01]»", page(reviews))
    tags = config(place, "bert", "token-classification", f"path: {place / 'tags.jsonl'}")
    assert "film[B-WORK] plot[I-WORK]" in page(tags, samples=1)
    data = f"path: {place / 'qa.jsonl'}, source_column: prompt, target_column: completion"
    summaries = config(place, "t5", "seq2seq", data)
    seen = look(summaries, samples=1)
    assert seen["samples"][0]["target"][0]["learned"]
    assert seen["batches"]["path"] == "padded"
    assert "this model is padded" in page(summaries, width=120)


def test_what_is_cut_is_told_with_the_length_before(place):
    path = config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}, max_length: 40")
    seen, text = look(path), page(path, width=120)
    rows = [json.loads(line) for line in (place / "qa.jsonl").read_text().splitlines()]
    longest = max(11 + len(row["completion"].split()) + 1 for row in rows)
    cut = seen["stats"]["truncated"]
    assert seen["stats"]["longest"] == longest > 40
    assert f"longest 40 ({longest} before it was cut)" in text
    assert (
        f"cut                {cut}.0%  {cut} of 100 samples: longer than max_length 40; the longest has {longest}"
        in text
    )
    data = f"path: {place / 'qa.jsonl'}, source_column: prompt, target_column: completion, max_target_length: 20"
    summaries = config(place, "t5", "seq2seq", data)
    assert look(summaries)["truncated_targets_share"] == look(summaries)["stats"]["truncated_targets"] / 100 > 0
    assert re.search(r"cut +0.0%  no sample is longer than max_length 512", page(summaries, width=120))
    assert re.search(r"targets cut +\d+.0%  \d+ of 100 targets: longer than max_target_length 20", page(summaries, 120))


def test_validation_and_what_is_wrong(place):
    held_out = f"validation_dataset: {{path: {place / 'reviews.jsonl'}, text_column: text}}\n"
    path = config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}", held_out)
    seen = look(path, split="validation")
    assert (seen["split"], seen["stats"]["rows"], seen["batches"]) == ("validation", 90, None)
    assert [sample["row"] for sample in seen["samples"]] == [0, 1, 2]
    with pytest.raises(UserError, match="the config has no validation_dataset"):
        look(path, "validation_dataset=null", split="validation")


def test_both_parts_of_the_data_are_blamed_together(place):
    more = f"validation_dataset: {{path: {place / 'missing.jsonl'}}}\n"
    data = f"path: {place / 'qa.jsonl'}, column_mapping: {{question: promt, answer: completion}}"
    result = tiny.automodel("data", "preview", "-c", config(place, "llama", "causal-lm", data, more), check=False)
    assert result.returncode == 2
    assert "2 problems with the data" in result.stderr
    assert "- dataset.column_mapping: the data has no column 'promt'" in result.stderr
    assert "- validation_dataset.path: there is no file or folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_model_code_is_imported(place):
    import os
    import subprocess

    path = config(place, "llama", "causal-lm", f"path: {place / 'qa.jsonl'}")
    program = (
        "import sys\nfrom automodel.plan.check import load_run_config\n"
        f"cfg = load_run_config([{path!r}])\nfrom automodel.engine.preview import preview\npreview(cfg)\n"
        "print([m for m in sys.modules if m.startswith('transformers.models.llama.modeling')])"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
