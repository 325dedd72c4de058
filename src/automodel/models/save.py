"""The model out: a plain Hugging Face folder that stock `from_pretrained` (and vLLM, and SGLang) loads unchanged.

Files are written to a staging folder inside the target, which is renamed once it is complete: that rename is the
moment the new model exists. Its files then move into place one by one, the config last. A kill before the rename leaves
the old model; a kill after it leaves a complete staging folder that `finish_interrupted_save` moves into place. Files
of other origin are never touched; only weight files that the new ones replace are removed.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.adapters.attach import adapter_of
from automodel.adapters.peft_folder import write_folder
from automodel.checkpoint.disk import flush_to_disk
from automodel.config.errors import UserError
from automodel.config.own_files import OutsideError, file_inside
from automodel.models.forward import stock_attention
from automodel.models.quiet import quiet_transformers
from automodel.models.save_streamed import held_by, write_streamed
from automodel.models.streamed import converts

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Whole = tuple[Mapping[str, int], Iterable[tuple[str, Tensor]]]

_WRITING = ".model-being-written"
_COMPLETE = ".model-to-move-in"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
"""How the files of a saved model are called that its index names."""
_MANIFEST = ".files.json"  # names of the whole save; some have moved in already when a killed save is finished


def save_hf_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    weights: Whole | None = None,
) -> Path:
    """Writes weights (safetensors), config with label names, generation config and tokenizer; returns the folder once
    all of it is on the disk. `weights`: sizes in bytes, and the tensors one by one, where the model itself holds only a
    part of each."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    finish_interrupted_save(target)
    try:
        writing = _written(model, tokenizer, target / _WRITING, weights)
    except BaseException:  # a full disk, mostly, which has its room back then; what was there before stays
        shutil.rmtree(target / _WRITING, ignore_errors=True)
        with suppress(OSError):
            target.rmdir()  # where it was made for this
        raise
    writing.rename(target / _COMPLETE)
    flush_to_disk(target)
    _move_in(target)
    return target


def _written(model: Any, tokenizer: Any, writing: Path, weights: Whole | None) -> Path:
    """The staging folder, complete and on the disk."""
    writing.mkdir()
    with stock_attention(model), quiet_transformers(), _any_generation_config(model):
        _write_model(model, writing, weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(writing)
    names = [str(path.relative_to(writing)) for path in _files(writing)]
    (writing / _MANIFEST).write_text(json.dumps(names))
    files, mode = _files(writing), _ordinary_mode(writing)
    for path in files:
        path.chmod(mode)  # safetensors makes its files readable to their owner alone
    with ThreadPoolExecutor(8) as threads:  # the disk takes as long for all of them as for the largest
        list(threads.map(flush_to_disk, files))
    return writing


def _write_model(model: PreTrainedModel, folder: Path, weights: Whole | None) -> None:
    """The model; of an adapter its two files and, of a classifier, the config with its class names."""
    adapter = adapter_of(model)
    if adapter is None and not _changes_form(model):
        weights = weights or held_by("cuda", model)
        if weights is not None:
            write_streamed(model, *weights, folder)
            return
    whole = None if weights is None else dict(weights[1])
    if adapter is None:
        given: dict[str, Any] = {} if whole is None else {"state_dict": whole}
        model.save_pretrained(folder, **given)
        return
    write_folder(model, adapter, folder, whole)
    if adapter.task_type == "CAUSAL_LM":
        return  # with a config beside it, transformers takes the folder for a whole model, and looks for its weights
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


@contextmanager
def _any_generation_config(model: Any) -> Generator[None]:
    """Has generation settings written as they came. transformers refuses to write some that it reads (a `temperature`
    without `do_sample`, as many published models have it), and a trained model would not be saved for them."""
    from transformers import GenerationConfig

    class AsItCame(GenerationConfig):
        def validate(self, *args: Any, **kwargs: Any) -> None:
            pass

    config = getattr(model, "generation_config", None)
    if type(config) is not GenerationConfig:
        yield
        return
    model.generation_config = copy.copy(config)
    model.generation_config.__class__ = AsItCame
    try:
        yield
    finally:
        model.generation_config = config


def _changes_form(model: PreTrainedModel) -> bool:
    """Whether transformers saves weights of this model, or of one inside it, in another form than they have here."""
    from transformers import PreTrainedModel

    kinds: set[str] = set()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            kinds |= {part.config.model_type, type(part).__name__}
    return any(map(converts, kinds))


def finish_interrupted_save(folder: str | Path) -> None:
    """Completes a save that was killed after its staging folder was complete, and drops one that was killed before."""
    target = Path(folder)
    shutil.rmtree(target / _WRITING, ignore_errors=True)
    if (target / _COMPLETE).is_dir() and not (target / _COMPLETE).is_symlink():
        _move_in(target)


def _move_in(target: Path) -> None:
    staged = target / _COMPLETE
    names = _names_of(staged, target)
    for stale in _replaced_weights(target, set(names)):
        stale.unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: (name == "config.json", name)):
        if (staged / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / name, target / name)
    flush_to_disk(target)
    shutil.rmtree(staged)


def _names_of(staged: Path, target: Path) -> list[str]:
    """What the staging folder says it holds: names that lie in it, and that will lie in the target."""
    path = staged / _MANIFEST
    try:
        names = json.loads(path.read_text())
        if not isinstance(names, list):
            raise ValueError("it is no list of names")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}): it should list the files of a model that waits there. Move the files of "
            f"{staged} into {target} yourself, or remove {staged} to keep the model that was there before."
        ) from error
    for name in names:
        file_inside(staged, name, path)
        file_inside(target, name, path, replaced=True)
    return names


def _replaced_weights(target: Path, new: set[str]) -> list[Path]:
    """Weight files of the previous model that would be loaded beside, or instead of, the new ones."""
    old = {_SINGLE, _INDEX, "adapter_config.json", "adapter_model.safetensors"}
    index = target / _INDEX
    if index.is_file():
        # An index that is none of ours: what it names is left alone.
        with suppress(OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            old |= {name for name in json.loads(index.read_text())["weight_map"].values() if _WEIGHTS.fullmatch(name)}
    stale = []
    for name in sorted(old - new):
        with suppress(OutsideError):
            path = file_inside(target, name, index, replaced=True)
            if path.is_file():
                stale.append(path)
    return stale


def _ordinary_mode(folder: Path) -> int:
    """The mode an ordinary new file gets here. Tried out: asking for the mask would change it under other threads."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
