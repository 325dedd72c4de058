"""A run whose config has `${NAME}` in it: no file and no line of it has the value, and only the same values go on."""

import json
import stat
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.assess import assess
from automodel.engine.run import finetune
from automodel.engine.saved import open_saved
from automodel.plan.check import load_run_config

SETTINGS = (
    "step_scheduler: {max_steps: 4, log_every_steps: 1, val_every_steps: 2, ckpt_every_steps: 2}\n"
    "dataloader: {batch_size: 4}\nlr_scheduler: constant\noptimizer: {lr: '${RATE}'}\nseed: ${SEED}\n"
    "tensorboard: {}\nmlflow: {}\n"
    "wandb: {mode: disabled, notes: 'see https://me:pa55word@host/x', group: 'team-${TEAM_TOKEN}'}\n"
)
VALUES = {"SEED": "73123419", "RATE": "1.7e-3", "TEAM_TOKEN": "xyz-4711"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder's config, with data and model in folders that the environment names."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    for name in ("ALLOW_FILE_STORE", "TRACKING_URI", "HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_{name}", "set to be restored")
        monkeypatch.delenv(f"MLFLOW_{name}")
    path = tiny.write_run(tmp_path / "private-9931", text=SETTINGS)
    tree = yaml.safe_load(path.read_text())
    tree["model"] = {"pretrained_model_name_or_path": "${PLACE}/model"}
    tree["dataset"]["path"] = "${PLACE}/train.jsonl"
    tree["validation_dataset"]["path"] = "${PLACE}/test.jsonl"
    tree["checkpoint"]["checkpoint_dir"] = str(tmp_path / "out")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    for name, value in {**VALUES, "PLACE": str(tmp_path / "private-9931")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run(folder: Path, *settings: str, config: str = "run.yaml", **options) -> str:
    """What the run says."""
    with (folder / "said.txt").open("w") as file:
        finetune(load_run_config([folder / config], settings), console=Console(file=file, width=400), **options)
    return (folder / "said.txt").read_text()


def test_nothing_that_is_written_has_a_value_or_a_password(folder, capfd):
    said = run(folder)
    out, captured = folder / "out", capfd.readouterr()
    for shown in ("${PLACE}/model", "Saved the model"):
        assert shown in said
    written = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    names = {path.name for path in written}
    assert {"config.yaml", "plan.json", "state.json", "summary.json", "report.html", "config.json"} <= names
    assert any("tfevents" in name for name in names)
    assert "optimizer.lr" in names  # MLflow's parameters are files
    for secret in ("private-9931", VALUES["TEAM_TOKEN"], "pa55word"):
        found = [str(path) for path in written if secret.encode() in path.read_bytes()]
        assert found == []
        assert secret not in said + captured.out + captured.err
    kept = yaml.safe_load((out / "run" / "config.yaml").read_text())
    assert kept["seed"] == "${SEED}"
    assert kept["optimizer"]["lr"] == "${RATE}"
    assert kept["wandb"]["group"] == "team-${TEAM_TOKEN}"
    assert kept["wandb"]["notes"] == "see https://me:<hidden secret>@host/x"
    assert json.loads((out / "run" / "summary.json").read_text())["dataset"] == "${PLACE}/train.jsonl"
    assert assess(out).dataset == "${PLACE}/test.jsonl"


def test_the_record_is_for_its_owner_and_the_model_for_all(folder):
    before = (folder / "run.yaml").stat().st_mode
    run(folder, "wandb=null", "mlflow=null", "tensorboard=null")
    out = folder / "out"
    assert stat.S_IMODE((out / "run").stat().st_mode) == 0o700
    private = ["config.yaml", "plan.json", "summary.json", "report.html", "metrics.jsonl", "variables.json"]
    state = next((out / "run" / "steps").glob("step-*")) / "state.json"
    for path in [*(out / "run" / name for name in private), state]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for path in (out, out / "model.safetensors", out / "config.json", out / "tokenizer.json"):
        assert path.stat().st_mode & 0o044 == before & 0o044, path


def test_it_goes_on_and_predicts_with_the_variables_set_and_says_which_is_not(folder, monkeypatch):
    run(folder)
    kept = "out/run/config.yaml"
    longer = ["step_scheduler.max_steps=6", "wandb.notes=null"]
    with pytest.raises(UserError, match=r"wandb.notes: holds a secret, which is not kept in this file"):
        run(folder, config=kept, resume=True)
    assert "Resuming after step 4" in run(folder, *longer, config=kept, resume=True)
    assert list(tiny.losses(folder / "out")) == [1, 2, 3, 4, 5, 6]

    monkeypatch.delenv("TEAM_TOKEN")  # of a tracker, which nobody needs who asks the model
    assert open_saved(folder / "out").run.seed == int(VALUES["SEED"])
    with pytest.raises(UserError, match="wandb.group: the environment has no variable TEAM_TOKEN"):
        run(folder, *longer, config=kept, resume=True)
    monkeypatch.delenv("RATE")  # of the optimizer: a model that has moved to another machine answers without it
    assert open_saved(folder / "out").hf_config is not None
    monkeypatch.delenv("SEED")
    with pytest.raises(UserError, match="seed: the environment has no variable SEED. Set it"):
        open_saved(folder / "out")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SEED", "5", r"seed: was \$\{SEED\}, now another value of \$\{SEED\}"),
        ("RATE", "0.5", r"optimizer.lr: was \$\{RATE\}, now another value of \$\{RATE\}"),
    ],
)
def test_another_value_of_a_variable_is_another_run(folder, monkeypatch, name, value, message):
    quiet = ["wandb=null", "mlflow=null", "tensorboard=null"]
    run(folder, *quiet)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) as caught:
        run(folder, *quiet, "step_scheduler.max_steps=6", resume=True)
    assert VALUES[name] not in str(caught.value)


def test_the_same_value_typed_otherwise_is_the_same_run(folder, monkeypatch):
    quiet = ["wandb=null", "mlflow=null", "tensorboard=null"]
    run(folder, *quiet)
    monkeypatch.delenv("SEED")
    said = run(folder, *quiet, "step_scheduler.max_steps=6", f"seed={VALUES['SEED']}", resume=True)
    assert "Resuming after step 4" in said


def test_a_relative_path_of_a_variable_goes_on_from_any_folder(folder, monkeypatch):
    """The second command from there said that the data was another: `./reviews` and `reviews` are one folder."""
    quiet = ["wandb=null", "mlflow=null", "tensorboard=null"]
    tree = yaml.safe_load((folder / "run.yaml").read_text())
    tree["dataset"] = {**tree["dataset"], "path": None, "mixture": [{"path": "${PLACE}/train.jsonl"}]}
    tree["checkpoint"]["checkpoint_dir"] = "out"
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setenv("PLACE", "./private-9931")
    monkeypatch.chdir(folder)
    run(folder, *quiet)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    for steps, where in ((6, "elsewhere"), (8, "elsewhere"), (10, ".")):
        monkeypatch.chdir(folder / where)
        longer = f"step_scheduler.max_steps={steps}"
        said = run(folder, *quiet, longer, config="out/run/config.yaml", resume=True)
        assert f"Resuming after step {steps - 2}" in said
