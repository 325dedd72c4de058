"""Every shipped example, copied with `automodel examples cp` into a folder of its own and run there, twice.

What the examples name on the hub is served from a local Hugging Face cache: tiny models of the same families under the
same names, and datasets with the same columns and splits. Nothing of an example is changed but how many steps it takes,
and that only where its own number is too long for CI.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.cli.examples import all_examples, examples_root, find_example
from automodel.plan.check import load_run_config
from hf_cache import HfCache
from tiny_models import tiny_config

NAMES = [example.name for example in all_examples()]

# Name on the hub: family, positions, and whether its tokenizer has a chat template.
MODELS = {
    "distilbert-base-uncased": ("distilbert", 512, False),
    "bert-base-uncased": ("bert", 512, False),
    "bert-base-cased": ("bert", 512, False),
    "t5-small": ("t5", 512, False),
    "facebook/bart-base": ("bart", 1024, False),
    "gpt2": ("gpt2", 1024, False),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 8192, False),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", 8192, True),
    "meta-llama/Llama-3.2-1B": ("llama", 131_072, False),
}
SHORTER = {  # examples whose own number of steps is too long for CI
    "imdb_distilbert": ["step_scheduler.max_steps=4"],
    "early_stopping": ["step_scheduler.max_steps=4", "step_scheduler.val_every_steps=2"],
    "optimized_sentiment_classification": ["step_scheduler.max_steps=4"],
    "bart_summarisation": ["step_scheduler.max_steps=3"],
    "smollm2_squad": ["step_scheduler.max_steps=4"],
    "llama_3_2_1b_squad": ["step_scheduler.max_steps=4"],
}


def add_model(cache: HfCache, folder: Path, name: str) -> None:
    import torch
    import transformers

    family, positions, chats = MODELS[name]
    decoder = family in ("gpt2", "llama")
    tokenizer = tiny.make_tokenizer(decoder)
    tokenizer.model_max_length = positions
    if not chats:
        tokenizer.chat_template = None
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    sizes |= {"n_positions" if family in ("gpt2", "t5") else "max_position_embeddings": positions}
    if decoder:
        sizes |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.cls_token_id}
    kind = "ForCausalLM" if decoder else "ForSeq2SeqLM" if family in ("t5", "bart") else "ForMaskedLM"
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModel{kind}").from_config(tiny_config(family, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    cache.add_model(name, folder)


def add_datasets(cache: HfCache) -> None:
    """As many rows as the examples' slices name, each a few words long."""
    from datasets import ClassLabel, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = sorted(tiny.reviews(25_000, longest=8), key=lambda row: row["label"])  # as IMDB is
    cache.add_dataset("imdb", {"train": rows, "test": rows}, config="plain_text", features=features)
    texts = [row["text"] for row in tiny.reviews(20_000, longest=8)]
    articles = [{"article": f"{text} {text}", "highlights": text, "id": str(i)} for i, text in enumerate(texts)]
    cache.add_dataset(
        "abisee/cnn_dailymail", {"train": articles, "validation": articles[:500], "test": articles[:8]}, config="3.0.0"
    )
    questions = [
        {
            "id": str(i),
            "title": "film",
            "context": text,
            "question": "what is good ?",
            "answers": {"text": [text.split()[0]], "answer_start": [0]},
        }
        for i, text in enumerate(texts[:2_000])
    ]
    cache.add_dataset("rajpurkar/squad", {"train": questions, "validation": questions[:200]}, config="plain_text")


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> dict[str, str]:
    """The environment of a machine that once downloaded what the examples name, and is offline now."""
    home = tmp_path_factory.mktemp("machine")
    cache = HfCache(home / "hf")
    for number, name in enumerate(MODELS):
        add_model(cache, home / f"model-{number}", name)
    add_datasets(cache)
    return cache.env(AUTOMODEL_CACHE=str(home / "tokens"), HOME=str(home), WANDB_MODE="offline")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_twice_where_it_is_copied_to(name, machine, tmp_path):
    copied = tiny.automodel("examples", "cp", name, cwd=tmp_path, **machine)
    assert f"automodel finetune llm -c {name}.yaml" in copied.stdout
    command = ("finetune", "llm", "-c", f"{name}.yaml", *SHORTER.get(name, ()))
    folder = tmp_path / load_run_config([tmp_path / f"{name}.yaml"]).checkpoint.checkpoint_dir
    found = []
    for again in ((), ("--overwrite",)):
        done = tiny.automodel(*command, *again, cwd=tmp_path, **machine)
        assert "Traceback" not in done.stdout + done.stderr
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["status"] == "finished"
        losses = tiny.losses(folder)
        assert losses
        assert all(0 < loss < 50 for loss in losses.values())
        found.append((losses, summary["train_loss"], summary["validation"]))
        saved = [(folder / file).is_file() for file in ("model.safetensors", "adapter_model.safetensors")]
        assert any(saved) is (name != "optimized_sentiment_classification")  # which saves no model, as it says
    assert found[0] == found[1]
    made = {path.name for path in tmp_path.iterdir()} - {"data"}
    assert made == {f"{name}.yaml", folder.name}


@pytest.mark.slow
def test_the_scripts_of_the_benchmark_run_where_they_are_copied_to(machine, tmp_path):
    for path in (examples_root() / "benchmark").iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    for script in ("performance_comparison.py",), ("validate_performance.py", "--speedup-threshold", "0.01"):
        done = subprocess.run(
            [sys.executable, *script, "--against", "hf-trainer", "step_scheduler.max_steps=3"],
            cwd=tmp_path,
            env={**os.environ, **machine, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "performance_comparison_results.json").is_file()


def test_only_steps_are_changed():
    for name, overrides in SHORTER.items():
        assert find_example(name)
        assert all(override.startswith("step_scheduler.") for override in overrides)


def test_examples_in_one_folder_do_not_touch_each_other():
    """Each has a run folder of its own, and none of them hides a name of the hub: `./imdb` is what `imdb` would be."""
    folders, names = {}, set()
    for example in all_examples():
        cfg = load_run_config([example.path])
        folder = Path(cfg.checkpoint.checkpoint_dir)
        assert len(folder.parts) == 1
        assert folder.name not in folders, f"{example.name} and {folders[folder.name]} both write to {folder}"
        folders[folder.name] = example.name
        sections = [section for section in (cfg.dataset, cfg.validation_dataset) if section and section.path]
        names |= {Path(section.path).parts[0] for section in sections}
        names |= {Path(cfg.model.pretrained_model_name_or_path).parts[0], *example.path.name.split(".")}
    assert not names & set(folders)
    # That of a config that names none is left to the example whose reference document reads it.
    assert folders["checkpoints"] == "llama_3_2_1b_squad"
