"""The hub is looked for once, and what it does not answer costs seconds and one line."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
import time
from contextlib import contextmanager, suppress

import datasets
import huggingface_hub.constants
import pytest

import tiny_runs as tiny
from automodel.config import hub
from automodel.config.errors import UserError
from automodel.data.config import DatasetConfig
from automodel.data.sources import load_rows
from automodel.engine.read_data import read_data
from automodel.plan.check import load_run_config

SECONDS = 2.0


@pytest.fixture
def asked_anew(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    hub.hub_answers.cache_clear()
    yield
    hub.hub_answers.cache_clear()


@pytest.fixture
def unreachable(asked_anew, monkeypatch, tmp_path, hf_cache):
    """No hub, and nothing in the caches; the libraries are not told to be offline."""
    hf_cache.activate(monkeypatch)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@contextmanager
def answering(code: int):
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("code", "there"), [(200, True), (401, True), (404, True), (502, False), (503, False)])
@pytest.mark.parametrize("by_proxy", [False, True])
def test_what_counts_as_an_answer(asked_anew, monkeypatch, code, there, by_proxy):
    with answering(code) as address:
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid" if by_proxy else address)
        if by_proxy:
            monkeypatch.setenv("http_proxy", address)
        assert hub.hub_answers() is there


def test_a_hub_that_takes_the_connection_and_says_nothing(asked_anew, monkeypatch):
    monkeypatch.setattr(hub, "PROBE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        assert not hub.hub_answers()
        assert time.monotonic() - begun < SECONDS


def test_the_libraries_are_left_as_they_were(unreachable):
    def offline() -> list[bool]:
        return [huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]

    with hub.hub_left_alone():
        assert offline() == [True, True]
    assert offline() == [False, False]
    with suppress(UserError), hub.hub_left_alone():
        raise UserError("not there")
    assert offline() == [False, False]


def test_a_dataset_out_of_reach_is_said_at_once(unreachable, capfd, caplog):
    begun = time.monotonic()
    with pytest.raises(UserError) as caught:
        load_rows(DatasetConfig(path="org/none"))
    assert time.monotonic() - begun < SECONDS
    assert str(caught.value).startswith(
        "dataset.path: the dataset 'org/none' cannot be loaded: the Hugging Face hub can"
    )
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_in_the_cache_is_taken_at_once(unreachable, hf_cache):
    hf_cache.add_dataset("imdb", {"train": tiny.reviews(4)})
    hf_cache.add_dataset("org/raw", {"train": tiny.reviews(6)}, prepared=False)
    begun = time.monotonic()
    assert len(load_rows(DatasetConfig(path="imdb"))) == 4
    assert len(load_rows(DatasetConfig(path="org/raw"))) == 6
    assert time.monotonic() - begun < 2 * SECONDS


def problems(*settings: str) -> list[str]:
    cfg = load_run_config([], ["task=text-classification", *settings])
    with pytest.raises(UserError) as caught:
        read_data(cfg)
    return str(caught.value).splitlines()


def test_problems_of_model_and_data_come_together(unreachable, tmp_path):
    title, *listed = problems(
        "model={name: org/none, tokenizer: org/words}", "dataset={mixture: [org/rows, missing.csv]}",
        "validation_dataset={path: missing.jsonl}",
    )  # fmt: skip
    assert title == "5 problems with the model and the data"
    begins = [
        "- model.pretrained_model_name_or_path: 'org/none' is neither a local folder nor in the cache",
        "- model.tokenizer: 'org/words' is neither a local folder nor in the cache",
        "- dataset.mixture.0.path: the dataset 'org/rows' cannot be loaded: the Hugging Face hub cannot be reached",
        "- dataset.mixture.1.path: there is no file or folder 'missing.csv'",
        "- validation_dataset.path: there is no file or folder 'missing.jsonl'",
    ]
    assert [line[: len(begin)] for line, begin in zip(listed, begins)] == begins


def test_one_problem_is_said_alone(unreachable, tmp_path):
    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.reviews(4))
    [only] = problems("model=org/none", "dataset=rows.jsonl")
    assert only.startswith("model.pretrained_model_name_or_path: 'org/none' is neither")


def test_data_that_are_there_are_not_read_for_it(unreachable, tmp_path, monkeypatch):
    """A model's name that is mistyped must not cost the time of reading a large dataset."""
    from automodel.data.sources import FileSource

    tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.reviews(4))
    monkeypatch.setattr(FileSource, "load", lambda _: pytest.fail("read"))
    [only] = problems("model=org/none", "dataset=rows.jsonl")
    assert "org/none" in only


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_that_is_turned_off_is_not_said_to_be_silent(unreachable, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    _, model, _, data = problems("model={name: org/none, tokenizer: org/none}", "dataset=org/rows")
    assert f"and {variable}=1 is set. Check the name, unset {variable} where there is a connection, or " in model
    assert f"'org/rows' cannot be loaded: {variable}=1 is set, and it is not in the local cache" in data
    assert "does not answer" not in model
    assert f"Unset {variable}, set HF_HOME" in data
