"""`automodel doctor`: what it finds on machines that lack something, and its exit code."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from automodel.cli import doctor
from automodel.kernels import obstacles

GPU = SimpleNamespace(name="Tesla T4", total_memory=16 * 2**30, major=7, minor=5)


@pytest.fixture
def told(monkeypatch, capsys):
    """Runs the command; returns exit code and what it printed."""

    def run() -> tuple[int, str]:
        from automodel.cli.main import main

        monkeypatch.setattr(sys, "argv", ["automodel", "doctor"])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        assert said.err == ""
        return stopped.value.code, said.out

    return run


@pytest.fixture
def bare(monkeypatch):
    """A machine without a GPU, without a driver and with all packages."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: ("", 0))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return monkeypatch


def with_gpu(monkeypatch, gpu=GPU):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (gpu.major, gpu.minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: gpu.name)
    monkeypatch.setattr(doctor, "_driver", lambda: ("570.1", 1))


def test_a_machine_without_a_gpu(told, bare):
    code, text = told()
    assert code == 0
    for name in ("Python", "torch", "transformers", "GPU", "driver", "kernels", "memory", "this folder", "cache"):
        assert f"\n  {name} " in text
    assert f" {torch.__version__.split('+')[0]}" in text
    assert "  fused layers for processors\n" in text
    assert text.endswith(
        "Training works. Missing:\n"
        "  - a GPU: there is none in this machine. Models train on the processors, to the same loss, more slowly\n"
    )


def test_a_whole_machine(told, bare):
    with_gpu(bare, SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0))
    bare.setattr(obstacles, "triton_obstacle", lambda: "")
    code, text = told()
    assert code == 0
    assert "H100, 80 GiB, compute capability 9.0\n" in text
    assert "NVIDIA 570.1\n" in text
    assert "fused steps in Triton\n" in text
    assert text.endswith("Training works. Nothing is missing.\n")


@pytest.mark.parametrize(
    ("capability", "triton", "why"),
    [
        (
            (7, 5),
            "",
            "Tesla T4 has compute capability 7.5, and fused blocks use flash attention: 8.0 (Ampere) and newer",
        ),
        ((8, 0), "Triton is not installed (pip install triton)", "Triton is not installed (pip install triton)"),
    ],
)
def test_where_the_name_of_fused_steps_is_false_it_says_why(told, bare, capability, triton, why):
    with_gpu(bare, SimpleNamespace(name="Tesla T4", total_memory=16 * 2**30, major=capability[0], minor=capability[1]))
    bare.setattr(obstacles, "triton_obstacle", lambda: triton)
    from automodel.models import auto

    assert auto.HAS_LIGER_KERNEL is False
    code, text = told()
    assert code == 0
    assert text.endswith(
        "Training works. Missing:\n"
        f"  - fused kernels: {why}. Models train with stock blocks, to the same loss, more slowly\n"
    )


@pytest.mark.parametrize(
    ("built", "visible", "why"),
    [
        (None, None, "is built without CUDA; install a build of torch with CUDA"),
        ("13.0", None, "torch needs CUDA 13.0, which the driver does not offer; install a newer driver"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES='' hides all 2; unset it"),
    ],
)
def test_gpus_that_torch_cannot_use(told, bare, built, visible, why):
    bare.setattr(doctor, "_driver", lambda: ("470.5", 2))
    bare.setattr(torch.version, "cuda", built)
    if visible is None:
        bare.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        bare.setenv("CUDA_VISIBLE_DEVICES", visible)
    code, text = told()
    assert code == 0
    assert "none that torch can use (2 in the machine)\n" in text
    assert f"{why}. Models train on the processors" in text


def test_packages(told, bare):
    stock = importlib.metadata.version

    def version(name):
        if name == "accelerate":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"safetensors": "0.1"}.get(name) or stock(name)

    bare.setattr(doctor.metadata, "version", version)
    bare.setattr(doctor, "_required", lambda: iter([("torch", Any()), ("safetensors", Least())]))
    code, text = told()
    assert code == 1
    assert text.endswith(
        "Training does not work:\n  - safetensors is 0.1, and >=0.5 is needed: pip install 'safetensors>=0.5'\n"
    )
    bare.setattr(doctor, "_required", lambda: iter(()))
    code, text = told()
    assert code == 0
    assert "accelerate: the drop-in Trainer and `automodel run` do not work: pip install accelerate\n" in text


class Any:
    """Takes every version."""

    def contains(self, version, prereleases):
        return True


class Least(Any):
    def contains(self, version, prereleases):
        return False

    def __str__(self):
        return ">=0.5"


def test_requirements_are_those_of_the_installed_package():
    required = dict(doctor._required())
    assert {"torch", "transformers", "datasets", "safetensors"} <= {*required}
    assert "wandb" not in required, "an extra"
    assert not required["transformers"].contains("4.57")


def test_folders_that_are_full_or_closed(told, bare, tmp_path):
    bare.setenv("AUTOMODEL_CACHE", str(tmp_path / "not" / "yet" / "there"))
    bare.setattr(doctor.shutil, "disk_usage", lambda place: namedtuple("Usage", "free")(2**30))
    bare.setattr(doctor.os, "access", lambda place, mode: place != tmp_path)
    code, text = told()
    assert code == 0
    assert f"  cache         {tmp_path}/not/yet/there: 1 GiB free (tokenised data; AUTOMODEL_CACHE moves it)\n" in text
    assert f"  - permission to write to {tmp_path}/not/yet/there: tokenised data; AUTOMODEL_CACHE moves it\n" in text
    assert "  - room on the disk: " in text
    assert not (tmp_path / "not").exists()
