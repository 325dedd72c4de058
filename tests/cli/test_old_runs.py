"""Run folders and checkpoints that commit 66bca91 wrote are still resumed, asked, measured and exported.

`tests/old_runs/make.py` made them with that commit's own command, and keeps beside them what that commit itself came
to: the losses and weights of its resumed run, its answers and its measurements.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny_runs as tiny
from old_runs import make
from old_runs.make import KINDS

TOLERANCE = 1e-5
"""Of losses, scores and weights. Repeated on the machine that made the archives, all are equal to the last bit. With
two threads, and with neither AVX nor FMA, losses differed by at most 5e-7 and weights by 3e-7. Resumed without AdamW's
first moments, losses differ by 0.02 and more; without the state of the random generator by 0.1."""
ROUNDING_ALONE = ("key.bias", "k_lin.bias")
"""Attention does not depend on a bias that all keys share: its gradient is rounding, of which AdamW makes whole steps.
Differed by up to 1e-3."""


@dataclass
class OldRun:
    """What an archive holds, in a folder where none of it was made."""

    name: str
    project: Path
    kept: Path
    expected: dict[str, Any]

    def put(self, which: str) -> Path:
        """The run folder as it was `stopped` or `finished`, in the place that run.yaml names. An adapter is told where
        its base lies now, as PEFT's file wants it and as the message about a base that is not there says."""
        out = shutil.copytree(self.kept / which, self.project / "out")
        for path in out.glob("adapter_config.json"):
            path.write_text(path.read_text().replace(self.expected["folder"], str(self.project)))
        return out

    def automodel(self, *arguments: object) -> str:
        cache = str(self.kept / "cache")
        return tiny.automodel(*arguments, cwd=self.project, AUTOMODEL_CACHE=cache, CUDA_VISIBLE_DEVICES="").stdout


@pytest.fixture(params=KINDS)
def old(request, tmp_path) -> OldRun:
    return unpacked(request.param, tmp_path)


def unpacked(name: str, folder: Path) -> OldRun:
    with tarfile.open(Path(make.__file__).with_name(f"{name}.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return OldRun(name, folder / "project", folder, json.loads((folder / "expected.json").read_text()))


def test_every_archive_has_its_kind():
    assert {path.name for path in Path(make.__file__).parent.glob("*.tar.xz")} == {f"{name}.tar.xz" for name in KINDS}


def test_a_stopped_run_is_resumed_to_the_same_losses_and_weights(old):
    out = old.put("stopped")
    begun = {split: tiny.losses(out, split) for split in ("train", "validation")}
    old.automodel("finetune", "llm", "-c", "run.yaml", "--resume")
    for split in ("train", "validation"):
        expected = {int(step): loss for step, loss in old.expected["losses"][split].items()}
        assert len(begun[split]) < len(expected)
        assert tiny.losses(out, split) == pytest.approx(expected, abs=TOLERANCE)
    assert_same_weights(out, old.kept / "finished")


def test_a_finished_run_is_known_as_finished(old):
    out = old.put("finished")
    before = (out / "run" / "metrics.jsonl").read_bytes()
    old.automodel("finetune", "llm", "-c", "run.yaml", "--resume-or-start")
    assert (out / "run" / "metrics.jsonl").read_bytes() == before


def test_its_plan_says_how_many_ranks_go_on(tmp_path, monkeypatch, capsys):
    """Two GPUs would be two ranks, unless plan.json is read: the run began with one."""
    from automodel.cli.main import main
    from automodel.distributed import visible

    old = unpacked("text-classification", tmp_path)
    out = old.put("stopped")
    monkeypatch.chdir(old.project)
    monkeypatch.setattr(visible, "visible_gpus", lambda: 2)
    monkeypatch.setattr("sys.argv", ["automodel", "finetune", "llm", "-c", "run.yaml", "--resume", "--dry-run"])
    for kept in (True, False):
        if not kept:
            (out / "run" / "plan.json").unlink()
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("ranks 2, ddp (all 2 visible GPUs" in said) != kept


def test_it_answers_and_measures_as_it_did(old):
    old.put("finished")
    kind = KINDS[old.name]
    answers = old.automodel(kind.ask[0], "out", "-i", "asked.jsonl", "--json", *kind.ask[1:])
    assert_same([json.loads(line) for line in answers.splitlines()], old.expected["answers"])
    measured = json.loads(old.automodel("evaluate", "out", "--json", *kind.measure))
    expected = old.expected["evaluation"]
    assert measured.pop("seconds") > 0 < expected.pop("seconds")
    assert_same(measured, expected)


def test_its_checkpoints_are_whole_and_become_a_model(old):
    old.put("finished")
    old.automodel("checkpoint", "verify", "out")
    old.automodel("checkpoint", "convert", "out", "--out", old.kept / "converted")
    assert make.digests(old.kept / "converted") == old.expected["converted"]


def test_base_and_adapter_are_merged_as_they_were(tmp_path):
    old = unpacked("lora", tmp_path)
    old.put("finished")
    old.automodel("export", "out", "--merge", "--out", old.kept / "again")
    assert_same_weights(old.kept / "again", old.kept / "merged")


def assert_same_weights(found: Path, expected: Path) -> None:
    from safetensors.torch import load_file
    from torch.testing import assert_close

    names = sorted(path.name for path in expected.glob("*.safetensors"))
    assert names
    assert sorted(path.name for path in found.glob("*.safetensors")) == names
    for name in names:
        ours, theirs = load_file(found / name), load_file(expected / name)
        assert ours.keys() == theirs.keys()
        decided = [key for key in theirs if not key.endswith(ROUNDING_ALONE)]
        assert_close({key: ours[key] for key in decided}, {key: theirs[key] for key in decided}, atol=TOLERANCE, rtol=0)


def assert_same(found: Any, expected: Any) -> None:
    """The same values in the same places; numbers within the tolerance."""
    if isinstance(expected, dict):
        assert found.keys() >= expected.keys(), "more may be said of it, not less"
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected):
            assert_same(ours, theirs)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE)
    else:
        assert found == expected
