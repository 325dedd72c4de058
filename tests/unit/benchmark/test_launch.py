"""A measuring process: what it is told, what it hands back, and how its failure looks."""

import json
import time

from automodel.benchmark.launch import Ended, run_process

WRITES = "import json, os, sys; json.dump(float(os.environ['AUTOMODEL_BENCHMARK_STARTED']), open(sys.argv[1], 'w'))"


def test_a_process_learns_when_it_was_started_and_hands_back_what_it_wrote(tmp_path):
    before = time.monotonic()
    ended = run_process(["-c", WRITES], tmp_path / "result.json", tmp_path / "logs" / "x.log")
    assert ended.code == 0
    assert before <= ended.value <= time.monotonic() - ended.seconds


def test_a_process_that_fails_hands_back_nothing(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps("of an earlier run"))
    ended = run_process(["-c", "print('why'); raise SystemExit(3)"], tmp_path / "result.json", tmp_path / "x.log")
    assert (ended.code, ended.value) == (3, None)
    assert "why" in (tmp_path / "x.log").read_text()
    assert isinstance(ended, Ended)
