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
import gzip
import re
from pathlib import Path
from typing import Any

from automodel.config.errors import UserError

CHUNK = 1 << 22


def check_encoding(path: Path, section: str) -> None:
    """Raises `UserError` with the line that is not UTF-8."""
    decoder, lines = codecs.getincrementaldecoder("utf-8")(), 1
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        while True:
            chunk = file.read(CHUNK)
            if lines == 1 and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise UserError(f"{section}.path: '{path}' is UTF-16, not UTF-8. {_convert(path, 'UTF-16')}")
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
            if not chunk:
                return
            lines += chunk.count(b"\n")


def _convert(path: Path, encoding: str) -> str:
    """How a file becomes UTF-8; the encoding is a guess where nothing in the file tells it."""
    packed = path.suffix.lower() == ".gz"
    name = path.name.removesuffix(path.suffix) if packed else path.name
    target = f"utf8-{name}"
    if packed:
        return f"Save it as UTF-8, e.g. `zcat {path} | iconv -f {encoding} -t UTF-8 > {target}`."
    return f"Save it as UTF-8, e.g. `iconv -f {encoding} -t UTF-8 {path} > {target}`."


def first_row_options(path: Path, options: dict[str, Any], section: str) -> dict[str, Any]:
    """Options with which pandas reads rows longer than the header as they are meant, or `UserError`."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    dialect = {"delimiter": options.get("sep", ","), "quoting": options.get("quoting", csv.QUOTE_MINIMAL)}
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, **dialect)
        try:
            header, row = next(reader, []), next(reader, [])
        except csv.Error:  # a cell of megabytes; pandas has no limit
            return {}
        line = reader.line_num
    if len(row) <= len(header):
        return {}
    if not any(cell.strip() for cell in row[len(header) :]):
        return {"index_col": False}
    raise UserError(f"{section}.path: '{path}': {_too_many(line, len(row), len(header), header)}")


def in_words(message: str) -> str:
    """An error of pandas' CSV parser for people; other messages stay as they are."""
    cells = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message)
    if cells:
        expected, line, found = map(int, cells.groups())
        return _too_many(line, found, expected).rstrip(".")
    quote = re.search(r"EOF inside string starting at row (\d+)", message)
    if quote:
        line = int(quote[1]) + 1
        return f'the double quote that opens near line {line} is never closed; inside a quoted text, " is written ""'
    return message


def _too_many(line: int, found: int, expected: int, header: list[str] | None = None) -> str:
    names = f" ({', '.join(name[:30] for name in header[:6])})" if header else ""
    return (
        f"line {line} has {found} cells, but the header has {expected}{names}. "
        'A text with a comma in it must stand in double quotes: "so, like this".'
    )
