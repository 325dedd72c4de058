"""The committed results of `make test-architectures`: whole, without a fault, and what the table in the docs says."""

import json
from pathlib import Path

import transformers

from architectures import sweep, tiny

RESULTS = json.loads(sweep.RESULTS.read_text())


def test_the_table_is_made_of_the_results():
    assert sweep.TABLE.read_text() == sweep.table(RESULTS)


def test_every_class_is_there_and_none_is_at_fault():
    rows = RESULTS["rows"]
    assert [(r["kind"], r["task"], r["reason"]) for r in rows if r["verdict"] not in sweep.GOOD] == []
    if RESULTS["versions"]["transformers"] == transformers.__version__:  # other versions map other classes
        assert [(r["kind"], r["task"]) for r in rows] == tiny.mapped()


def test_reasons_end_with_a_whole_word_and_do_not_name_the_sweep_s_own_folder():
    reasons = [row["reason"] for row in RESULTS["rows"]]
    assert [reason for reason in reasons if "'start'" in reason] == []
    assert [reason for reason in reasons if reason.endswith("…") and not reason.endswith(" …")] == []

    from architectures import examine  # its own imports are found once `sweep` is there

    made = examine.one_line(ValueError("/place/x: 'start' is " + "wide " * 100), Path("/place"))
    assert made.startswith("ValueError: x: this is wide")
    assert made.endswith("wide …")
    assert len(made) <= examine.LETTERS
