"""The output of a run in a file, line by line: nothing is silent, and the log lines are the reference's."""

import re

import tiny_runs as tiny

LINE = re.compile(
    r"\[Step (\d+)/24\] Loss: \d\.\d{3} \| LR: \d\.\de-\d \| Host Mem: \d+\.\dGB \| Speed: [\d.]+ steps/sec"
)


def test_in_a_file(tmp_path):
    path = tiny.write_run(tmp_path, rows=96, text="dataloader: {batch_size: 8}\nstep_scheduler: {num_epochs: 2}\n")
    shorter = ("step_scheduler.log_every_steps=8", "dataset.max_length=14")
    done = tiny.automodel("finetune", "llm", "-c", path, *shorter, AUTOMODEL_CACHE=str(tmp_path / "cache"))
    lines = done.stdout.splitlines()
    order = [
        "[INFO] Importing torch and transformers …",
        "[INFO] Reading the model and the data …",
        "Plan:",
        "How it is done:",
        "[INFO] Loading the weights …",
        "[INFO] Launching job locally on 1 device",
    ]
    places = [lines.index(line) for line in order]
    assert places == sorted(places)
    assert places[0] == 0
    asked, how = lines[places[2] + 1 : places[3]], lines[places[3] + 1 : places[4]]
    names = [line.split("  ")[0] for line in asked]
    assert [name for name in names if name in ("data", "cut", "batch", "steps", "memory", "time")] == [
        *("data", "cut", "cut", "batch", "steps", "memory", "time"),
    ]
    assert {"padding", "workers"} <= {line.split("  ")[0] for line in how}
    steps = [LINE.fullmatch(line) for line in lines if line.startswith("[Step") and "Validation" not in line]
    assert [step and step[1] for step in steps] == ["8", "16", "24"]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_plan_that_is_read_by_a_program_is_json_alone(tmp_path):
    import json

    path = tiny.write_run(tmp_path)
    done = tiny.automodel("plan", "-c", path, "--json", AUTOMODEL_CACHE=str(tmp_path / "cache"))
    decisions = json.loads(done.stdout)["decisions"]
    parts = [decision["asked"] for decision in decisions]
    assert parts == sorted(parts, reverse=True)
    assert {True, False} == set(parts)
