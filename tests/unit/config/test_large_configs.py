"""Configs that are deeper, longer or larger than any config is: one line says so, and soon."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from automodel.config.errors import ConfigError
from automodel.plan.check import load_run_config

START = "model: bert\ndataset: reviews.csv\n"
DEEP = 5000
TOO_DEEP = "keys and lists lie inside each other more than 60 times. Is a bracket not closed?"
ENDLESS = "the file's `*aliases` repeat without end. Write the values out."
DATA = "Is this a config, or the data?"
SECONDS = 10


def nested_json(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def block_of(levels: int) -> str:
    return "\n".join(f"{' ' * level}a:" for level in range(levels)) + " 1\n"


def bomb(levels: int, width: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def chain(levels: int) -> str:
    """Aliases that lie inside each other, one in the next, so that nothing grows but the depth."""
    return "\n".join(["a0: &a0 [x]", *(f"a{level}: &a{level} [*a{level - 1}]" for level in range(1, levels))])


FILES = {
    "brackets": ("run.yaml", START + f"seed: {'[' * DEEP}{']' * DEEP}\n", TOO_DEEP),
    "open brackets": ("run.yaml", START + f"seed: {'[' * 100_000}\n", TOO_DEEP),
    "braces": ("run.yaml", START + f"seed: {'{a: ' * DEEP}1{'}' * DEEP}\n", TOO_DEEP),
    "dashes": ("run.yaml", "- " * DEEP + "x\n", TOO_DEEP),
    "blocks": ("run.yaml", block_of(1000), TOO_DEEP),
    "a key of brackets": ("run.yaml", START + f"? {'[' * DEEP}\n", TOO_DEEP),
    "JSON": ("run.json", f'{{"model": "bert", "dataset": {nested_json(DEEP)}}}', TOO_DEEP),
    "flat settings": ("run.json", f'{{"lora_r": {nested_json(DEEP)}, "model_name": "bert"}}', TOO_DEEP),
    "an alias bomb": ("run.yaml", START + bomb(12), ENDLESS),
    "aliases in a chain": ("run.yaml", START + chain(3000), ENDLESS),
    "an alias of itself": ("run.yaml", START + "peft: &a\n  target_modules: [*a]\n", ENDLESS),
    "a bomb of merge keys": ("run.yaml", START + "a0: &a0 {k: 1}\n" + "\n".join(
        f"a{n}: &a{n} {{k{n}: 1, <<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12)), ENDLESS),
    "many values": ("run.yaml", START + "peft:\n  target_modules:\n" + "  - x\n" * 30_000, DATA),
    "data": ("run.jsonl", json.dumps({"text": "good film", "label": 1}) * 50_000, DATA),
    "a long key": ("run.yaml", START + "k" * 900 + ": 1\n", "has 900 letters"),
    "a long text": ("run.yaml", f"model: {'x' * 200_000}\ndataset: reviews.csv\n", "is too long for a path"),
    "a long wrong choice": ("run.yaml", START + f"lr_scheduler: {'cosine' * 30_000}\n", "there is no 'cosinecosine"),
}  # fmt: skip


def complaint(files, settings=()) -> str:
    began = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        load_run_config(files, settings)
    assert time.perf_counter() - began < SECONDS
    said = str(caught.value)
    assert max(map(len, said.splitlines())) < 600
    return said


@pytest.mark.parametrize("name", FILES)
def test_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, text, message = FILES[name]
    Path(file).write_text(text)
    said = complaint([file])
    assert message in said
    assert said.splitlines()[1].startswith(f"  {file}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"peft.target_modules={'[' * DEEP}{']' * DEEP}", None),
        (f"seed={'[' * DEEP}{']' * DEEP}", "seed: expected a whole number (at least 0), got the text '[[["),
        ("seed=" + nested_json(DEEP), 'seed: expected a whole number (at least 0), got the text \'{"a"'),
        ("model." + "a." * DEEP + "b=1", "has a key of 10,007 letters"),
        ("model." + "a." * 70 + "b=1", "has 72 keys inside each other"),
        ("seed=" + "9" * 5000, "seed: must be at least 0 and at most 4,294,967,295, got inf."),
        ("wandb.tags." + "9" * 50 + "=x", "`wandb.tags` is a list"),
        ("x" * 5000, "sets nothing"),
        ("model=\udc80\udc81", "holds half of a letter"),
    ],
)
def test_setting(setting, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(START + "wandb: {tags: [a]}\n")
    if message is None:  # a text that begins with a bracket: a regular expression, as far as anybody can say
        load_run_config(["run.yaml"], [setting])
    else:
        assert message in complaint(["run.yaml"], [setting])


def test_a_device_is_read_no_further_than_a_config_goes():
    assert DATA in complaint([os.devnull.replace("null", "zero")])


def test_large_but_ordinary_configs_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = ", ".join(f"class{i}" for i in range(10_000))
    Path("run.yaml").write_text(f"model: bert\ndataset: {{path: a.csv, labels: [{labels}]}}\n")
    assert len(load_run_config(["run.yaml"]).dataset.labels or ()) == 10_000
    Path("run.json").write_text('{"model": "bert", "dataset": "a.csv", "wandb": {"notes": "\\ud83d\\ude00"}}')
    wandb = load_run_config(["run.json"]).wandb
    assert wandb is not None
    assert wandb.notes == "😀"
