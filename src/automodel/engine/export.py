"""`export --merge`: an adapter and its base as one plain Hugging Face folder, checked before anyone relies on it.

The adapter is added to the base in fp32, rounded once to the dtype that is asked for, and saved. Then the folder is
loaded again as any other tool would load it, and must answer a few real rows (the run's own training data, or texts
that are given) with the logits that base and adapter gave: to fp32 tolerance in fp32, to that of the dtype otherwise.
A folder that does not is removed, and the folder that was asked for appears only when all of it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel.adapters.attach import merge
from automodel.adapters.peft_folder import is_adapter_folder
from automodel.checkpoint.new_folder import check_new, new_folder
from automodel.config.errors import EXIT_FAILED, UserError
from automodel.engine.folder import LAYOUT, RunFolder
from automodel.engine.read_data import read_data
from automodel.engine.saved import SavedModel, open_saved
from automodel.models.adapted import base_source
from automodel.models.load import load_model, read_hf_config
from automodel.models.save import save_hf_folder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, LONGEST = 4, 256  # what is compared
# Largest difference, as a share of the largest logit. 16-bit weights are rounded once, by 2⁻⁹ (bf16) or 2⁻¹² each.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class WrongExportError(UserError):
    """The written folder does not compute what the adapter computed."""

    exit_code = EXIT_FAILED


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked."""

    folder: Path
    layers: int
    dtype: str
    rows: int
    difference: float
    """Largest difference of a logit, as a share of the largest logit."""


def export_merged(
    folder: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    texts: Sequence[str] = (),
    trust: Sequence[str] = (),
) -> Exported:
    """Merges and checks. `dtype`: `fp32`, `bf16` or `fp16`; none: the base's own."""
    saved, target = open_saved(folder, trust=trust), Path(out).expanduser()
    if not is_adapter_folder(saved.folder):
        raise UserError(f"'{folder}' holds no adapter: it is a plain Hugging Face folder already, nothing to merge.")
    check_new(target)
    wanted = DTYPES[dtype] if dtype else _own_dtype(saved)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = _rows(saved, texts, trust)
    model = saved.load(device)
    before = [_logits(model, row) for row in rows]
    layers = merge(model)
    _compare(before, [_logits(model, row) for row in rows], torch.float32)
    with new_folder(target) as writing:
        save_hf_folder(model.to(wanted), saved.tokenizer, writing)
        del model
        source = replace(saved.source, pretrained_model_name_or_path=str(writing))
        written = load_model(source, read_hf_config(source), saved.task.head, dtype=torch.float32, device=device).eval()
        difference = _compare(before, [_logits(written, row) for row in rows], wanted)
        RunFolder(saved.folder).hand_on(writing, LAYOUT)  # `generate` asks as the training data did
    name = next(name for name, value in DTYPES.items() if value == wanted)
    return Exported(target, layers, name, len(rows), difference)


def _own_dtype(saved: SavedModel) -> torch.dtype:
    """The base's; anything else than our three is widened to fp32."""
    name = str(getattr(read_hf_config(base_source(saved.source)), "dtype", None)).removeprefix("torch.")
    dtype = getattr(torch, name, torch.float32)
    return dtype if dtype in DTYPES.values() else torch.float32


def _rows(saved: SavedModel, texts: Sequence[str], trust: Sequence[str]) -> list[Tensor]:
    """Token ids of what is compared."""
    if texts:
        return [torch.tensor([saved.tokenizer(text)["input_ids"][:LONGEST]]) for text in texts]
    if saved.run is None:
        raise UserError(
            f"'{saved.folder}' has no run/config.yaml that would name its data. Give texts to check: --text"
        )
    try:
        store = read_data(saved.run, trust).train.store
    except UserError as error:
        raise UserError(
            f"the run's data cannot be read to check the merge: {error}\nGive texts instead: --text"
        ) from error
    cuts = [(int(store.offsets[i]), int(store.offsets[i + 1])) for i in range(min(ROWS, len(store)))]
    return [torch.from_numpy(store.input_ids[a : min(b, a + LONGEST)].astype("int64"))[None] for a, b in cuts]


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    ids = ids.to(model.device)
    more = {"decoder_input_ids": ids[:, :8]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits.float().cpu()


def _compare(before: Sequence[Tensor], after: Sequence[Tensor], dtype: torch.dtype) -> float:
    difference = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(after, before))
    if not difference <= TOLERANCE[dtype]:  # not a number is not equal either
        raise WrongExportError(
            f"the merged model does not compute what base and adapter do: logits differ by {difference:.2%} of the "
            f"largest, and {TOLERANCE[dtype]:.1%} is what rounding explains. Nothing was written; --dtype fp32 may do."
        )
    return difference
