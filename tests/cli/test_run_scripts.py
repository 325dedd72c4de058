"""Scripts as people write them, under `automodel run`: unchanged, and with the losses of stock Trainer.

They run in this process, once with transformers' Trainer and once with ours in its place; the command itself is tried
on two of them. Random weights, no dropout, fp32.
"""

from __future__ import annotations

import contextlib
import gc
import runpy
import sys
from pathlib import Path

import pytest

import tiny_runs as tiny
from tiers import quick

SCRIPTS = Path(__file__).parent / "hf_scripts"
TOLERANCE = 1e-4
FLAGS = "--do_train --do_eval --max_steps 6 --learning_rate 1e-3 --logging_steps 2 --save_strategy no --report_to none"
OLD_FLAGS = "--evaluation_strategy steps --eval_steps 3 --warmup_ratio 0.2 --overwrite_output_dir --no_cuda True"
NEW_FLAGS = "--eval_strategy steps --eval_steps 3 --warmup_steps 0.2 --use_cpu True"

PATHS = {
    "text_classification": "packed steps",
    "token_classification": "packed steps",
    "causal_lm": "packed steps",
    "causal_lm_peft": "Trainer's own steps (PeftModelForCausalLM is not one of",
    "custom_collator": "Trainer's own steps (collate may do anything with a batch)",
    "custom_metrics": "packed steps",
    "callbacks": "packed steps",
    "weighted_loss": "Trainer's own steps (CustomTrainer has a compute_loss of its own)",
    "iterable": "Trainer's own steps (IterableDataset may compute its rows anew each time)",
    "resume": "packed steps",
    "own_optimizer": "Trainer's own steps (an optimizer or a scheduler was handed over)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("scripts")
    for kind in ("bert", "distilbert", "llama"):
        tiny.make_model_folder(root / kind, kind, dropout=0.0)
    tiny.write_jsonl(root / "train.jsonl", tiny.reviews(40))
    tiny.write_jsonl(root / "test.jsonl", tiny.reviews(16, seed=1))
    (root / "words.txt").write_text("".join(row["text"] + "\n" for row in tiny.reviews(40, seed=2)))
    return root


@pytest.fixture
def logged(monkeypatch):
    """What Trainer logs, whichever class it is: both are transformers' Trainer in this."""
    import transformers.trainer

    lines: list[dict] = []
    log = transformers.trainer.Trainer.log

    def kept(self, logs, *args, **kwargs):
        lines.append(dict(logs))
        return log(self, logs, *args, **kwargs)

    monkeypatch.setattr(transformers.trainer.Trainer, "log", kept)
    return lines


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def run_plain(script: Path, arguments: list[str], monkeypatch) -> None:
    import transformers

    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    transformers.set_seed(0)  # new heads are drawn when the model is loaded
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")


def run_ours(script: Path, arguments: list[str]) -> list[str]:
    import transformers

    from automodel.trainer.stand_in import run_script

    transformers.set_seed(0)
    with contextlib.suppress(SystemExit):
        return run_script(script, arguments)
    return []


def compare(ours: list[dict], stock: list[dict]) -> None:
    numbers = ("loss", "eval_loss", "grad_norm", "learning_rate", "eval_accuracy", "train_loss", "test_loss")
    assert len(ours) == len(stock)
    assert any("loss" in line for line in stock)
    for mine, theirs in zip(ours, stock):
        for key in numbers:
            assert (key in mine) == (key in theirs)
            if key in theirs:
                assert mine[key] == pytest.approx(theirs[key], abs=TOLERANCE, rel=TOLERANCE), key


def clean(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder / "out", ignore_errors=True)


@pytest.mark.parametrize("name", quick(PATHS, "text_classification", "causal_lm", "custom_collator", "resume"))
def test_a_script_runs_unchanged_and_gives_the_losses_of_stock(name, folder, logged, monkeypatch):
    if name == "causal_lm_peft":
        pytest.importorskip("peft")
    clean(folder)
    run_plain(SCRIPTS / f"{name}.py", [str(folder)], monkeypatch)
    stock = logged[:]
    logged.clear()
    clean(folder)
    said = run_ours(SCRIPTS / f"{name}.py", [str(folder)])
    assert said[0].startswith(PATHS[name])
    compare(logged, stock)


def test_old_flags_of_a_script_mean_what_they_meant(folder, logged, monkeypatch):
    clean(folder)
    where = ["--folder", str(folder), "--output_dir", str(folder / "out"), *FLAGS.split()]
    run_plain(SCRIPTS / "with_flags.py", [*where, *NEW_FLAGS.split()], monkeypatch)
    stock = logged[:]
    logged.clear()
    run_ours(SCRIPTS / "with_flags.py", [*where, *OLD_FLAGS.split()])
    compare(logged, stock)


def test_the_names_are_put_back():
    import transformers
    import transformers.trainer

    from automodel.trainer.stand_in import stand_in
    from automodel.trainer.trainer import Trainer

    before = transformers.Trainer
    with stand_in():
        assert transformers.Trainer is Trainer
        from apex import amp  # ty: ignore[unresolved-import]

        assert amp.initialize("model", None) == ("model", None)
    assert transformers.Trainer is before is transformers.trainer.Trainer
    assert "apex" not in sys.modules


@pytest.mark.slow
def test_the_command_compares_and_says_what_it_did(folder):
    clean(folder)
    done = tiny.automodel("run", "--compare", "6", SCRIPTS / "text_classification.py", folder)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("automodel: packed steps without padding (fp32, 40 rows held without padding); 5 steps")
    assert "stock Trainer" in last
    assert last.endswith("x")
    assert "eval_loss" in done.stdout


def test_scripts_that_are_not_there_or_fail(tmp_path, capsys, monkeypatch):
    from automodel.cli.main import main

    (tmp_path / "fails.py").write_text("import sys\nvalue = sys.argv[1]\nraise ValueError(value)\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    for name, code, said in (("none", 2, "there is no script"), ("fails", 1, "ValueError: --flag"), ("ends", 3, "")):
        monkeypatch.setattr(sys, "argv", ["automodel", "run", str(tmp_path / f"{name}.py"), "--flag"])
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == code
        error = capsys.readouterr().err
        assert said in error
        assert "runpy" not in error
        assert ("did not call Trainer.train()" in error) == (name == "ends")
