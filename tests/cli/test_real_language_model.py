"""A pretrained language model (260k parameters, children's stories) learns a real task: to name the topic of a piece of
news, one of four. Held-out loss falls and exact match of generated answers rises beyond what guessing gives, by the
commands that anybody would type. The larger run of this kind is `examples/llm/smollm2_squad.yaml`; its numbers stand in
`docs/log.md`."""

from __future__ import annotations

import gzip
import json

import pytest

import tiny_runs as tiny

pytestmark = pytest.mark.slow

TOPICS = ("world", "sports", "business", "science")
GUESSING = 1 / len(TOPICS)
HELD_OUT = 160  # of which 25 % would be right by chance, with a standard deviation of 3.4 %


def news(path, count: int) -> list[dict]:
    """As many pieces of each topic, taken from all over the file."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    share = count // len(TOPICS)
    topics = []
    for label in range(len(TOPICS)):
        same = [row for row in rows if row["label"] == label]
        topics.append(same[:: len(same) // share][:share])
    return [{"question": row["text"], "answer": TOPICS[row["label"]]} for group in zip(*topics) for row in group]


@pytest.fixture(scope="module")
def measured(shared_data, tmp_path_factory):
    """What `evaluate --generate` says before and after, of news that training has not seen."""
    folder = tmp_path_factory.mktemp("real")
    model = shared_data / "stories260k-hf"
    tiny.write_jsonl(folder / "train.jsonl", news(shared_data / "ag-news" / "train_10k.jsonl.gz", 2400))
    tiny.write_jsonl(folder / "test.jsonl", news(shared_data / "ag-news" / "test.jsonl.gz", HELD_OUT))
    (folder / "run.yaml").write_text(
        f"model: {model}\ntask: causal-lm\n"
        f"dataset: {{path: {folder}/train.jsonl, max_length: 400, on_bad_row: skip}}\n"
        f"validation_dataset: {{path: {folder}/test.jsonl}}\ndataloader: {{batch_size: 16}}\n"
        "optimizer: {lr: 3e-3}\nstep_scheduler: {num_epochs: 1, log_every_steps: 50}\n"
        f"checkpoint: {{checkpoint_dir: {folder}/out}}\n{tiny.FP32}"
    )
    cache = {"AUTOMODEL_CACHE": str(folder / "cache")}
    tiny.automodel("finetune", "llm", "-c", folder / "run.yaml", **cache)
    result = {}
    for name, place in (("before", model), ("after", folder / "out")):
        told = tiny.automodel(
            "evaluate", place, "--dataset", folder / "test.jsonl", "--generate", "--max-new-tokens", 8, "--json",
            "task=causal-lm", **cache,
        )  # fmt: skip
        result[name] = json.loads(told.stdout)
        assert result[name]["asked"] == HELD_OUT
    return {name: told["metrics"] for name, told in result.items()}


def test_held_out_loss_falls(measured):
    assert measured["after"]["loss"] < 0.5 * measured["before"]["loss"]


def test_exact_match_rises_beyond_guessing(measured):
    assert measured["before"]["exact_match"] == 0, "a model of stories does not answer with one word"
    assert measured["after"]["exact_match"] > GUESSING + 0.1
