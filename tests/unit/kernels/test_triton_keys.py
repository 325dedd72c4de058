"""A kernel has one key in Triton's cache, whatever was launched before it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SOURCE = Path(__file__).parents[3] / "src"
SCRIPT = """
import importlib, json, sys
from pathlib import Path
names = sorted(path.stem for path in Path(sys.argv[1], "automodel/kernels").glob("*_triton.py"))
keys = {}
for name in names[:: int(sys.argv[2])]:
    module = importlib.import_module(f"automodel.kernels.{name}")
    kernels = [n for n, value in vars(module).items() if n.endswith("_kernel") and hasattr(value, "cache_key")]
    for kernel in kernels[:: int(sys.argv[2])]:
        keys[kernel] = getattr(module, kernel).cache_key
print(json.dumps(keys))
"""


def keys_in_order(step: int) -> dict[str, str]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", SCRIPT, str(SOURCE), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_keys_do_not_depend_on_the_order():
    forwards, backwards = keys_in_order(1), keys_in_order(-1)
    assert len(forwards) > 25
    assert forwards == backwards
