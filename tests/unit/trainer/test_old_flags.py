"""Old names of Trainer's flags on the command line of an `HfArgumentParser` mean what they mean in Python; flags of the
script's own keep their meaning, whatever Trainer once called so."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, fields

import pytest

from automodel.config.errors import UserError
from automodel.migrate.old_names import OLD_NAMES
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.stand_in import stand_in

BASE = ["--output_dir", "x", "--report_to", "none"]
PYTHON = {"output_dir": "x", "report_to": "none"}

SAME = {
    "--evaluation_strategy epoch": {"eval_strategy": "epoch"},
    "--per_gpu_train_batch_size 3": {"per_device_train_batch_size": 3},
    "--per-gpu-eval-batch-size=3": {"per_device_eval_batch_size": 3},
    "--no_cuda": {"use_cpu": True},
    "--no-cuda True": {"use_cpu": True},
    "--push_to_hub_token abc": {"hub_token": "abc"},
    "--push_to_hub_model_id a/b": {"hub_model_id": "a/b"},
    "--torchdynamo inductor": {"torch_compile_backend": "inductor"},
    "--include_tokens_per_second": {"include_num_input_tokens_seen": True},
    "--overwrite_output_dir": {},
    "--overwrite-output-dir false": {},
    "--fp16_opt_level O2": {},
    "--use_mps_device False": {},
    "--tpu_num_cores 8": {},
    "--ray_scope last": {},
    "--use_ipex False": {},
    "--jit_mode_eval=false": {},
    "--use_legacy_prediction_loop no": {},
    "--tpu_metrics_debug 0": {},
    "--group_by_length": {"train_sampling_strategy": "group_by_length"},
    "--group_by_length=False": {},
    "--warmup_ratio 0.1": {"warmup_steps": 0.1},
    "--warmup_ratio=1.0": {"warmup_steps": 1 - 2**-53},
    "--warmup_ratio 0.1 --warmup_steps 7": {"warmup_steps": 7},
    "--warmup-steps 7 --warmup-ratio 0.1": {"warmup_steps": 7},
    "--adafactor": {"optim": "adafactor"},
    "--adafactor --optim adafactor": {"optim": "adafactor"},
    "--logging_dir logs": {},
    "--logging-dir=logs": {},
    "--save_safetensors True": {},
    "--save_safetensors": {},
    "--fp16_backend auto": {},
    "--half_precision_backend auto": {},
    "--half_precision_backend apex": {},
    "--past_index -1": {},
    "--past-index=-1": {},
    "--include_inputs_for_metrics": {"include_for_metrics": ["inputs"]},
    "--include_inputs_for_metrics --include_for_metrics loss": {"include_for_metrics": ["inputs", "loss"]},
    "--dispatch_batches False": {"accelerator_config": {"dispatch_batches": False}},
    "--split_batches True": {"accelerator_config": {"split_batches": True}},
    "--split_batches --dispatch_batches no": {"accelerator_config": {"split_batches": True, "dispatch_batches": False}},
    '--accelerator_config {"even_batches":false} --split_batches': {
        "accelerator_config": {"split_batches": True, "even_batches": False}
    },
}

REFUSED = {
    "--use_ipex": {"use_ipex": True},
    "--jit-mode-eval": {"jit_mode_eval": True},
    "--sharded_ddp simple": {"sharded_ddp": "simple"},
    "--sharded_ddp": {"sharded_ddp": True},
    "--mp_parameters a=1": {"mp_parameters": "a=1"},
    "--use_legacy_prediction_loop=True": {"use_legacy_prediction_loop": True},
    "--tpu_metrics_debug": {"tpu_metrics_debug": True},
    "--push_to_hub_organization us": {"push_to_hub_organization": "us"},
    "--save_safetensors False": {"save_safetensors": False},
    "--no_save_safetensors": {"save_safetensors": False},
    "--no-save-safetensors": {"save_safetensors": False},
    "--past_index 2": {"past_index": 2},
    "--fp16_backend tpu": {"fp16_backend": "tpu"},
    "--warmup_ratio 2": {"warmup_ratio": 2.0},
    "--evaluation_strategy steps --eval_strategy no": {"evaluation_strategy": "steps", "eval_strategy": "no"},
}


@dataclass
class Mine:
    overwrite_output_dir: bool = False
    group_by_length: bool = False
    warmup_ratio: float = 0.0
    no_cuda: bool = False
    logging_dir: str | None = None
    use_ipex: bool = False


@dataclass
class Data:
    cuda: bool = True
    texts: list[str] = field(default_factory=list)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "unset")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["t.py"])


def parse(*kinds, flags, **options):
    with stand_in(trainer=False):
        from transformers import HfArgumentParser

        return HfArgumentParser(kinds).parse_args_into_dataclasses(flags, **options)


def values(args) -> dict:
    """What can be compared; a few are made from others when they are asked for."""
    kept = {f.name: getattr(args, f.name) for f in fields(args)}
    return kept | {"accelerator_config": args.accelerator_config.to_dict(), "local_rank": None}


@pytest.mark.parametrize("old", SAME)
def test_an_old_flag_means_what_its_name_means_in_python(old, capsys):
    (args,) = parse(TrainingArguments, flags=[*BASE, *old.split()])
    assert values(args) == values(TrainingArguments(**{**PYTHON, **SAME[old]}))
    assert os.environ.get("TENSORBOARD_LOGGING_DIR") == ("logs" if "logging" in old else None)


@pytest.mark.parametrize("old", REFUSED)
def test_what_python_refuses_is_refused_with_the_same_reason(old):
    with pytest.raises(UserError) as here:
        parse(TrainingArguments, flags=[*BASE, *old.split()])
    with pytest.raises(UserError) as there:
        TrainingArguments(**{**PYTHON, **REFUSED[old]})
    assert str(here.value) == str(there.value)


def test_every_old_name_is_tried():
    tried = " ".join([*SAME, *REFUSED, "--xpu_backend"]).replace("=", " ").replace("-", "_").split()
    assert {f"__{name}" for name in OLD_NAMES} <= set(tried)


def test_what_was_translated_is_said_and_nothing_else(capsys):
    parse(TrainingArguments, flags=[*BASE, "--overwrite_output_dir", "--adafactor", "--past_index", "-1"])
    said = capsys.readouterr().err
    assert said.count("automodel: TrainingArguments: ") == 2
    assert "overwrite_output_dir has no effect" in said
    assert "adafactor=True is now optim='adafactor'" in said
    parse(TrainingArguments, flags=BASE)
    assert "automodel" not in capsys.readouterr().err


def test_flags_of_the_scripts_own_keep_their_meaning(capsys):
    own = "--overwrite_output_dir --group_by_length --warmup_ratio 0.5 --no-cuda --logging_dir there --use_ipex"
    mine, args = parse(Mine, TrainingArguments, flags=[*own.split(), *BASE, "--adafactor"])
    assert mine == Mine(True, True, 0.5, True, "there", True)
    assert values(args) == values(TrainingArguments(**PYTHON, optim="adafactor"))
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ
    assert "overwrite_output_dir" not in capsys.readouterr().err


def test_flags_that_a_parser_has_for_other_reasons_are_its_own():
    data, args = parse(Data, TrainingArguments, flags=["--no_cuda", "--output_dir", "x", "--report_to", "none"])
    assert data.cuda is False
    assert args.use_cpu is False
    with stand_in(trainer=False):
        from transformers import HfArgumentParser

        parser = HfArgumentParser(TrainingArguments)
        parser.add_argument("--past_index", type=int)
        parser.add_argument("file", nargs="*")
        args, rest = parser.parse_args_into_dataclasses([*BASE, "--past_index", "3", "--adafactor", "--", "--no_cuda"])
    assert (rest.past_index, rest.file, args.optim) == (3, ["--no_cuda"], "adafactor")


def test_a_backend_of_several_processes_alone():
    from automodel.trainer.old_flags import ArgumentParser, modern_flags

    parser = ArgumentParser(TrainingArguments)
    assert modern_flags(["--xpu_backend", "gloo", *BASE], parser) == [*BASE, "--ddp_backend=gloo"]


def test_other_flags_come_through_as_they_were():
    data, args, rest = parse(
        Data, TrainingArguments, return_remaining_strings=True,
        flags=["--texts", "a", "-1", "--adafactor", "--who", "knows", *BASE, "--fp16_opt_level=O1", "--run_name=--a=b"],
    )  # fmt: skip
    assert data.texts == ["a", "-1"]
    assert args.run_name == "--a=b"
    assert rest == ["--who", "knows"]


def test_a_wrong_value_is_the_parsers_own_error(capsys):
    for wrong in ("--warmup_ratio many", "--logging_dir", "--adafactor perhaps"):
        with pytest.raises(SystemExit) as ending:
            parse(Data, TrainingArguments, flags=[*BASE, *wrong.split()])
        said = capsys.readouterr().err
        assert ending.value.code == 2
        assert wrong.split()[0] in said
        assert "--texts" in said  # the usage of the script


def test_a_parser_without_training_arguments_is_transformers_own():
    with pytest.raises(ValueError, match="not used by the HfArgumentParser"):
        parse(Data, flags=["--adafactor"])
    assert parse(Data, flags=["--texts", "a", "b"]) == (Data(texts=["a", "b"]),)
    assert parse(Mine, flags=["--no_cuda"]) == (Mine(no_cuda=True),)


def test_old_flags_in_files(tmp_path):
    (tmp_path / "t.args").write_text("--adafactor --warmup_ratio 0.2")
    (args,) = parse(TrainingArguments, flags=BASE)
    assert (args.optim, args.warmup_steps) == ("adafactor", 0.2)
    written = {**PYTHON, "evaluation_strategy": "epoch", "no_cuda": True, "warmup_ratio": 0.3}
    (tmp_path / "args.json").write_text(json.dumps(written))
    with stand_in(trainer=False):
        from transformers import HfArgumentParser

        (args,) = HfArgumentParser(TrainingArguments).parse_json_file("args.json")
        mine, own = HfArgumentParser((Mine, TrainingArguments)).parse_dict({**PYTHON, "no_cuda": True, "adafactor": 1})
        with pytest.raises(ValueError, match="nonsense"):
            HfArgumentParser(TrainingArguments).parse_dict({**PYTHON, "nonsense": 1, "adafactor": True})
    assert (args.eval_strategy, args.warmup_steps) == ("epoch", 0.3)
    assert (mine, own.optim) == (Mine(no_cuda=True), "adafactor")


def test_configs_given_as_a_file_or_as_text(tmp_path):
    (tmp_path / "config.json").write_text('{"even_batches": false}')
    with pytest.raises(UserError, match="no JSON"):
        TrainingArguments(**PYTHON, accelerator_config="none.json", split_batches=True)
    for config in ("config.json", '{"even_batches": false}'):
        args = TrainingArguments(**PYTHON, accelerator_config=config, split_batches=True)
        assert args.accelerator_config.even_batches is False
        assert args.accelerator_config.split_batches is True
