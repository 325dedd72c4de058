"""The page that `automodel data preview` prints: samples in colour, then the numbers.

On a terminal what is learned is green; elsewhere (a file, a pipe, NO_COLOR) it stands between « and », so that the page
says the same thing without colours. Every line fits the terminal, 80 columns included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from automodel.data.preview import Piece, ShownSample
from automodel.engine.preview import Batches, Preview

LONGEST_PIECE = 600  # characters; the middle of a longer one is left out
EIGHTHS = " ▏▎▍▌▋▊▉█"
NARROWEST = 20  # characters of a column
MANY_CUT = 0.1  # share of the samples; more is a warning
STYLES = {  # learned, special
    (False, False): "dim",
    (False, True): "cyan",
    (True, False): "bold green",
    (True, True): "bold black on green",
}


def print_preview(seen: Preview, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    _print_title(seen, console)
    colours = console.is_terminal and not console.no_color
    if seen.shown and seen.task.rows.labels != "document":
        console.print(_legend(colours))
    console.print()
    for number, sample in enumerate(seen.shown, 1):
        _print_sample(sample, number, len(seen.shown), console, colours)
    _print_lengths(seen, console)
    _print_table("What is learned", _learned(seen), console)
    if seen.batches is not None:
        _print_table("Batches", _batches(seen.batches), console)
    for note in seen.notes:
        console.print(_beside(Text.assemble(("note  ", "bold yellow")), Text(note), console))


def _print_title(seen: Preview, console: Console) -> None:
    stats = seen.stats
    made = "" if stats.used == stats.rows else f", {stats.used:,} samples"
    console.print(Text(seen.source, style="bold"))
    console.print(Text(f"{seen.split}, {seen.task}: {stats.rows:,} rows{made}, {stats.tokens:,} tokens"))
    console.print(Text(seen.columns, style="dim"))
    if seen.mixture:
        console.print(Text(f"an epoch takes {seen.mixture}", style="dim"))


# --- samples ----------------------------------------------------------------------------------------------------------


def _print_sample(sample: ShownSample, number: int, of: int, console: Console, colours: bool) -> None:
    learned = f", {sample.learned:,} learned" if sample.learned is not None else ""
    where = f" of {sample.dataset}" if sample.dataset else ""
    head = Text.assemble(
        (f"Sample {number}/{of}", "bold"), (f"  row {sample.row:,}{where}, {sample.tokens:,} tokens{learned}", "dim")
    )
    console.print(head)
    console.print(_margin(_written(sample.pieces, colours), console))
    if sample.target:
        console.print(_margin(_written(sample.target, colours), console, "→ "))
    if sample.label is not None:
        label = Text(sample.label, style="bold green") if colours else Text(f"«{sample.label}»")
        console.print(_margin(label, console, "→ "))
    console.print()


def _legend(colours: bool) -> Text:
    if not colours:
        return Text("«what is learned»")
    kinds = (("context", False, False), ("learned", True, False), ("special token", False, True), ("both", True, True))
    return Text("  ").join(Text(name, style=STYLES[learned, special]) for name, learned, special in kinds)


def _written(pieces: Iterable[Piece], colours: bool) -> Text:
    text, open_ = Text(), False
    for piece in pieces:
        if not colours and piece.learned != open_:
            text.append("«" if piece.learned else "»")
            open_ = piece.learned
        text.append(_shortened(piece.text), style=STYLES[piece.learned, piece.special] if colours else "")
        if piece.tag not in (None, "O"):
            text.append(f"[{piece.tag}]", style="magenta" if colours else "")
    if open_:
        text.append("»")
    return text


def _shortened(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    left_out = len(text) - LONGEST_PIECE
    if left_out <= 60:
        return text
    half = LONGEST_PIECE // 2
    return f"{text[:half]} … {left_out:,} characters … {text[-half:]}"


def _margin(text: Text, console: Console, sign: str = "│ ") -> Text:
    """The text wrapped, with a line down its left side."""
    edges = (f"  {sign}", "  │ " if sign == "│ " else "    ")
    lines = _wrapped(text, console, console.width - 4)
    return Text("\n").join(Text.assemble((edges[min(i, 1)], "blue")) + line for i, line in enumerate(lines))


# --- numbers ----------------------------------------------------------------------------------------------------------


def _print_lengths(seen: Preview, console: Console) -> None:
    edges, counts = seen.stats.length_histogram["edges"], seen.stats.length_histogram["counts"]
    console.print(Text("Tokens of a sample", style="bold"))
    ranges = [f"{low:,}–{high - 1:,}" for low, high in pairwise(edges)]
    wide, room = max(map(len, ranges)), max(10, min(44, console.width - max(map(len, ranges)) - 24))
    most, total = max(counts), max(1, sum(counts))
    digits = len(f"{most:,}")
    for label, count in zip(ranges, counts):
        line = Text.assemble(
            f"  {label:>{wide}}  ",
            (_bar(count / most, room, console), "green"),
            (f" {count:>{digits},}", "bold" if count == most else ""),
            (f"{count / total:>7.1%}", "dim"),
        )
        console.print(line)
    lengths = seen.lengths
    names = {"shortest": "shortest", "median": "median", "mean": "mean", "p95": "95 % up to", "longest": "longest"}
    shown = [f"{said} {lengths[name]:,.0f}" for name, said in names.items()]
    if seen.stats.longest > lengths["longest"]:
        shown[-1] += f" ({seen.stats.longest:,} before it was {'cut' if seen.stats.truncated else 'split'})"
    console.print(Text("  " + ", ".join(shown), style="dim"))
    console.print()


def _bar(share: float, room: int, console: Console) -> str:
    if (console.encoding or "utf-8").lower().replace("-", "") != "utf8":
        return ("#" * round(share * room)).ljust(room)
    whole, eighths = divmod(max(round(share * room * 8), 1 if share else 0), 8)
    return ("█" * whole + (EIGHTHS[eighths] if eighths else "")).ljust(room)


def _print_table(title: str, rows: Iterable[tuple[str, str, str]], console: Console) -> None:
    """Name, number and remark; remarks wrap in their own column. One that starts with `!` is a warning."""
    console.print(Text(title, style="bold"))
    listed = list(rows)
    names, numbers = max(len(name) for name, _, _ in listed), max(len(number) for _, number, _ in listed)
    for name, number, remark in listed:
        warns = remark.startswith("!")
        beside = Text(remark.removeprefix("! "), style="yellow" if warns else "dim")
        left = Text.assemble(f"  {name:<{names}}  ", (f"{number:>{numbers}}", "bold yellow" if warns else "bold"), "  ")
        console.print(_beside(left, beside, console))
    console.print()


def _beside(left: Text, text: Text, console: Console) -> Text:
    """The text to the right of `left`, wrapped in a column of its own; below it, where that would be too narrow."""
    room = console.width - len(left.plain)
    if room < NARROWEST:
        left.rstrip()
        return Text("\n").join([left, *(Text("    ") + line for line in _wrapped(text, console, console.width - 4))])
    lines = _wrapped(text, console, room)
    return Text("\n").join((left if i == 0 else Text(" " * len(left.plain))) + line for i, line in enumerate(lines))


def _wrapped(text: Text, console: Console, width: int) -> list[Text]:
    lines = list(text.wrap(console, max(NARROWEST, width), tab_size=4))
    for line in lines:
        line.rstrip()
    while len(lines) > 1 and not lines[-1].plain:
        lines.pop()
    return lines


def _learned(seen: Preview) -> Iterator[tuple[str, str, str]]:
    stats = seen.stats
    rows = stats.rows - stats.skipped
    if seen.task.rows.labels == "target":
        yield "target tokens", f"{stats.supervised:,}", "all of them are learned"
    elif stats.supervised is not None:
        yield "tokens learned", f"{stats.supervised_share:.1%}", f"{stats.supervised:,} of {stats.tokens:,}"
    else:
        yield "labels", f"{stats.used:,}", _classes(seen)
    if stats.supervised is not None:
        yield "samples with none", "0", "checked: a run would not start with one"
        ended, stop = rows - stats.unended, f" ({seen.end_token})" if seen.end_token else ""
        warning = "! the model may not learn to stop: " if stats.unended > 0.1 * rows else ""
        told = f"{warning}{ended:,} of {rows:,} rows end in a stop token{stop}"
        yield "end learned", f"{ended / max(1, rows):.1%}", told
    yield from _cuts(seen)
    if stats.skipped:
        first = stats.skipped_rows[0]
        yield "skipped", f"{stats.skipped:,}", f"! rows that cannot be used; row {first['row']}: {first['reason']}"


def _cuts(seen: Preview) -> Iterator[tuple[str, str, str]]:
    """What is longer than a limit; a tenth and more of the samples is a warning."""
    stats = seen.stats
    if not stats.truncated:
        yield "cut", "0.0%", f"no sample is longer than max_length {stats.max_length:,}"
    for cut in stats.cuts:
        warning = "! " if cut.count > MANY_CUT * cut.of else ""
        name = "cut" if cut.what == "samples" else f"{cut.what} cut"
        yield name, f"{cut.count / max(1, cut.of):.1%}", f"{warning}{cut.how_many.rpartition(' (')[0]}: {cut.why}"


def _classes(seen: Preview) -> str:
    names, counts = seen.stats.label_names, seen.stats.label_counts
    if not counts:
        return "one of each sample"
    shown = [f"{names[i] if names else i} {count:,}" for i, count in enumerate(counts[:8])]
    return ", ".join([*shown, *(["…"] if len(counts) > 8 else [])])


def _batches(batches: Batches) -> Iterator[tuple[str, str, str]]:
    if batches.bin_tokens:
        bins = f"{batches.bins:,} bins of {batches.bin_tokens:,} tokens, {batches.accumulation} a step"
        yield "steps an epoch", f"{batches.steps:,}", bins
        yield "bins full", f"{batches.fill:.1%}", f"mean {batches.samples / batches.bins:.1f} documents in each"
    else:
        size = f"{batches.examples} × {batches.accumulation}" if batches.accumulation > 1 else str(batches.examples)
        yield "steps an epoch", f"{batches.steps:,}", f"{batches.samples:,} samples, {size} a step"
    if batches.path == "packed":
        grouped = ""
        if batches.grouped_padding is not None:
            grouped = f"; {batches.grouped_padding:.1%} with batches of similar lengths"
        yield "padding avoided", f"{batches.padding:.1%}", f"of padded batches would be padding{grouped}"
    else:
        grouped_padding = batches.grouped_padding or 0.0
        remark = f"this model is padded; {batches.padding:.1%} without batches of similar lengths"
        yield "padding", f"{grouped_padding:.1%}", remark
