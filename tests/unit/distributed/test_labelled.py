"""Lines of other ranks are whole and say whose they are."""

from __future__ import annotations

import io
import sys

import pytest

from automodel.distributed.labelled import LabelledLines, labelled_output


def test_pieces_become_labelled_lines():
    out = io.StringIO()
    lines = LabelledLines(out, "[rank3]: ")
    print("a", 1, file=lines)
    lines.write("begun")
    lines.flush()
    assert out.getvalue() == "[rank3]: a 1\n"
    lines.write(" and ended\n10%\r50%\r100%\n[rank3]: by torch\n")
    lines.write("no end")
    lines.finish()
    assert out.getvalue().splitlines()[1:] == [
        "[rank3]: begun and ended",
        "[rank3]: 100%",
        "[rank3]: by torch",
        "[rank3]: no end",
    ]


def test_long_bars_other_line_ends_and_what_else_scripts_ask():
    raw = io.BytesIO()
    lines = LabelledLines(io.TextIOWrapper(raw, encoding="utf-8", newline=""), "[rank1]: ")
    for percent in range(1000):
        lines.write(f"\r{percent}")
    assert len(lines._begun) < 10
    lines.write("\r")
    lines.write("done\nfrom elsewhere\r\n")
    assert lines.encoding == "utf-8"
    assert lines.buffer is raw
    assert raw.getvalue().decode() == "[rank1]: done\n[rank1]: from elsewhere\n"


def test_the_first_rank_speaks_without_a_label(capsys):
    with labelled_output(0):
        print("loss")
    before = sys.stdout
    with labelled_output(1):
        print("careful")
        print("no end", end="")
        print("an error", file=sys.stderr)
    assert sys.stdout is before
    said = capsys.readouterr()
    assert said.out == "loss\n[rank1]: careful\n[rank1]: no end\n"
    assert said.err == "[rank1]: an error\n"


def test_after_an_error_the_traceback_is_labelled_too(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(RuntimeError), labelled_output(2):
        raise RuntimeError
    print("Traceback", file=sys.stderr)
    assert out.getvalue() == "[rank2]: Traceback\n"
