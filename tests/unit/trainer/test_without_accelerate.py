"""accelerate is a dependency of Trainer, not ours: where it is missing, transformers says so, and we nothing before."""

import subprocess
import sys

HIDDEN = """
import importlib.util, sys
find, hidden = importlib.util.find_spec, ("accelerate", "peft", "trl")  # the others cannot be installed without it
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in hidden else find(name, *more)
sys.modules.update(dict.fromkeys(hidden))
from automodel import Trainer, TrainingArguments
print("imported", Trainer.__name__)
TrainingArguments("nowhere", use_cpu=True, report_to="none")
"""


def test_transformers_own_words_and_not_an_import_of_ours():
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=120)
    assert "imported Trainer" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "requires `accelerate" in done.stderr.splitlines()[-1]
