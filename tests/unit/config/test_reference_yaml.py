"""Every YAML of the reference documents is a config here, layered as the documents say."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest

from automodel.config.complaints import Complaints
from automodel.config.read import read_text
from automodel.config.schema import json_schema
from automodel.config.tree import to_python
from automodel.plan.check import load_run_config, not_yet
from automodel.plan.config import RunConfig

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT.parent / "shared" / "reference"

pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="../shared/reference is not here")


def blocks(document: str) -> list[str]:
    """The document's YAML blocks at the left margin (an indented one is a CI file)."""
    return re.findall(
        r"^```yaml\n(.*?)^```", (REFERENCE / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.fixture
def classification(tmp_path) -> list[Path]:
    paths = []
    for number, text in enumerate(blocks("text-classification-example.md")):
        paths.append(tmp_path / f"part{number}.yaml")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def test_the_complete_yaml(classification):
    cfg = load_run_config(classification[:1])
    assert cfg.model.pretrained_model_name_or_path == "distilbert-base-uncased"
    assert cfg.model.target == "nemo_automodel.NeMoAutoModelForSequenceClassification.from_pretrained"
    assert (cfg.dataset.path, cfg.dataset.split, cfg.dataset.num_samples_limit) == ("imdb", "train", 1000)
    assert cfg.validation_dataset is not None
    assert cfg.validation_dataset.split == "test"
    assert cfg.step_scheduler.max_steps == 125
    assert (cfg.dataloader.batch_size, cfg.validation_dataloader.batch_size) == (8, 16)
    assert (cfg.optimizer.lr, cfg.optimizer.weight_decay) == (2e-5, 0.01)
    assert cfg.wandb is not None
    assert cfg.wandb.tags == ("performance", "sentiment", "optimization")
    assert not cfg.checkpoint.enabled
    assert not_yet(cfg) == []


def test_the_fragments_are_layered(classification):
    assert len(classification) == 3
    cfg = load_run_config(classification)
    assert cfg.model.num_labels == 2
    assert cfg.model.attn_implementation == "flash_attention_2"
    assert cfg.model.use_liger_kernel is True
    assert cfg.distributed.dp_size is None
    assert (cfg.dataloader.num_workers, cfg.dataloader.prefetch_factor) == (8, 4)
    assert cfg.training_optimizations.use_compile is True
    assert cfg.peft is not None
    assert (cfg.peft.dim, cfg.peft.alpha, cfg.peft.use_triton) == (8, 16, True)
    assert not_yet(cfg) == []


def test_the_commented_fp8_lines_work_too(classification):
    text = classification[2].read_text()
    classification[2].write_text(re.sub(r"^(  )# (fp8_config:|  _target_:)", r"\1\2", text, flags=re.MULTILINE))
    cfg = load_run_config(classification)
    assert cfg.model.fp8_config is not None
    assert not not_yet(cfg)


def test_the_speedup_fragment_lies_on_the_squad_example(tmp_path):
    example = ROOT / "examples" / "llm" / "llama_3_2_1b_squad.yaml"
    (fragment,) = blocks("speedup-tutorial.md")
    path = tmp_path / "fragment.yaml"
    path.write_text(fragment)
    cfg = load_run_config([example, path])
    assert cfg.model.pretrained_model_name_or_path == "meta-llama/Llama-3.2-1B"
    assert cfg.dataloader.shuffle is False
    assert not_yet(cfg) == []


def test_the_schema_takes_the_complete_yaml():
    text = blocks("text-classification-example.md")[0]
    node = read_text(text, "x", 0, Complaints())
    assert node is not None
    jsonschema.Draft202012Validator(json_schema(RunConfig)).validate(to_python(node))
