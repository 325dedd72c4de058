"""The lines of a run, plain and on a terminal."""

import io
import math
import time

import pytest
from rich.console import Console

from automodel.metrics import waiting
from automodel.metrics.progress import Progress, between_values, format_lr, format_memory, format_value

VALUES = {"loss": 1.2449, "lr": 4.8e-5, "grad_norm": 1.0, "tokens_per_s": 900.0, "steps_per_s": 3.21, "memory_gib": 6.2}


def run_lines(device="cuda"):
    out = io.StringIO()
    with Progress(1000, console=Console(file=out, width=40), device=device) as progress:
        progress.info("Launching job locally on 1 device")
        progress.step(49)
        progress.step(50, VALUES)
        progress.validation(50, {"epoch": 0.5, "loss": 1.1, "accuracy": 0.8741, "f1": 0.87})
        progress.warn("the loss [is] NaN")
    return out.getvalue().splitlines()


def test_plain_lines_have_the_form_of_the_reference():
    assert run_lines() == [
        "[INFO] Launching job locally on 1 device",
        "[Step 50/1000] Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec",
        "[Step 50/1000] Validation | Loss: 1.100 | Accuracy: 0.874 | F1: 0.870",
        "[WARN] the loss [is] NaN",
    ]


def test_on_the_cpu_it_is_host_memory():
    assert " | Host Mem: 6.2GB | " in run_lines(device="cpu")[1]


def test_extra_values_come_after_those_of_the_reference():
    out = io.StringIO()
    progress = Progress(10, console=Console(file=out, width=300))
    progress.step(1, {"memory_gib": 1.0, "aux_loss": 0.01, "loss": 2.0})
    assert out.getvalue() == "[Step 1/10] Loss: 2.000 | Host Mem: 1.0GB | Aux loss: 0.0100\n"


def test_a_plain_line_is_the_references_and_nothing_more():
    out = io.StringIO()
    progress = Progress(1000, console=Console(file=out, width=40), device="cuda", steps_per_epoch=400, epochs=2.5)
    progress.step(50, {**VALUES, "samples_per_s": 25.7, "epoch": 0.125})
    assert out.getvalue() == "[Step 50/1000] Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec\n"


def test_until_the_first_log_line_a_file_is_told_how_far_it_is(monkeypatch):
    monkeypatch.setattr(waiting, "EVERY_S", 0.05)
    out = io.StringIO()
    with Progress(100, console=Console(file=out, width=40)) as progress:
        progress.step(3)
        until = time.monotonic() + 10
        while "3 of 100 steps are done" not in out.getvalue():
            assert time.monotonic() < until
            time.sleep(0.02)
        progress.step(10, VALUES)
        said = out.getvalue()
        time.sleep(0.3)
        assert out.getvalue() == said


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.8e-5, "4.8e-5"), (2e-5, "2.0e-5"), (1e-3, "1.0e-3"), (0.0, "0"), (0.1, "1.0e-1"), (1e-10, "1.0e-10")],
)
def test_learning_rates_have_no_padding_zero(value, text):
    assert format_lr(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.2449, "1.245"),
        (0.0831, "0.0831"),
        (2.1e-4, "2.1e-4"),
        (0.0, "0.000"),
        (-0.5, "-0.500"),
        (12345.0, "1.2e4"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
    ],
)
def test_values(value, text):
    assert format_value(value) == text


def test_memory():
    assert [format_memory(v) for v in (0.04, 6.24, 139.8)] == ["0.0GB", "6.2GB", "140GB"]


def terminal(**options):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110, _environ={"TERM": "xterm-256color"}, **options)
    return out, console


def test_a_terminal_gets_a_bar_and_the_same_lines_above_it():
    out, console = terminal(color_system=None)
    with Progress(1000, start_step=40, console=console, device="cuda") as progress:
        progress.step(50, VALUES)
    text = out.getvalue()
    assert "[Step 50/1000] Loss: 1.245 | LR: 4.8e-5 | GPU Mem: 6.2GB | Speed: 3.2 steps/sec" in text
    assert " 5%   50/1000 " in text.splitlines()[-3]
    assert text.splitlines()[-2].strip() == "loss 1.245  lr 4.8e-5  3.2 steps/s  900 tokens/s  GPU 6.2GB"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_nothing_is_drawn_before_the_run_begins():
    out, console = terminal()
    Progress(10, console=console)
    assert out.getvalue() == ""


def test_the_terminal_is_restored_after_an_error():
    out, console = terminal()
    with pytest.raises(RuntimeError), Progress(10, console=console):
        raise RuntimeError("boom")
    assert out.getvalue().count("\x1b[?25h") == 1


def test_no_color_has_no_colour_codes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110)
    with Progress(10, console=console) as progress:
        progress.warn("careful")
        progress.step(10, VALUES)
    assert "\x1b[3" not in out.getvalue().replace("\x1b[3m", "")  # neither 30–37 nor 38;5


def test_an_ascii_terminal_gets_replacements_instead_of_an_exception():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=True, width=110)
    with Progress(10, console=console) as progress:
        progress.info("4 × 8 sequences · Ünicode")
        progress.step(5, VALUES)
    console.file.flush()
    assert b"4 ? 8 sequences ? ?nicode" in raw.getvalue()


def test_a_dumb_terminal_gets_plain_lines():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, _environ={"TERM": "dumb"}, color_system=None)
    with Progress(10, console=console) as progress:
        progress.step(5, {"loss": 1.0})
    assert out.getvalue() == "[Step 5/10] Loss: 1.000\n"


@pytest.mark.parametrize(
    ("width", "there", "left_out"),
    [
        (120, ["loss 0.692", "10.2 steps/s", "1,310 tokens/s", "164 samples/s", "epoch 0.80/1", "Host 0.6GB"], []),
        (80, ["loss 0.692", "1,310 tokens/s", "epoch 0.80/1", "20 min 25 s an epoch"], ["Host", "lr 3.7e-6"]),
        (40, ["loss 0.692", "1,310 tokens/s", "epoch 0.80/1"], ["steps/s", "an epoch"]),
        (20, ["loss 0.692"], ["tokens/s"]),
    ],
)
def test_below_the_bar_stands_what_fits(width, there, left_out):
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, _environ={"TERM": "xterm-256color"}, color_system=None
    )
    values = {"loss": 0.692, "lr": 3.7e-6, "steps_per_s": 10.2, "tokens_per_s": 1310.0, "samples_per_s": 164.0}
    with Progress(12_500, console=console, steps_per_epoch=12_500, epochs=1.0) as progress:
        progress.step(10_000, {**values, "memory_gib": 0.6, "epoch": 0.8})
    status = out.getvalue().splitlines()[-2]
    assert "…" not in status
    assert all(part in status for part in there)
    assert not any(part in status for part in left_out)


@pytest.mark.parametrize("width", [120, 80, 60])
def test_a_narrow_bar_keeps_its_times_whole(width):
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, _environ={"TERM": "xterm-256color"}, color_system=None
    )
    with Progress(12_500, console=console) as progress:
        progress.step(10_000, {"loss": 0.692})
    bar = out.getvalue().splitlines()[-3]
    assert " 80% 10000/12500 " in bar
    assert "ETA" in bar
    assert "…" not in bar


def test_a_sentence_breaks_between_words_and_a_path_never():
    path = "/a/folder/with/quite-a-long-name/and-another/out"
    text = between_values(f"Saved the model, which is larger than one line, to {path} and elsewhere", 40, 7)
    lines = text.split("\n")
    assert lines == [
        "Saved the model, which is larger", "       than one line, to", f"       {path}", "       and elsewhere",
    ]  # fmt: skip


def test_a_long_line_breaks_between_values_on_a_terminal_and_never_in_a_file():
    values = {"loss": 0.694, "accuracy": 0.455, "f1": 0.0, "precision": 0.0, "recall": 0.0, "mcc": 0.0, "auroc": 0.5}
    whole = (
        "[Step 25/60] Validation | Loss: 0.694 | Accuracy: 0.455 | F1: 0.000 | Precision: 0.000 | Recall: 0.000 | "
        "MCC: 0.000 | AUROC: 0.500\n"
    )
    for width, expected in (
        (200, whole),
        (80, whole.replace(" | Precision", "\n             Precision")),
    ):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"}, color_system=None)
        Progress(60, console=console).validation(25, values)
        assert out.getvalue() == expected
    out = io.StringIO()
    Progress(60, console=Console(file=out, width=80)).validation(25, values)
    assert out.getvalue() == whole
