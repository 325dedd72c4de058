"""A run on a GPU finds in Triton's cache what was compiled ahead for it, all of it.

    pytest -m gpu tests/gpu/test_kernels_ahead.py

Every run has a cache folder of its own. Entries are named by what they hold, so those of a run that compiles for itself
can be looked for among those that the process ahead made.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_runs as tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BERT = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 192,
    "max_position_embeddings": 128,
}  # fmt: skip
DISTILBERT = {"dim": 128, "n_layers": 3, "n_heads": 2, "hidden_dim": 192, "max_position_embeddings": 128}
MODERNBERT = BERT | {"num_hidden_layers": 4, "local_attention": 16, "attention_dropout": 0.1}
DECODER = BERT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
STEPS = "step_scheduler: {max_steps: 6, val_every_steps: 3}\n"


def write_run(folder: Path, kind: str, text: str) -> Path:
    import transformers as hf

    run = tiny.write_run(folder, kind="bert", text=text)
    size = {"distilbert": DISTILBERT, "electra": BERT | {"embedding_size": 64}, "modernbert": MODERNBERT}
    size |= dict.fromkeys(("llama", "qwen3"), DECODER)
    config = hf.AutoConfig.for_model(
        kind, **size.get(kind, BERT), vocab_size=len(tiny.make_tokenizer()), pad_token_id=0
    )
    for name in ("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 2)
    for old in (folder / "model").glob("model*"):
        old.unlink()
    kind_of_model = hf.AutoModelForCausalLM if size.get(kind) is DECODER else hf.AutoModelForMaskedLM
    kind_of_model.from_config(config).save_pretrained(folder / "model")
    return run


def compile_ahead(run: Path, cache: Path) -> subprocess.CompletedProcess:
    """The process alone, with the facts that the command would give it."""
    from automodel.plan.check import load_run_config
    from automodel.plan.kernels_ahead import facts_of, model_config

    cfg = load_run_config([run])
    config = model_config(cfg.model)
    assert config is not None
    facts = facts_of(cfg, config)
    assert facts is not None
    command = [sys.executable, "-m", "automodel.kernels.ahead_worker", facts.to_json(), str(cache / "stamp.json")]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def train(run: Path, cache: Path, **environment: str):
    own = {"TRITON_CACHE_DIR": str(cache), "AUTOMODEL_CACHE": str(run.parent / "cache")}
    return tiny.automodel("finetune", "llm", "-c", run, "--overwrite", **(own | environment))


def entries(cache: Path) -> dict[str, str]:
    """Each folder of the cache, and the kernel or library in it."""
    found = {}
    for folder in cache.iterdir():
        if folder.is_dir():
            names = [path.name for path in folder.iterdir() if path.suffix in (".json", ".so")]
            found[folder.name] = ", ".join(name for name in names if not name.startswith("__grp"))
    return found


CASES = {
    "distilbert": ("distilbert", STEPS),
    "distilbert-b6": ("distilbert", STEPS + "dataloader: {batch_size: 6}\n"),
    "bert": ("bert", STEPS),
    "bert-accumulating": ("bert", "step_scheduler: {max_steps: 6, val_every_steps: 3, grad_acc_steps: 2}\n"),
    "bert-fp32": ("bert", STEPS + "training_optimizations: {precision: fp32}\n"),
    "electra-fp16": ("electra", STEPS + "training_optimizations: {precision: fp16}\n"),
    "modernbert": ("modernbert", STEPS),
    "llama": ("llama", STEPS),
    "qwen3": ("qwen3", STEPS),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_needs_nothing_that_was_not_foreseen(tmp_path, case):
    run = write_run(tmp_path, *CASES[case])
    foreseen, needed = tmp_path / "foreseen", tmp_path / "needed"
    foreseen.mkdir()
    done = compile_ahead(run, foreseen)
    assert done.returncode == 0, done.stderr[-3000:]
    train(run, needed, AUTOMODEL_COMPILE_AHEAD="0")
    assert len(entries(needed)) > 3
    missing = {what for name, what in entries(needed).items() if name not in entries(foreseen)}
    assert not missing


def test_the_command_compiles_ahead_once(tmp_path):
    """The whole way: the first run leaves a stamp, the second one adds nothing and starts nothing."""
    run = write_run(tmp_path, "distilbert", STEPS)
    cache = tmp_path / "triton"
    train(run, cache)
    stamps = list((tmp_path / "cache" / "kernels").glob("*.json"))
    assert len(stamps) == 1
    before, written = entries(cache), stamps[0].stat().st_mtime_ns
    second = train(run, cache)
    assert "Waited" not in second.stdout
    assert stamps[0].stat().st_mtime_ns == written
    assert entries(cache) == before
