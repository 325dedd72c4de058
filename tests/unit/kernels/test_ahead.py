"""Compiling ahead: when it is left out, what makes it unnecessary, and that nothing depends on it."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from automodel.kernels import ahead
from automodel.kernels.ahead_facts import Facts, shape_of

FACTS = Facts(shape_of({"model_type": "distilbert"}), lazy=True)


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    """A machine with a GPU and Triton, as far as files tell, and a cache of its own."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(ahead, "GPU_SIGNS", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(ahead, "_version_files", lambda: [tmp_path / "nvidiactl"])
    monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    for name in (ahead.SWITCH, "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    yield
    ahead.stop()
    ahead.take_remark()


def worker(monkeypatch, tmp_path, code: str) -> None:
    """Something else in place of the process that compiles."""
    (tmp_path / "stand_in_worker.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ahead, "WORKER", "stand_in_worker")


def test_reasons_not_to(monkeypatch):
    assert ahead.why_never() is None
    with monkeypatch.context() as patch:
        patch.setenv(ahead.SWITCH, "0")
        assert ahead.start(FACTS) == "AUTOMODEL_COMPILE_AHEAD is 0"
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "GPU_SIGNS", ("/nowhere",))
        assert ahead.start(FACTS) == "there is no NVIDIA GPU"
    for hidden in ("", "-1"):
        with monkeypatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", hidden)
            assert ahead.start(FACTS) == "there is no NVIDIA GPU"
    with monkeypatch.context() as patch:
        patch.setattr(ahead.importlib.util, "find_spec", lambda name: None)
        assert ahead.start(FACTS) == "Triton is not installed"
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert ahead.start(FACTS) == "Triton's interpreter compiles nothing"
    assert ahead._process is None


def test_what_was_compiled_is_not_compiled_again(monkeypatch, tmp_path):
    worker(monkeypatch, tmp_path, "")
    compiled = tmp_path / "kernel.json"
    compiled.touch()
    stamp = ahead.stamp_of(FACTS)
    stamp.parent.mkdir(parents=True)
    stamp.write_text(json.dumps([str(compiled)]))
    assert ahead.start(FACTS) == "everything was compiled before"
    compiled.unlink()  # someone emptied Triton's cache
    assert ahead.start(FACTS) is None


def test_a_broken_stamp_is_none(tmp_path):
    assert not ahead.is_compiled(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('["/a/kern')
    assert not ahead.is_compiled(tmp_path / "half.json")


def test_the_stamp_depends_on_all_that_matters(monkeypatch, tmp_path):
    stamps = [ahead.stamp_of(FACTS), ahead.stamp_of(Facts(FACTS.shape, batch=3, lazy=True))]
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
        stamps.append(ahead.stamp_of(FACTS))
    with monkeypatch.context() as patch:
        newer = tmp_path / "version.py"
        newer.write_text("99.0")
        patch.setattr(ahead, "_version_files", lambda: [newer])
        stamps.append(ahead.stamp_of(FACTS))
    with monkeypatch.context() as patch:
        gpu = tmp_path / "gpus" / "0000:01:00.0" / "information"
        gpu.parent.mkdir(parents=True)
        gpu.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 81\n")
        patch.setattr(ahead, "GPU_NAMES", str(tmp_path / "gpus"))
        stamps.append(ahead.stamp_of(FACTS))
        gpu.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 99\n")
        assert ahead.stamp_of(FACTS) == stamps[-1]
    assert len(set(stamps)) == len(stamps)
    assert ahead.stamp_of(FACTS) == stamps[0]
    assert {stamp.parent for stamp in stamps} == {tmp_path / "cache" / "kernels"}


def test_the_worker_gets_facts_and_stamp(monkeypatch, tmp_path):
    worker(monkeypatch, tmp_path, "import json, sys; open(sys.argv[2] + '.seen', 'w').write(sys.argv[1])")
    stamp = ahead.stamp_of(FACTS)
    stamp.parent.mkdir(parents=True)
    assert ahead.start(FACTS) is None
    ahead.wait()
    assert Facts.from_json(stamp.with_name(stamp.name + ".seen").read_text()) == FACTS
    assert ahead._process is None


def test_waiting_is_remarked_once(monkeypatch, tmp_path):
    worker(monkeypatch, tmp_path, "import time; time.sleep(0.5)")
    assert ahead.start(FACTS) is None
    ahead.wait()
    said = ahead.take_remark()
    assert said is not None
    assert said.startswith("Waited ")
    assert said.endswith(" s for kernels that are compiled once on this machine")
    assert ahead.take_remark() is None


def test_a_failing_worker_is_harmless(monkeypatch, tmp_path):
    worker(monkeypatch, tmp_path, "import time; time.sleep(0.3); raise RuntimeError('no compiler here')")
    assert ahead.start(FACTS) is None
    ahead.wait()
    assert "compiled as they are needed" in (ahead.take_remark() or "")
    assert not ahead.stamp_of(FACTS).exists()


def test_a_slow_worker_is_ended(monkeypatch, tmp_path):
    worker(monkeypatch, tmp_path, "import time; time.sleep(60)")
    assert ahead.start(FACTS) is None
    process = ahead._process
    began = time.perf_counter()
    ahead.wait(patience_s=0.2)
    assert time.perf_counter() - began < 30
    assert process.poll() is not None


def test_nothing_started_nothing_waited_for():
    ahead.wait()
    assert ahead.take_remark() is None


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is told on Linux only")
def test_the_worker_ends_with_its_parent(tmp_path):
    """Also where the parent had no time to end it."""
    code = (
        "import os, sys, time; from automodel.kernels.ahead_worker import end_with_parent; end_with_parent();"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = (
        f"import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {code!r}], "
        "stdout=subprocess.PIPE, text=True); print(child.stdout.readline().strip(), flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the worker outlived its parent")


def _runs(pid: int) -> bool:
    """Zombies have ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_start_imports_nothing_heavy():
    code = (
        "import sys, automodel.plan.check, automodel.plan.kernels_ahead;"
        "print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_worker_needs_only_torch():
    code = (
        "import sys, automodel.kernels.ahead_worker, automodel.kernels.ahead_recipes;"
        "print([m for m in ('transformers', 'datasets', 'sklearn', 'pydantic', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_kernels_are_imported_beside_a_script_once_and_before_it_forks(monkeypatch):
    imported, hooks = [], []
    monkeypatch.setattr(ahead, "import_triton", lambda: threading.Thread(target=imported.append, args=["triton"]))
    monkeypatch.setattr(ahead.importlib, "import_module", imported.append)
    monkeypatch.setattr(ahead.os, "register_at_fork", lambda before: hooks.append(before))
    first = ahead.import_triton()
    first.start()
    monkeypatch.setattr(ahead, "import_triton", lambda: first)
    ahead.import_kernels.cache_clear()
    try:
        thread = ahead.import_kernels()
        assert ahead.import_kernels() is thread
        hooks[0]()
        assert not thread.is_alive()
    finally:
        ahead.import_kernels.cache_clear()
    assert imported[0] == "triton"
    assert "automodel.kernels.attention_triton" in imported
    assert len(hooks) == 1
