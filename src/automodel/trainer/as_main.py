"""A script as `python script.py` runs it: `__file__` is absolute, and `sys.argv[0]` stays what was typed.

`runpy.run_path` gives both the same path: scripts that change the folder no longer found what lies beside them.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from pathlib import Path


def run_as_main(script: Path) -> None:
    """Runs the script as the module `__main__`, which is put back afterwards."""
    file = os.path.abspath(script)
    code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    module, before = types.ModuleType("__main__"), sys.modules["__main__"]
    vars(module).update(__file__=file, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = before
