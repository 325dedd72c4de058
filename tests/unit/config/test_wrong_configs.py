"""The messages in wrong_configs.md are the ones a person gets, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from automodel.config.errors import ConfigError
from automodel.plan.check import load_run_config

PAGE = Path(__file__).with_name("wrong_configs.md").read_text(encoding="utf-8")
CASE = re.compile(r"## ([^\n]+)\n\n```yaml\n(.*?)```\n\n(?:```sh\n(.*?)```\n\n)?```text\n(.*?)\n```", re.DOTALL)
CASES = [pytest.param(*found[1:], id=found[0].replace(" ", "-")) for found in CASE.findall(PAGE)]


def test_the_page_holds_every_case_it_shows():
    assert len(CASES) == PAGE.count("\n## ")
    assert len(CASES) >= 30


@pytest.mark.parametrize(("text", "settings", "message"), CASES)
def test_message(text, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUN_SEED_THAT_IS_NOT_SET", raising=False)
    Path("run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run_config(["run.yaml"], settings.split("\n")[:-1])
    assert "\n".join(map(str, caught.value.problems)) == message
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: bert\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(["runn.yaml"])
    assert str(caught.value.problems[0]) == (f"runn.yaml: there is no such file in {tmp_path}. Did you mean run.yaml?")


def test_a_folder_instead_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/a.yaml").write_text("model: bert\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(["configs"])
    assert str(caught.value.problems[0]) == "configs: is a folder, not a config file. It holds a.yaml."


def test_a_file_that_is_not_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_bytes(b"model: \xff\xfe\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(["run.yaml"])
    assert str(caught.value.problems[0]) == "run.yaml: is not UTF-8 text (at byte 7). Is it a YAML file?"


def test_problems_come_in_the_order_of_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: bert\ndataset: x.csv\nsede: 1\nseed: -1\n")
    Path("b.yaml").write_text("dataloader: {batch_size: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(["a.yaml", "b.yaml"], ["optimizer.lr=0"])
    assert [p.where for p in caught.value.problems] == ["a.yaml:3", "a.yaml:4", "b.yaml:1", "command line"]


KEYS = "dataset: {path: a.jsonl, source_prefix: 'x '}\nvalidation_dataset: {path: b.jsonl, labels: [a, b]}\n"


@pytest.mark.parametrize(("model", "names"), [("model: m\ntask: causal-lm\n", 2), ("model: m\n", 0)])
def test_keys_of_another_task(model, names, tmp_path, monkeypatch):
    """Said with their lines where the config itself tells the task; otherwise once the model's own config is read."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(model + KEYS)
    if not names:
        load_run_config(["run.yaml"])
        return
    with pytest.raises(ConfigError) as caught:
        load_run_config(["run.yaml"])
    places = [str(problem).partition(" has no use")[0] for problem in caught.value.problems]
    assert places == [
        "run.yaml:3: dataset.source_prefix: causal-lm",
        "run.yaml:4: validation_dataset.labels: causal-lm",
    ]


def test_a_maker_may_take_keys_of_any_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("rows_of_mine.py").write_text("def make(source_prefix):\n    return []\n")
    text = "model: m\ntask: causal-lm\ndataset: {_target_: rows_of_mine.make, source_prefix: 'x '}\n"
    Path("run.yaml").write_text(text)
    assert load_run_config(["run.yaml"], trust=["rows_of_mine"]).dataset.source_prefix == "x "
