"""What `--resume` says of a config that is not the run's."""

from __future__ import annotations

import json

import pytest
import yaml

from automodel.config.dump import dump_config
from automodel.config.errors import UserError
from automodel.config.load import load_config
from automodel.engine.folder import RunFolder
from automodel.engine.same_run import best_so_far, changes_of_course, check_same_base, check_same_run, given_since
from automodel.engine.state import Best
from automodel.plan.config import RunConfig


@pytest.fixture
def resumed(tmp_path):
    """The config of a run with other settings, and the run's folder."""
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndataset: d.csv\ntask: text-classification\nstep_scheduler: {max_steps: 10}\n")
    folder = RunFolder(tmp_path / "out")
    folder.config.parent.mkdir(parents=True)
    folder.config.write_text(dump_config(load_config(RunConfig, [file])))
    return lambda *settings: (load_config(RunConfig, [file], settings), folder)


def test_only_what_differs_is_named(resumed):
    check_same_run(*resumed("step_scheduler.log_every_steps=3"))
    with pytest.raises(UserError) as caught:
        check_same_run(*resumed("optimizer.lr=1e-3", "peft.dim=4", "seed=7"))
    lines = str(caught.value).split("\n")
    assert "  optimizer.lr: was 5e-05, now 0.001" in lines
    assert "  seed: was 42, now 7" in lines
    assert "  peft.dim: was not set, now 4" in lines
    assert not any("weight_decay" in line for line in lines)


def test_keys_that_earlier_versions_left_unread_may_go(resumed):
    """They are refused now, and whoever removes them goes on with the same run; so it is with defaults written down."""
    now, folder = resumed()
    begun = yaml.safe_load(folder.config.read_text())
    begun["dataset"] |= {"max_target_length": 64, "source_prefix": "", "answer_only_loss": True}
    folder.config.write_text(yaml.safe_dump(begun))
    with pytest.raises(UserError, match=r"dataset\.max_target_length: was 64, now 128"):
        check_same_run(now, folder)  # nobody knows the task
    folder.write_json("plan.json", {"task": "text-classification"})
    check_same_run(now, folder)
    begun["dataset"]["text_column"] = "body"
    folder.config.write_text(yaml.safe_dump(begun))
    with pytest.raises(UserError, match=r"dataset\.text_column: was body, now not set"):
        check_same_run(now, folder)


def test_a_dropout_of_0_is_the_default_of_a_new_adapter_only(resumed):
    now, folder = resumed("peft={dim: 4}")
    folder.config.write_text(dump_config(now).replace("peft:\n", "peft:\n  dropout: 0.0\n"))  # as earlier versions
    check_same_run(now, folder)
    check_same_run(*resumed("peft={dim: 4, dropout: 0}"))
    now, _ = resumed("peft={pretrained_adapter: a}")
    folder.config.write_text(dump_config(now))
    zero, _ = resumed("peft={pretrained_adapter: a, dropout: 0}")
    check_same_run(zero, folder)  # of an earlier version, which did not hear it
    folder.write_json("adapter.json", {})
    check_same_run(now, folder)
    with pytest.raises(UserError, match=r"peft\.dropout: was not set, now 0\.0"):
        check_same_run(zero, folder)


def test_model_and_data_may_lie_elsewhere_where_they_are_the_same(resumed):
    check_same_run(*resumed("model=/data/m", "dataset=/data/d.csv"))
    check_same_base("tensors-a", "tensors-a", *resumed("model=/data/m"))
    check_same_base("tensors-a", "tensors-b", *resumed())  # a checkpoint has all weights
    check_same_base("a", "tensors-b", *resumed("peft={dim: 4}"))  # as earlier versions told it
    check_same_base(None, None, *resumed("peft={dim: 4}"))  # not safetensors, or an early checkpoint
    for before, now, said in (
        ("tensors-a", "tensors-b", "these are other weights"),
        (None, "tensors-b", "they may be other weights"),
    ):
        with pytest.raises(UserError, match=rf"pretrained_model_name_or_path was m, now /data/m, and {said}"):
            check_same_base(before, now, *resumed("model=/data/m"))
    with pytest.raises(UserError, match="the weights of 'm' were replaced since"):
        check_same_base("tensors-a", "tensors-b", *resumed("peft={dim: 4}"))


def test_what_bends_the_curves_is_said(resumed):
    assert changes_of_course(*resumed("step_scheduler.log_every_steps=3", "step_scheduler.val_every_steps=2")) == []
    assert changes_of_course(*resumed("step_scheduler.max_steps=20", "lr_scheduler.name=cosine")) == [
        "step_scheduler.max_steps was 10 so far, now 20; the learning rate goes on as in a run of that length.",
        "lr_scheduler.name was linear so far, now cosine.",
    ]


def test_the_best_is_looked_for_anew_where_it_is_measured_otherwise(resumed):
    before, by_loss = Best("loss", "min", value=0.5, step=4, stale=2), Best("loss", "min", min_delta=0.1)
    kept, notes = best_so_far(before, by_loss, *resumed(), None)
    assert (kept, notes) == (Best("loss", "min", 0.1, 0.5, 4, 2), [])
    best, notes = best_so_far(before, Best("accuracy", "max"), *resumed("checkpoint.best_metric=accuracy"), True)
    assert best == Best("accuracy", "max")
    assert notes[0].startswith("The best evaluation was the one of the minimal loss so far; from here on the best one")
    best, notes = best_so_far(before, by_loss, *resumed("validation_dataset.path=other.csv"), None)
    assert best == by_loss
    assert notes[0].startswith("validation_dataset.path was not set so far, now other.csv; from here on")
    assert best_so_far(Best("loss", "min"), Best("accuracy", "max"), *resumed(), None)[1] == []


def test_the_best_stays_by_its_metric_where_none_is_named_any_more(resumed):
    """As after `early_stopping=null`, which named it: what the tool itself advises must not cost the best."""
    before = Best("accuracy", "max", value=0.9, step=4, stale=3)
    assert best_so_far(before, Best("loss", "min"), *resumed(), None) == (before, [])
    asked = resumed("checkpoint.best_metric=loss")
    assert best_so_far(before, Best("loss", "min"), *asked, True)[0] == Best("loss", "min")


def test_the_best_stays_where_the_same_data_lie_elsewhere_and_not_where_a_file_was_replaced(resumed):
    before, by_loss = Best("loss", "min", value=0.5, step=4, stale=2), Best("loss", "min")
    assert best_so_far(before, by_loss, *resumed("validation_dataset.path=/new/v.csv"), True) == (before, [])
    best, notes = best_so_far(before, by_loss, *resumed(), False)
    assert best == by_loss
    assert notes[0].startswith("validation_dataset has other samples than so far; from here on")


def test_a_finished_run_is_done_only_for_its_own_config(resumed, capsys):
    """--resume-or-start: another learning rate into the same folder was "nothing to do", exit code 0; so was a longer
    run."""
    from automodel.cli.finetune import _is_done

    def done(*settings: str) -> bool:
        cfg, folder = resumed(f"checkpoint.checkpoint_dir={resumed()[1].root}", *settings)
        folder.write_json("summary.json", {"status": "finished", "steps": 10})
        folder.write_json("exported.json", ["model.safetensors"])
        return _is_done(cfg)

    assert done("step_scheduler.log_every_steps=3")
    assert "is finished (10 steps); nothing to do." in capsys.readouterr().out
    assert not done("step_scheduler.max_steps=20")
    assert not done("dataset=/data/other.csv")  # the same data elsewhere, or others: what goes on reads them and knows
    assert not done("model=/data/other")
    with pytest.raises(UserError, match="the config differs"):
        done("optimizer.lr=1e-3")
    (resumed()[1].root / "model.safetensors").write_bytes(b"what a power cut left")
    assert not done()


def test_numbers_that_older_versions_wrote_out_are_those_that_are_left_open_now(resumed):
    """`betas`, `eps` and `weight_decay` stood in every run/config.yaml, given or not."""

    def recorded(**section) -> None:
        before = yaml.safe_load(dump_config(resumed()[0]))
        before["optimizer"] = {"lr": 5e-5, "decay_norms_and_biases": False, **section}
        resumed()[1].config.write_text(yaml.safe_dump(before))

    adam = {"weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
    recorded(name="adamw", **adam)
    check_same_run(*resumed())
    check_same_run(*resumed("optimizer.eps=1e-8", "optimizer.betas=[0.9, 0.999]", "optimizer.weight_decay=0"))
    with pytest.raises(UserError, match=r"optimizer.eps: was 1e-08, now 1e-06"):
        check_same_run(*resumed("optimizer.eps=1e-6"))
    recorded(_target_="torch.optim.NAdam", **adam)
    check_same_run(*resumed("optimizer._target_=torch.optim.NAdam"))
    recorded(_target_="torch.optim.AdamW", **adam)
    with pytest.raises(UserError) as caught:
        check_same_run(*resumed("optimizer._target_=torch.optim.AdamW"))
    assert "\n  optimizer.weight_decay: was 0.0, now 0.01\nEarlier versions had no weight decay" in str(caught.value)
    assert "To go on as before, add optimizer.weight_decay=0.\nUse " in str(caught.value)
    check_same_run(*resumed("optimizer._target_=torch.optim.AdamW", "optimizer.weight_decay=0"))
    with pytest.raises(UserError) as caught:  # somebody asks for it; no default did that
        check_same_run(*resumed("optimizer._target_=torch.optim.AdamW", "optimizer.weight_decay=0.1"))
    assert "Earlier versions" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "own"),
    [
        ({"name": "adagrad"}, "1e-10"),
        ({"_target_": "torch.optim.Adagrad"}, "1e-10"),
        ({"_target_": "torch.optim.Adadelta"}, "1e-06"),
        ({"_target_": "torch.optim.Adafactor"}, "[None, 0.001]"),
    ],
)
def test_numbers_of_adam_that_older_versions_wrote_beside_another_class_were_not_used(resumed, section, own):
    """They were refused ("eps: was 1e-08, now 1e-10"), and the advice, to use the run's own config, changed the run."""
    (_, folder), ((key, name),) = resumed(), section.items()
    before = yaml.safe_load(dump_config(resumed()[0]))

    def recorded(**numbers) -> None:
        before["optimizer"] = {**section, "lr": 5e-5, "decay_norms_and_biases": False, **numbers}
        folder.config.write_text(yaml.safe_dump(before))

    recorded(weight_decay=0.0, betas=[0.9, 0.999], eps=1e-8)
    as_begun = resumed(f"optimizer.{key}={name}")
    check_same_run(*as_begun)
    assert changes_of_course(*as_begun) == []
    # It may be of this version, too, with every number given: then it is used, and what it may change is said.
    written_out = resumed(f"optimizer.{key}={name}", "optimizer.weight_decay=0", "optimizer.eps=1e-8")
    check_same_run(*written_out)
    (note,) = changes_of_course(*written_out)
    assert f"a run of theirs had {own} so far, and goes on with it by optimizer.eps=null." in note
    check_same_run(*resumed(f"optimizer.{key}={name}", "optimizer.weight_decay=0", "optimizer.eps=null"))
    with pytest.raises(UserError, match=r"optimizer.eps: was 1e-08, now 0.0001\n"):
        check_same_run(*resumed(f"optimizer.{key}={name}", "optimizer.eps=1e-4"))
    # Without a weight decay it is of this version: older ones always wrote one. What stands there was given and used.
    recorded(eps=1e-8)
    check_same_run(*resumed(f"optimizer.{key}={name}", "optimizer.eps=1e-8"))
    assert changes_of_course(*resumed(f"optimizer.{key}={name}", "optimizer.eps=1e-8")) == []
    with pytest.raises(UserError, match=r"optimizer.eps: was 1e-08, now "):
        check_same_run(*as_begun)


def a_checkpoint(folder: RunFolder, step: int, state: str) -> None:
    place = folder.steps / f"step-{step:08d}"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    (place / "state.json").write_text(state)


@pytest.mark.parametrize("damage", [b"", b"model: {a: [1", b"nonsense\n", b"- 1\n", b"\xff\xfe", None])
def test_a_damaged_config_is_taken_from_the_last_checkpoint(resumed, damage):
    """The run was refused with a list of nonsense or a traceback, though its checkpoints were whole."""
    cfg, folder = resumed()
    text = folder.config.read_text()
    if damage is None:
        folder.config.unlink()
    else:
        folder.config.write_bytes(damage)
    (folder.run / "metrics.jsonl").touch()
    a_checkpoint(folder, 2, json.dumps({}))  # of a first version, that kept none
    with pytest.raises(UserError, match=r"config.yaml is missing or damaged, and no checkpoint has a copy"):
        check_same_run(cfg, folder)
    a_checkpoint(folder, 4, json.dumps({"config": text}))
    a_checkpoint(folder, 6, "")
    check_same_run(cfg, folder)
    with pytest.raises(UserError, match=r"--resume: the config differs .*\n  seed: was 42, now 7\n"):
        check_same_run(*resumed("seed=7"))
    (note,) = changes_of_course(cfg, folder)
    known = "what it said is known from a checkpoint. It is written anew."
    assert note == f"{folder.config} is missing or damaged; {known}"


def test_what_is_given_anew_can_be_given_once_more(resumed):
    """Each setting as the command line takes it: over the run's own config they make the config of now."""
    given = [
        "step_scheduler.max_steps=32",
        "checkpoint.checkpoint_dir=another place",
        "model=/data/m",
        "early_stopping={patience: 3}",
        "wandb={project: '7', tags: [a, b]}",
        "lr_scheduler={name: cosine, warmup_steps: 2}",
    ]
    now, folder = resumed(*given)
    settings = given_since(now, folder)
    assert "step_scheduler.max_steps=32" in settings
    assert "model.pretrained_model_name_or_path=/data/m" in settings
    assert load_config(RunConfig, [folder.config], settings) == now
    folder.config.write_text(dump_config(now))
    begun, _ = resumed()
    settings = given_since(begun, folder)
    assert "early_stopping=null" in settings
    assert load_config(RunConfig, [folder.config], settings) == begun
    assert given_since(now, folder) == []
    assert given_since(resumed(*given, "step_scheduler.global_batch_size=8")[0], folder) == []  # said beside them
