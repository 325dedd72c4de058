"""`benchmarks/predict.py`: what its sides are, that they give the same answers, and the rows."""

import csv
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

import tiny_runs as tiny
from automodel.benchmark.side import STARTED

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "predict.py"
TEXTS = 20


@pytest.fixture(scope="module")
def predict():
    spec = importlib.util.spec_from_file_location("predict", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    paths = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = paths
    return module


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    tiny.make_model_folder(folder, "bert", classifier=True)
    with (folder / "held_out.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        rows.writerows((row["text"], f"LABEL_{row['label']}") for row in tiny.reviews(TEXTS))
    return {"folder": str(folder), "texts": str(folder / "held_out.csv"), "passes": 2}


def test_every_precision_attention_and_batch_size_is_tried(predict, job, monkeypatch):
    monkeypatch.setattr(predict, "USUAL_BATCH_SIZE", 2)
    found = predict.try_out(job)
    sizes, ways = found[: len(predict.BATCH_SIZES)], found[len(predict.BATCH_SIZES) :]
    assert {(one["precision"], one["attention"]) for one in ways} == {
        (precision, attention) for precision in predict.PRECISIONS for attention in predict.ATTENTIONS
    }
    best = (ways[0]["precision"], ways[0]["attention"])
    assert {(one["precision"], one["attention"], one["batch_size"]) for one in sizes} == {
        (*best, size) for size in predict.BATCH_SIZES
    }
    for tried in (sizes, ways):
        assert [one["ms"] for one in tried] == sorted(one["ms"] for one in tried)
        assert tried[0]["ms"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast", "bf16"])
def test_the_careful_loop_computes_in_what_it_is_called(predict, job, precision):
    import torch

    careful, seen = predict.Careful(job["folder"], precision, "eager", 8), []
    layer = careful.model.bert.encoder.layer[0].intermediate.dense
    layer.register_forward_hook(lambda _, __, out: seen.append((out.dtype, torch.is_inference_mode_enabled())))
    careful([row["text"] for row in predict.read_rows(job["texts"])])
    assert set(seen) == {(torch.float32 if precision == "fp32" else torch.bfloat16, True)}
    assert len(seen) == 3, "20 texts, 8 at a time"


@pytest.fixture(scope="module")
def measured(predict, job, tmp_path_factory):
    """Each side once, in this process."""
    output, found = tmp_path_factory.mktemp("output"), {}
    tried = [{"precision": "fp32", "attention": "sdpa", "batch_size": 8, "ms": 1.0}]
    for side in (predict.TUNED, predict.AUTOMATIC, predict.FP32):
        asked = {"precision": "fp32"} if side == predict.FP32 else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(STARTED, repr(time.monotonic()))
            found[side] = [
                predict.measure({**job, "side": side, "tried": tried, "asked": asked, "output": str(output / side)})
            ]
    return found


def test_the_sides_give_the_same_answers(predict, measured):
    ours, theirs = (measured[side][0]["rows"] for side in (predict.FP32, predict.TUNED))
    assert len(ours) == len(theirs) == TEXTS
    for mine, other in zip(ours, theirs):
        assert (mine["text"], mine["label"]) == (other["text"], other["label"])
        assert mine["prediction"] == other["prediction"]
        assert mine["score"] == pytest.approx(other["score"], abs=1e-5)  # fp32 on both sides


def test_what_a_side_measures(predict, measured):
    for runs in measured.values():
        assert runs[0]["wall_s"] > 0
        assert len(runs[0]["passes_s"]) == 2
    assert measured[predict.FP32][0]["precision"] in ("fp32", "fp32 by oneDNN")
    assert measured[predict.AUTOMATIC][0]["attention"] == "packed"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_precision_of_a_row_is_what_is_computed(predict, job, precision):
    from automodel.engine.predict import Predictor

    predictor = Predictor(job["folder"], precision=precision)
    assert predict.computed_in(lambda: predictor.classify(["a good film"])).split()[0] == precision


def test_rows(predict, measured):
    def run(seconds: float, wall: float, wrong: int = 0):
        rows = [
            {**row, "label": "LABEL_0", "prediction": "LABEL_0", "score": 0.9}
            for row in measured[predict.FP32][0]["rows"]
        ]
        for row in rows[:wrong]:
            row |= {"prediction": "LABEL_1", "score": 0.6}
        return {**measured[predict.FP32][0], "passes_s": [seconds] * 2, "wall_s": wall, "rows": rows}

    given = {
        predict.TUNED: [run(1.0, 4.0)],
        predict.AUTOMATIC: [run(0.5, 3.0, wrong=1), run(0.4, 2.0, wrong=1), run(0.5, 2.0, wrong=1)],
        predict.FP32: [run(2.0, 5.0)],
    }
    system = {"gpu_name": "CPU", "processor": "x", "cores": 2, "torch": "2", "transformers": "5"}
    rows = predict.rows_of(given, system, {"commit": "abc", "command": "python x"})
    assert [row["provider"] for row in rows] == [predict.TUNED, predict.AUTOMATIC, predict.FP32]
    ours = rows[1]
    assert ours["ms_per_text"] == 0.5 * 1e3 / TEXTS
    assert (ours["speedup_vs_hf"], ours["speedup_vs_own_fp32"]) == (2.0, 4.0)
    assert (ours["speedup_vs_hf_wall"], ours["speedup_vs_own_fp32_wall"]) == (2.0, 2.5)
    assert (ours["accuracy"], ours["same_as_own_fp32"]) == (0.95, 0.95)
    assert ours["largest_difference"] == pytest.approx(0.3)
    wanted = "workload precision attention setup date commit torch transformers gpu processor cores threads command"
    assert set(ours) >= set(wanted.split())
    alone = predict.rows_of(
        {side: given[side] for side in (predict.AUTOMATIC, predict.FP32)}, system, {"commit": None, "command": ""}
    )
    assert alone[0]["speedup_vs_hf"] is None


@pytest.mark.slow
def test_run_measures_each_side_in_a_process_of_its_own(predict, job, tmp_path, monkeypatch):
    folder = tmp_path / "made"
    (folder / "data").mkdir(parents=True)
    for path in Path(job["folder"]).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "data" / "held_out.csv").symlink_to(job["texts"])
    command = ["run", str(folder), "--rows", str(tmp_path / "rows.json"), "--passes", "1", "--against", "none"]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    assert predict.run(predict.parse(command)) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["provider"] for row in rows] == [predict.AUTOMATIC, predict.FP32]
    assert rows[0]["speedup_vs_hf"] is None
