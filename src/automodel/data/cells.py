"""What makes text and CSV files unreadable, or readable in a way that nobody meant, said in words.

- A file that is not UTF-8 (saved by an old Windows program, or as UTF-16 by a spreadsheet) is found before parsing,
  with its line: parsers fail at it late, with a byte's position, or replace letters.
- A CSV file whose first row has more cells than its header (`A good film, and long,1` without quotes) is no error to
  pandas: it takes the first cell as the row's name, and every column is that of its neighbour. Cells that are all empty
  there are only a comma at the end of each line.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from automodel.config.errors import UserError
from automodel.data.packed import UNPACKED_BY, PackedError, is_packed, opened, plain_name

CHUNK = 1 << 22
SAMPLE = 1 << 16  # bytes that tell an encoding of two bytes a letter


def check_encoding(path: Path, section: str) -> None:
    """Raises `UserError` with the line that is not UTF-8, or where the file cannot be read at all."""
    try:
        with opened(path) as file:
            _decode(file, path, section)
    except PackedError as error:
        raise UserError(f"{section}.path: '{path}' cannot be read: {error}.") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{section}.path: '{path}' cannot be read: {reason}. Name another file.") from error


def open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(opened(path), encoding="utf-8-sig", errors="replace")


def _decode(file: IO[bytes], path: Path, section: str) -> None:
    decoder, lines = codecs.getincrementaldecoder("utf-8")(), 1
    chunk, first = b"", True
    while first or chunk:
        chunk = file.read(CHUNK)
        if first and (encoding := _wide_encoding(chunk)) is not None:
            raise UserError(f"{section}.path: '{path}' is UTF-16, not UTF-8. {_convert(path, encoding)}")
        first = False
        waiting = len(decoder.getstate()[0])  # bytes of a letter that began in the chunk before
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line = lines + chunk.count(b"\n", 0, max(0, error.start - waiting))
            byte = error.object[error.start]
            raise UserError(
                f"{section}.path: '{path}' is not UTF-8: line {line} holds the byte 0x{byte:02x}. "
                + _convert(path, "WINDOWS-1252")
            ) from None
        lines += chunk.count(b"\n")


def _wide_encoding(first: bytes) -> str | None:
    """The encoding of two bytes a letter that a file begins in; None for all others. Without a mark at its beginning it
    may be valid UTF-8, with a NUL beside every letter. Line ends, spaces and digits have one in any language, and
    always on the same side."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    sample = first[:SAMPLE]
    zeros = sample[::2].count(0), sample[1::2].count(0)
    if min(zeros) > 0 or max(zeros) == 0:
        return None
    encoding = "UTF-16LE" if zeros[1] else "UTF-16BE"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return None
    return encoding if max(zeros) * 4 >= len(sample) or "\n" in text else None


def _convert(path: Path, encoding: str) -> str:
    """How a file becomes UTF-8; the encoding is a guess where nothing in the file tells it."""
    target = f"utf8-{plain_name(path)}"
    if is_packed(path):
        unpack = UNPACKED_BY[path.suffix.lower()]
        return f"Save it as UTF-8, e.g. `{unpack} {path} | iconv -f {encoding} -t UTF-8 > {target}`."
    return f"Save it as UTF-8, e.g. `iconv -f {encoding} -t UTF-8 {path} > {target}`."


def first_row_options(
    path: Path, options: dict[str, Any], section: str, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The options for pandas where rows are longer than the header; raises `UserError` where they cannot be read.
    `names`: the column names of a file without a header."""
    dialect = {"delimiter": options.get("sep", ","), "quoting": options.get("quoting", csv.QUOTE_MINIMAL)}
    header: list[str] = []
    found: dict[str, Any] = {}
    with opened(path) as packed, io.TextIOWrapper(packed, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, **dialect)
        rows = (row for row in reader if len(row) > 1 or "".join(row).strip())  # pandas takes no notice of empty lines
        with suppress(csv.Error):  # a cell of megabytes; pandas has no limit
            header = list(names) if names else next(rows, [])
            for number, row in enumerate(rows):
                if not number:
                    _check_separator(header, row, f"{section}.path: '{path}'")
                if any(cell.strip() for cell in row[len(header) :]):
                    too_many = _too_many(reader.line_num, len(row), len(header), header, named=bool(names))
                    raise UserError(f"{section}.path: '{path}': {too_many}")
                if not found and len(row) <= len(header):
                    break  # pandas itself refuses longer ones after this
                found = {"index_col": False}  # with which it drops what is too much in any row: all are looked at
    return found


def in_words(message: str, header: list[str] | None = None, named: bool = False) -> str:
    """An error of pandas' CSV parser for people; other messages stay as they are. `named`: the config names the
    columns."""
    cells = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message)
    if cells:
        expected, line, found = map(int, cells.groups())
        return _too_many(line, found, expected, header, named).rstrip(".")
    quote = re.search(r"EOF inside string starting at row (\d+)", message)
    if quote:
        line = int(quote[1]) + 1
        closing = 'Close it; inside a quoted text, " is written ""'
        return f"the double quote that opens near line {line} is never closed. {closing}"
    return message


def _check_separator(header: list[str], row: list[str], where: str) -> None:
    """One column would be read, as plain text, questions and answers alike."""
    other = _other_separator(header, row) if len(header) == len(row) == 1 else None
    if other is not None:
        fix = "name it .csv" if other == "," else "save it with commas, or with tabs as .tsv"
        raise UserError(
            f"{where} has one column, called '{header[0]}'. Its cells seem to be separated by {other!r}: {fix}."
        )


def _other_separator(header: list[str], row: list[str]) -> str | None:
    """What stands between cells of a file that seems to have one column."""
    return next((c for c in ";|\t," if c in header[0] and c in row[0]), None)


def _too_many(line: int, found: int, expected: int, header: list[str] | None = None, named: bool = False) -> str:
    names = f" ({', '.join(name[:30] for name in header[:6])})" if header else ""
    separator = _other_separator(header, header) if header and len(header) == 1 else None
    if separator is not None:
        hint = f"Its cells seem to be separated by {separator!r}: save it with commas, or with tabs as .tsv."
    else:
        hint = 'A text with a comma in it must stand in double quotes: "so, like this".'
    where = "column_names" if named else "the header"
    return f"line {line} has {found} cells, but {where} has {expected}{names}. {hint}"
