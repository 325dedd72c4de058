"""The committed results of `make test-architectures`: whole, without a fault, and what the table in the docs says."""

import json

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
