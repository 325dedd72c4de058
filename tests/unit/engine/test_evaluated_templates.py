"""Evaluating conversations: they are written, and asked, with the template the model was trained with, wherever its
file is by now; or with the one that is named for the evaluation."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.assess import assess
from automodel.engine.predict import Predictor
from automodel.engine.prompts import prompt_writer
from automodel.engine.questions import Generating
from automodel.engine.run import finetune
from automodel.plan.check import load_run_config

TEMPLATE = (
    "{% if tools %}the {{ tools | length }} music {% endif %}{% for m in messages %}{{ m.role }} : {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant :"
    "{% endif %}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {}}}])
TALK = [{"role": "user", "content": "what is good"}, {"role": "assistant", "content": "the film"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny.make_model_folder(tmp_path / "model", "llama")
    tiny.write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK, "tools": TOOLS}] * 4)
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """The prompts that models are asked, as text."""
    texts, generate = [], Predictor.generate

    def noted(self, prompts, **options):
        texts.extend(prompt_writer(self.saved).text(prompt) for prompt in prompts)
        return generate(self, prompts, **options)

    monkeypatch.setattr(Predictor, "generate", noted)
    return texts


def test_a_run_brings_its_own_template_along(folder, asked):
    (folder / "own.jinja").write_text(TEMPLATE)
    (folder / "run.yaml").write_text(
        f"model: {folder / 'model'}\ntask: causal-lm\nstep_scheduler: {{max_steps: 1}}\n"
        f"dataset: {{path: {folder / 'rows.jsonl'}, chat_template: own.jinja}}\n"
        f"validation_dataset: {{path: {folder / 'rows.jsonl'}}}\ncheckpoint: {{checkpoint_dir: {folder / 'out'}}}\n"
    )
    run = finetune(load_run_config([folder / "run.yaml"]), console=Console(file=io.StringIO())).folder
    (folder / "own.jinja").unlink()
    found = assess(run, generating=Generating(max_samples=1, max_new_tokens=2))
    assert asked == ["the 1 music user : what is good assistant :"]
    assert found.metrics.values["loss"] > 0


def test_a_model_without_a_template_is_evaluated_with_one_that_is_named(folder, asked):
    (folder / "model" / "chat_template.jinja").unlink()
    rows, how = str(folder / "rows.jsonl"), Generating(max_samples=1, max_new_tokens=2)
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        assess(folder / "model", dataset=rows, generating=how)
    assess(folder / "model", dataset=rows, generating=how, settings=["dataset.chat_template=plain"])
    assert asked[-1].endswith("### User:\nwhat is good\n\n### Assistant:\n")
    with pytest.raises(UserError, match="there is no file 'none.jinja'"):
        assess(folder / "model", dataset=rows, settings=["dataset.chat_template=none.jinja"])
