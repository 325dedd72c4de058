"""What a person sees while a model trains.

On a terminal: a bar with percent, steps and time left; below it loss, learning rate, speed in steps, tokens and
samples, epoch and memory; above it the log lines. Elsewhere (a file, CI, a Slurm log): the log lines alone, which are
the reference's, with its fields in its order; every further number of a step is in `metrics.jsonl`.

    [INFO] Launching job locally on 1 device
    [Step 50/1000] Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec
    [Step 50/1000] Validation | Loss: 1.102 | Accuracy: 0.874

Lines of a file are never wrapped (a wrapped line cannot be grepped); on a terminal that is too narrow they go on below,
between two values. Characters that the terminal's encoding lacks are replaced rather than raised.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self

from automodel.config.written import as_written

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from automodel.metrics.waiting import Heartbeat

_NOT_SHOWN = ("epoch", "time", "samples_per_s", "tokens_per_s", "grad_norm")  # in metrics.jsonl, too many for a line
_FIRST = ("loss", "lr", "memory_gib", "steps_per_s")  # the reference's fields, in its order
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


class Progress:
    """The run's voice on the terminal. `step` and `validation` take values as they are logged to `metrics.jsonl`.

    `steps_per_epoch` and `epochs` are those of the plan; without them, nothing is said of epochs."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        console: Console | None = None,
        device: str = "cpu",
        steps_per_epoch: int = 0,
        epochs: float = 0.0,
    ) -> None:
        from rich.console import Console

        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.epochs = epochs
        self._first_steps: Heartbeat | None = None
        self._done = start_step
        self.console = console or Console()
        self._memory_title = "GPU Mem" if str(device).startswith("cuda") else "Host Mem"
        self._bar: Bar | None = None
        self._task = None
        if self._is_live:
            self._bar = _make_bar(self.console)
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, status="")

    @property
    def _is_live(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()  # not before: an error in between must leave the terminal as it was
        else:
            from automodel.metrics.waiting import Heartbeat

            self._first_steps = Heartbeat(self._tell_first_steps)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def info(self, text: str) -> None:
        """Something worth knowing."""
        self._print("[INFO]", as_written(text), "blue")

    def warn(self, text: str) -> None:
        """Something that may be wrong."""
        self._print("[WARN]", as_written(text), "yellow")

    def step(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """A step is done. With values its log line is written, perhaps some steps later; without, the bar moves."""
        self._done = max(self._done, step)
        if values:
            self._end_first_steps()
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=self._done)
            if values:
                self._bar.update(self._task, status=self._printable(self._status(values)))
        if values:
            self._print(self._step_tag(step), step_line(values, self._memory_title))

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluation is done."""
        self._print(self._step_tag(step), "Validation | " + validation_line(values), "green")

    def close(self) -> None:
        """Leave the terminal as it was; the last state of the bar stays visible."""
        self._end_first_steps()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _tell_first_steps(self, passed: float) -> None:
        """Said every ten seconds until the first log line."""
        self.info(f"{self._done} of {self.total_steps} steps are done after {duration(passed)}; no log line is due yet")

    def _end_first_steps(self) -> None:
        if self._first_steps is not None:
            self._first_steps.stop()
            self._first_steps = None

    def _step_tag(self, step: int) -> str:
        return f"[Step {step}/{self.total_steps}]"

    def _status(self, values: Mapping[str, float]) -> str:
        """The line below the bar: as much of it as fits. The least important numbers go first."""
        parts = {
            "loss": f"loss {format_value(values['loss'])}" if "loss" in values else "",
            "lr": f"lr {format_lr(values['lr'])}" if "lr" in values else "",
            "speed": f"{_compact(values['steps_per_s'])} steps/s" if "steps_per_s" in values else "",
            "tokens": f"{_whole(values['tokens_per_s'])} tokens/s" if "tokens_per_s" in values else "",
            "samples": f"{_whole(values['samples_per_s'])} samples/s" if "samples_per_s" in values else "",
            "epoch": f"epoch {self._epoch(values['epoch'])}" if "epoch" in values else "",
            "epoch time": "",
            "memory": "",
        }
        if epoch_time := self._epoch_time(values):
            parts["epoch time"] = f"{epoch_time} an epoch"
        if "memory_gib" in values:
            parts["memory"] = f"{self._memory_title.split()[0]} {format_memory(values['memory_gib'])}"
        for least in ("memory", "lr", "samples", "epoch time", "speed", "epoch", "tokens", "loss"):
            if len("  ".join(filter(None, parts.values()))) > self.console.width:
                parts.pop(least)
        return "  ".join(filter(None, parts.values()))

    def _epoch(self, done: float) -> str:
        """0.42/3: epochs done, of how many."""
        return f"{done:.2f}/{self.epochs:.4g}" if self.epochs else f"{done:.2f}"

    def _epoch_time(self, values: Mapping[str, float]) -> str:
        """How long an epoch takes at the speed of now; nothing where it is not known."""
        speed = values.get("steps_per_s", 0.0)
        known = self.steps_per_epoch and speed > 0 and math.isfinite(speed)
        return duration(self.steps_per_epoch / speed) if known else ""

    def _print(self, tag: str, text: str, style: str = "") -> None:
        from rich.text import Text

        text = self._printable(text)
        if self._is_live:
            text = between_values(text, self.console.width, len(tag) + 1)
        line = Text.assemble((tag, f"bold {style}".strip()), " ", text)
        self.console.print(line, soft_wrap=True, highlight=False)
        self.console.file.flush()

    def _printable(self, text: str) -> str:
        encoding = self.console.encoding or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


def step_line(values: Mapping[str, float], memory_title: str = "Host Mem") -> str:
    """`Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec`, of whatever is there. Values that the
    reference does not have come after its own."""
    return " | ".join(
        _field(name, values[name], memory_title)
        for name in (*_FIRST, *(n for n in values if n not in _FIRST and n not in _NOT_SHOWN))
        if name in values
    )


def _field(name: str, value: float, memory_title: str) -> str:
    if name == "memory_gib":
        return f"{memory_title}: {format_memory(value)}"
    if name == "steps_per_s":
        return f"Speed: {_compact(value)} steps/sec"
    if name == "lr":
        return f"LR: {format_lr(value)}"
    return f"{title(name)}: {format_value(value)}"


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


def _whole(value: float) -> str:
    """9,120 · 84 · 3.2: whole numbers, with a decimal where there are few."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 10 else _compact(value)


def duration(seconds: float) -> str:
    """4.2 s, 48 s, 3 min 42 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _make_bar(console: Console) -> Bar:
    from rich.console import RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text

    class TwoLines(Bar):
        """The bar, and below it the numbers, which would leave no room for it."""

        def get_renderables(self) -> Iterator[RenderableType]:
            yield from super().get_renderables()
            for task in self.tasks:
                if task.fields["status"]:
                    yield Text(task.fields["status"], no_wrap=True, overflow="ellipsis")

    # Four redraws a second: more would cost a noticeable share of two cores.
    return TwoLines(
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        refresh_per_second=4,
    )
