"""The decisions about speed: capture, fused kernels, pooled block, attention; buckets and compile have own files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.config.gate import canonical
from automodel.distributed.layout import ONE, Layout
from automodel.optim.kinds import ADAMW_8BIT, CAPTURED, Kind
from automodel.plan.compile_pays import asked_compile
from automodel.plan.config import RunConfig
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.plan import Decision
from automodel.tasks.task import Task

if TYPE_CHECKING:
    from automodel.plan.hardware import Hardware  # which imports torch

MOST_WORDS = 0.9  # of a word table; where more rows are read, there is little to save on the others
WORTH_SAYING = 0.005  # share of the arithmetic

LATE_PARAMETERS, LATE_TOKENS, LATE_SHARE = 400_000_000, 4096, 0.08
"""Models up to so many parameters, batches up to so many tokens, or gradients up to this share of the memory: layers
are updated under the next step. DistilBERT wins 3 % by it (1.956 to 1.891 ms), 1.2 B parameters 5 % at 16k tokens."""


def decide_capture(
    cfg: RunConfig,
    path: str,
    hardware: Hardware,
    lines: list[Decision],
    *,
    kind: Kind | None,
    checkpointing: str,
    dropout: bool,
    layout: Layout = ONE,
) -> bool:
    """Whether the whole step becomes a CUDA graph; every obstacle is named. `kind`: the optimizer, if it has a name
    here. `dropout`: whether layers drop something at random."""
    if hardware.device != "cuda":
        return False
    if cfg.training_optimizations.capture is False:
        reason = "training_optimizations.capture is false"
    elif layout.fsdp:
        reason = "ranks gather each other's weights block by block, which is not recorded yet"
    elif path != "packed":
        reason = "padded batches have a new shape every time"
    elif not _plain_adamw(cfg, kind):
        reason = "only AdamW is recorded; this optimizer runs step by step"
    elif checkpointing != "none" and dropout:
        reason = "gradient checkpointing of layers with dropout saves random states on the host"
    else:
        moments = " with 8-bit moments of our own" if kind == ADAMW_8BIT else ""
        reason = f"forward, backward, clip and AdamW{moments} are one CUDA-graph replay"
        if layout.size > 1:
            wide = cfg.distributed.reduce_dtype or "fp32"
            reason = (
                f"forward and backward are one CUDA-graph replay, clip and AdamW{moments} another; between them "
                f"{layout.size} ranks sum flat gradients in {wide.removeprefix('torch.')}, the first while the last "
                "are made"
            )
        lines.append(Decision("step", "captured", reason))
        return True
    lines.append(Decision("step", "eager", reason))
    return False


def _plain_adamw(cfg: RunConfig, kind: Kind | None) -> bool:
    """AdamW with the keys of the section and no others."""
    optimizer = cfg.optimizer
    adamw = kind in CAPTURED if optimizer.target is None else canonical(optimizer.target) == "torch.optim.AdamW"
    return adamw and not optimizer.extra


def decide_fused(
    cfg: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    precision: str,
    capture: bool,
    lines: list[Decision],
    *,
    path: str = "packed",
    layout: Layout = ONE,
) -> bool:
    """Fused blocks need flat parameters and half precision; `use_liger_kernel: false` asks for none. Blocks of decoders
    can do without flat parameters, so that sharded models have them too."""
    sharded = layout.fsdp and hardware.device == "cuda" and path == "packed"
    if not capture and not sharded:
        return False
    if sharded and (reason := _why_no_fused_shards(model, layout)):
        lines.append(Decision("kernels", "stock", reason))
        return False
    if cfg.model.use_liger_kernel is False:
        lines.append(Decision("kernels", "stock", "model.use_liger_kernel is false"))
        return False
    if precision not in ("bf16", "bf16-pure", "fp16"):
        lines.append(Decision("kernels", "stock", f"fused kernels compute in half precision, not in {precision}"))
        return False
    if not hardware.bf16:
        lines.append(Decision("kernels", "stock", "fused blocks use flash attention: Ampere GPUs and newer"))
        return False
    if not model.can_fuse:
        kind = "adapter of this kind" if cfg.peft is not None else model.model_type
        lines.append(Decision("kernels", "stock", f"there are no fused blocks for this {kind} yet"))
        return False
    if asked_compile(cfg):
        lines.append(Decision("kernels", "stock", "compile was asked for: stock blocks are compiled instead of fused"))
        return False
    if sharded:
        what = model.fused_in_words.replace("joined query/key/value", "products layer by layer, weights being gathered")
        lines.append(Decision("kernels", "fused", what))
        return True
    beside = "; adapters: one read of x for a joined product, added in place" if cfg.peft is not None else ""
    lines.append(Decision("kernels", "fused", model.fused_in_words + beside))
    return True


def _why_no_fused_shards(model: ModelFacts, layout: Layout) -> str:
    """What keeps a sharded model from fused blocks; nothing: they are possible."""
    if layout.tp > 1 or layout.cp > 1:
        return "fused blocks compute whole matrices and whole documents, which tp_size and cp_size cut"
    if model.dropout is not None:
        return f"{model.dropout}: fused dropout is drawn from a counter that only captured steps advance"
    if model.can_fuse and not model.decoder:
        return "fused blocks of encoders need flat parameters; strategy: ddp has them"
    return ""


def decide_pooled(
    task: Task, path: str, model: ModelFacts, checkpointing: str, capture: bool, fused: bool, lines: list[Decision]
) -> bool:
    """A classifier reads one token of each document, so its last block need not compute the others. Exact."""
    plain = not capture and checkpointing == "none"
    possible = model.can_pool_fused if fused else plain and model.can_pool
    if task.head.wants != "pooled" or path != "packed" or not possible:
        return False
    saved = f"{model.pooled_saving:.0%} of the layers' arithmetic"
    lines.append(Decision("last layer", "only the token that is classified", f"exact; saves {saved}"))
    return True


def tell_what_is_read(
    task: Task, path: str, model: ModelFacts, read: float, fused: bool, lines: list[Decision]
) -> None:
    """A language model reads the tokens before those it learns; its head, and a fused last block, compute no others,
    but for a few that fill them up. `read`: their share."""
    if not task.head.next_token or path != "packed" or 1 - read < WORTH_SAYING:
        return
    saved = f"{1 - read:.0%} of the head's arithmetic"
    if not fused:
        lines.append(Decision("head", "learned tokens only", f"exact; saves {saved}"))
        return
    blocks = f"{(1 - read) * model.read_saving:.1%} of the layers' arithmetic"
    lines.append(Decision("last layer", "learned tokens only", f"exact, like the head; saves {blocks} and {saved}"))


BF16_COPIES = Decision(
    "matrices",
    "bf16 copies",
    "rounded once after every update; residuals, norms, softmax, small heads and the loss are fp32",
)


def has_own_products(cfg: RunConfig, hardware: Hardware, model: ModelFacts, layout: Layout) -> bool:
    """Whether the products of the blocks can be our own on the CPU (`models/cpu_linears.py`). Experts are no linear
    layers, and adapters have layers of their own."""
    cut = layout.fsdp or layout.tp > 1 or layout.cp > 1
    stock = cfg.model.use_liger_kernel is False or asked_compile(cfg)
    return hardware.device == "cpu" and not (cut or stock or model.trained or model.experts)


def decide_whole_layers(
    cfg: RunConfig,
    hardware: Hardware,
    model: ModelFacts,
    precision: str,
    path: str,
    lines: list[Decision],
    *,
    own_layers: bool,
) -> bool:
    """Layers that are one operation on the CPU. The same arithmetic in the same precision, with less around it."""
    computes = precision == "fp32" or (precision == "bf16" and own_layers)
    possible = hardware.device == "cpu" and computes and path == "packed" and not model.trained
    if not possible or not model.whole_layers:
        return False
    if cfg.model.use_liger_kernel is False:
        lines.append(Decision("layers", "stock", "model.use_liger_kernel is false"))
        return False
    reason = "one operation each: joined query/key/value, residuals added inside products, documents without padding"
    lines.append(Decision("layers", "fused", reason))
    return True


def decide_offload(
    cfg: RunConfig, checkpointing: str, needed: bool, lines: list[Decision], *, capture: bool, compiled: bool
) -> bool:
    """Whether inputs of checkpointed layers wait in host memory. `needed`: nothing else fits."""
    key, asked = "training_optimizations.activation_offload", cfg.training_optimizations.activation_offload
    if not asked and not needed:
        return False
    if checkpointing == "none":
        lines.append(Decision("offload", "not needed", "no layer is computed again: everything fits"))
        return False
    if needed and not asked and (not capture or compiled):
        return False
    if not capture or compiled:
        how = "compiled blocks recompute in their own way" if compiled else "the step is not captured (see `step`)"
        raise UserError(f"{key}: the copies are part of captured steps, but {how}. Remove the key.")
    why = "asked for" if asked else "nothing else fits"
    reason = f"what goes into recomputed layers leaves beside them, and comes back one layer ahead; {why}"
    lines.append(Decision("offload", "layer inputs in host memory", reason))
    return True


def decide_late_update(
    fused: bool, accumulation: int, parameters: int, tokens: float, gradients: float, lines: list[Decision]
) -> bool:
    """Updates move bytes, forward passes compute: side by side they cost less than one after the other. Exact. But
    gradients that wait for the next step cost memory (`gradients`: as a share of all that is needed), so it is done
    where much is won, or where the price is small."""
    pays = parameters <= LATE_PARAMETERS or tokens <= LATE_TOKENS or gradients <= LATE_SHARE
    if not fused or accumulation > 1 or not pays:
        return False
    reason = "each layer's AdamW runs beside the next step's layers before it, and is done when the layer is read"
    lines.append(Decision("update", "under the next step", reason))
    return True


def decide_lazy_embeddings(task: Task, fused: bool, accumulation: int, lines: list[Decision], ranks: int = 1) -> bool:
    """A batch reads a few rows of the word table; AdamW for the others can wait until they are read. Exact. Several
    ranks read different rows and sum whole tables."""
    if not fused or accumulation > 1 or ranks > 1 or not task.head.has_classes:
        return False
    reason = "AdamW for the rows a batch reads; the others catch up, exactly, before they are read"
    lines.append(Decision("embeddings", "row by row", reason))
    return True


def decide_word_rows(
    cfg: RunConfig,
    task: Task,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    lines: list[Decision],
    *,
    kind: Kind | None,
    plain: bool,
) -> int:
    """Rows that no example reads have no gradient, and AdamW gives them nothing but weight decay, which can wait until
    they are read. Exact. `plain`: neither compiled nor checkpointed. Returns the rows that are trained; 0: all."""
    if cfg.peft is not None:  # the table is frozen
        return 0
    # The decoder of an encoder-decoder reads the words that it has to write, which are not counted.
    possible = hardware.device == "cpu" and plain and not task.head.encoder_decoder
    adamw = _plain_adamw(cfg, kind) and (kind is None or kind.bits == 32)
    if not possible or not adamw or not 0 < data.word_rows <= MOST_WORDS * model.word_rows:
        return 0
    stay = "stay as they are"
    owed = "have no gradient and take their weight decay when they are read" if cfg.optimizer.decay else stay
    reason = f"exact: the others never occur in the training data, so they {owed}"
    lines.append(Decision("word embeddings", f"{data.word_rows:,} of {model.word_rows:,} are trained", reason))
    return data.word_rows


def decide_attention(cfg: RunConfig, path: str, hardware: Hardware, fused: bool, lines: list[Decision]) -> None:
    """Says what became of the reference's attention and kernel keywords; none of them changes a result."""
    asked = cfg.model.attn_implementation
    if path == "packed":
        used = "variable-length flash attention" if hardware.device == "cuda" else "document by document"
        used = "packed attention kernels" if fused else used
    else:
        used = asked if asked in ("sdpa", "eager") else "sdpa"
    if cfg.model.use_sdpa_patching is False and asked is None:
        asked = "eager"  # the reference's way of asking for plain attention
        used = used if path == "packed" else asked
    reason = f"{asked} was asked for; this is exact too" if asked and asked != used else "exact, no mask"
    lines.append(Decision("attention", used, reason if path == "packed" or asked else "the model's own"))
    if cfg.model.use_liger_kernel:
        lines.append(Decision("liger", "not used", "our own kernels on a GPU (see kernels), torch's on the CPU"))
