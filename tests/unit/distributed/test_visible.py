"""Visible GPUs are counted without torch where there is at most one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from automodel.distributed import visible
from automodel.distributed.started_by import as_the_only_rank


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these device files, and a torch that has been built for GPUs."""
    monkeypatch.setattr(visible, "_built_for_gpus", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def with_files(*names):
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return with_files


def test_device_files_are_counted(machine, monkeypatch):
    eight = machine("nvidiactl", "nvidia-uvm", "nvidia-modeset", *(f"nvidia{n}" for n in range(8)))
    assert visible._at_most(eight) == 8
    for listed, count in (("", 0), ("-1", 0), ("3", 1), ("GPU-0815,GPU-0816", 2), ("0,1,2", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert visible._at_most(eight) == count


def test_machines_without_gpus_and_other_drivers(machine, monkeypatch):
    assert visible._at_most(machine("nvidiactl")) == 0
    assert visible._at_most(machine("dxg")) > 1, "not known: torch is asked"
    monkeypatch.setattr(visible, "_built_for_gpus", lambda: False)
    assert visible._at_most(machine("nvidia0", "nvidia1")) == 0


def test_torch_is_not_imported_for_the_answer_none():
    code = (
        "import sys; from automodel.distributed import visible\n"
        "visible._built_for_gpus = lambda: False\n"
        "assert visible.visible_gpus() == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_who_counts_as_having_started_one_process():
    assert not as_the_only_rank({})
    assert as_the_only_rank({"WORLD_SIZE": "1"})
    assert as_the_only_rank({"OMPI_COMM_WORLD_SIZE": "1"})
    assert not as_the_only_rank({"PMI_SIZE": "1", "SLURM_PROCID": "0"}), "a shell that srun opened"
