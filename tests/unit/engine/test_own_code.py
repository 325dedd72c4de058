"""Models that come with code of their own (`auto_map`, `trust_remote_code`): trained, saved with their code, loaded by
stock transformers, with an adapter and without."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.assess import assess
from automodel.engine.run import finetune
from automodel.models.auto_class import forget_code_that_is_not_run
from automodel.plan.check import load_run_config
from automodel.tasks.infer import tasks_of
from automodel.tasks.registry import SEQ2SEQ

CONFIGURATION = """
from transformers import PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own_decoder"
    def __init__(self, vocab_size=99, width=16, **others):
        self.vocab_size, self.width = vocab_size, width
        super().__init__(**others)
"""
MODELING = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig
class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.mixed, self.head = nn.Linear(config.width, config.width), nn.Linear(config.width, config.vocab_size)
        self.post_init()
    def get_input_embeddings(self):
        return self.table
    def get_output_embeddings(self):
        return self.head
    def forward(self, input_ids=None, attention_mask=None, **others):
        sums = self.table(input_ids).cumsum(1)  # every token reads those before it
        return CausalLMOutput(logits=self.head(self.mixed(sums).tanh()))
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    folder, tokenizer = tmp_path / "model", tiny.make_tokenizer(decoder=True)
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    facts = {"model_type": "own_decoder", "vocab_size": len(tokenizer), "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(facts))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tiny.write_jsonl(tmp_path / "rows.jsonl", [{"text": row["text"]} for row in tiny.reviews(24)])
    (tmp_path / "run.yaml").write_text(
        f"task: causal-lm\nmodel: {{pretrained_model_name_or_path: {folder}, trust_remote_code: true}}\n"
        f"dataset: {{path: {tmp_path}/rows.jsonl, max_length: 32}}\n"
        f"validation_dataset: {{path: {tmp_path}/rows.jsonl}}\n"
        f"optimizer: {{lr: 1e-2}}\nstep_scheduler: {{max_steps: 6}}\ncheckpoint: {{checkpoint_dir: {tmp_path}/out}}\n"
        + tiny.FP32
    )
    return tmp_path / "run.yaml"


def test_a_task_that_the_code_has_no_class_for(run_file):
    settings, trust = ["task=text-classification"], ["remote_code"]
    with pytest.raises(
        UserError, match="is a own_decoder model, which cannot do text-classification; it can do causal"
    ):
        finetune(load_run_config([run_file], settings, trust), trust=trust)


@pytest.mark.parametrize("settings", [[], ["peft={dim: 2}"]], ids=["whole", "adapter"])
def test_trained_saved_and_loaded(run_file, settings):
    trust = ["remote_code"]
    with (run_file.parent / "console.txt").open("w") as file:
        finetune(load_run_config([run_file], settings, trust), trust=trust, console=Console(file=file, width=200))
    out = run_file.parent / "out"
    measured = assess(out, trust=trust).metrics.values["loss"]
    noted = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    assert measured == pytest.approx(noted[-1]["loss"], rel=1e-5)
    if not settings:
        stock = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
        assert type(stock).__name__ == "OwnForCausalLM"
        before = AutoModelForCausalLM.from_pretrained(run_file.parent / "model", trust_remote_code=True)
        assert not torch.equal(stock.table.weight, before.table.weight)


BESIDE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def test_code_that_nobody_trusts_beside_a_class_of_transformers(run_file):
    """As Phi-3 has it: transformers' class is trained, so the plan is that class's, and what is saved names no files
    that are not there."""
    folder = tiny.make_model_folder(run_file.parent / "both", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": BESIDE}))
    settings = [f"model={{pretrained_model_name_or_path: {folder}}}", "step_scheduler.max_steps=1"]
    with (run_file.parent / "console.txt").open("w") as file:
        finetune(load_run_config([run_file], settings, []), console=Console(file=file, width=200))
    out = run_file.parent / "out"
    assert json.loads((out / "run/plan.json").read_text())["path"] == "packed"
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert type(AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)).__name__ == "LlamaForCausalLM"


def test_a_class_that_transformers_lacks_stays_named():
    config = AutoConfig.for_model("llama", auto_map=BESIDE | {"AutoModelForSeq2SeqLM": "modeling_own.OwnForBoth"})
    forget_code_that_is_not_run(config)
    assert SEQ2SEQ in tasks_of(config)
    assert len(config.auto_map) == 3
