"""What a person sees while a model trains.

On a terminal: a bar with time left, loss, learning rate, speed and memory, and the log lines above it. Elsewhere (a
file, CI, a Slurm log): the same lines, plain, one for each log step:

    [INFO] Launching job locally on 1 device
    [Step 50/1000] Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec
    [Step 50/1000] Validation | Loss: 1.102 | Accuracy: 0.874

Lines of a file are never wrapped (a wrapped line cannot be grepped); on a terminal that is too narrow they go on below,
between two values. Characters that the terminal's encoding lacks are replaced rather than raised.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

_NOT_SHOWN = ("epoch", "time", "samples_per_s", "tokens_per_s", "grad_norm")  # in metrics.jsonl, too many for a line
_TITLES = {
    "lr": "LR",
    "f1": "F1",
    "f1_micro": "F1 (micro)",
    "f1_macro": "F1 (macro)",
    "token_f1": "Token F1",
    "entity_f1": "Entity F1",
    "mcc": "MCC",
    "auroc": "AUROC",
    "mse": "MSE",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R2",
}


BESIDE_STATUS = 34
"""Characters of the bar's line besides status and counts: ten of the bar, both times, `ETA`, a slash, blanks."""


class Progress:
    """The run's voice on the terminal. `step` and `validation` take values as they are logged to `metrics.jsonl`."""

    def __init__(
        self, total_steps: int, start_step: int = 0, console: Console | None = None, device: str = "cpu"
    ) -> None:
        from rich.console import Console

        self.total_steps, self._done = total_steps, start_step
        self.console = console or Console()
        self._memory_title = "GPU Mem" if str(device).startswith("cuda") else "Host Mem"
        self._bar: Bar | None = None
        self._task = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._bar = _make_bar(self.console)
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, status="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()  # not before: whoever fails in between must find the terminal as it was
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def info(self, text: str) -> None:
        """Something worth knowing."""
        self._print("[INFO]", text, "blue")

    def warn(self, text: str) -> None:
        """Something that may be wrong."""
        self._print("[WARN]", text, "yellow")

    def step(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """A step is done. With values its log line is written, perhaps some steps later; without, the bar moves."""
        self._done = max(self._done, step)
        line = step_line(values, self._memory_title) if values else None
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=self._done)
            if values:
                room = self.console.width - BESIDE_STATUS - 2 * len(str(self.total_steps))
                self._bar.update(self._task, status=self._printable(_status(values, self._memory_title, room)))
        if line is not None:
            self._print(self._step_tag(step), line)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluation is done."""
        self._print(self._step_tag(step), "Validation | " + validation_line(values), "green")

    def close(self) -> None:
        """Leave the terminal as it was; the last state of the bar stays visible."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _step_tag(self, step: int) -> str:
        return f"[Step {step}/{self.total_steps}]"

    def _print(self, tag: str, text: str, style: str = "") -> None:
        from rich.text import Text

        text = self._printable(text)
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            text = between_values(text, self.console.width, len(tag) + 1)
        line = Text.assemble((tag, f"bold {style}".strip()), " ", text)
        self.console.print(line, soft_wrap=True, highlight=False)
        self.console.file.flush()

    def _printable(self, text: str) -> str:
        encoding = self.console.encoding or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


def step_line(values: Mapping[str, float], memory_title: str = "Host Mem") -> str:
    """`Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec`, of whatever is there."""
    parts = []
    for name, value in values.items():
        if name == "memory_gib":
            parts.append(f"{memory_title}: {format_memory(value)}")
        elif name == "steps_per_s":
            parts.append(f"Speed: {_compact(value)} steps/sec")
        elif name == "lr":
            parts.append(f"LR: {format_lr(value)}")
        elif name not in _NOT_SHOWN:
            parts.append(f"{title(name)}: {format_value(value)}")
    order = {"Loss": 0, "LR": 1, memory_title: 3, "Speed": 4}
    return " | ".join(sorted(parts, key=lambda part: order.get(part.split(":")[0], 2)))


def validation_line(values: Mapping[str, float]) -> str:
    """`Loss: 1.102 | Accuracy: 0.874`."""
    return " | ".join(
        f"{title(name)}: {format_value(value)}" for name, value in values.items() if name not in _NOT_SHOWN
    )


def between_values(text: str, width: int, indent: int) -> str:
    """`a | b | c` on as many lines of the terminal as it needs, broken between values, and sentences between words."""
    lines: list[str] = []
    for part in text.split(" | "):
        if lines and indent + len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" | {part}"
        else:
            room = max(1, width - indent)
            lines += textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False) or [part]
    return f"\n{' ' * indent}".join(lines)


def title(name: str) -> str:
    """A metric's name for people: words, with abbreviations in upper case."""
    return _TITLES.get(name) or name.replace("_", " ").capitalize()


def format_value(value: float) -> str:
    """Four significant digits where they matter: 1.245, 0.0831, 2.1e-4, 1.3e4; NaN and inf by name."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    size = abs(value)
    if size == 0 or 0.1 <= size < 10_000:
        return f"{value:.3f}"
    return f"{value:.4f}" if 0.001 <= size < 0.1 else _scientific(value)


def format_lr(value: float) -> str:
    """4.8e-5, without the padding zero of `%e`."""
    return "0" if value == 0 else _scientific(value)


def format_memory(gib: float) -> str:
    """6.2GB; 85GB from a hundred on would show noise after the point."""
    return f"{gib:.1f}GB" if gib < 100 else f"{gib:.0f}GB"


def _scientific(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _compact(value: float) -> str:
    """3.2, 0.25, 0.013: one decimal for speeds above one, two significant digits below."""
    return f"{value:.1f}" if value >= 1 or value == 0 or not math.isfinite(value) else f"{value:.2g}"


def _status(values: Mapping[str, float], memory_title: str, room: int) -> str:
    """The short form beside the bar: as much of it as fits into so many characters. The log lines have the rest."""
    parts = {}
    if "loss" in values:
        parts["loss"] = f"loss {format_value(values['loss'])}"
    if "lr" in values:
        parts["lr"] = f"lr {format_lr(values['lr'])}"
    if "steps_per_s" in values:
        parts["speed"] = f"{_compact(values['steps_per_s'])} steps/s"
    if "memory_gib" in values:
        parts["memory"] = f"{memory_title.split()[0]} {format_memory(values['memory_gib'])}"
    for least in ("memory", "lr", "speed", "loss"):
        if len("  ".join(parts.values())) > room:
            parts.pop(least, None)
    return "  ".join(parts.values())


def _make_bar(console: Console) -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = [
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    ]
    columns.append(TextColumn("{task.fields[status]}", markup=False))
    # Four redraws a second: more would cost a noticeable share of two cores.
    return Bar(*columns, console=console, expand=True, refresh_per_second=4)
