"""What `train()` refuses before its first step: nothing to train on, and a metric that no evaluation will have."""

from __future__ import annotations

import sys

import pytest
import transformers
from datasets import Dataset

from automodel import SFTConfig, SFTTrainer, Trainer, TrainingArguments
from automodel.config.errors import UserError
from tiny_models import tiny
from tiny_runs import make_tokenizer

ROWS = [{"input_ids": [5 + n, 6, 7], "attention_mask": [1, 1, 1], "labels": n % 2} for n in range(8)]
SETTINGS = {
    "max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
    "eval_strategy": "steps", "eval_steps": 1, "per_device_train_batch_size": 4,
}  # fmt: skip


def trainer(tmp_path, kind=Trainer, metric="accuracy", evaluated=None, train=True, **given):
    model = tiny("bert", "text-classification", num_labels=2)[1]
    data = Dataset.from_list(ROWS)
    return kind(
        model,
        TrainingArguments(str(tmp_path), metric_for_best_model=metric, **SETTINGS),
        train_dataset=data if train else None,
        eval_dataset=data if evaluated is None else evaluated,
        **given,
    )


def parts():
    return {"near": Dataset.from_list(ROWS), "far": Dataset.from_list(ROWS)}


def refused(made):
    with pytest.raises(ValueError) as caught:
        made.train()
    assert isinstance(caught.value, UserError)
    assert made.state.global_step == 0
    assert made.acceleration is None, "no step was prepared"
    return str(caught.value)


def test_nothing_to_train_on(tmp_path):
    made = trainer(tmp_path, metric=None, train=False)
    assert refused(made) == "Trainer: there is nothing to train on; give the constructor a train_dataset."
    assert made.evaluate()["eval_loss"] > 0


def test_a_metric_that_needs_a_function(tmp_path):
    assert refused(trainer(tmp_path)) == (
        "metric_for_best_model='accuracy': no evaluation will have eval_accuracy, since there is no compute_metrics. "
        "There will be eval_loss, eval_runtime, eval_samples_per_second, eval_steps_per_second. Name one of those, or "
        "give compute_metrics."
    )


@pytest.mark.parametrize("metric", ["loss", "eval_loss", "eval_runtime", None])
def test_metrics_that_there_will_be(tmp_path, metric):
    made = trainer(tmp_path, metric=metric)
    made.train()
    assert made.state.global_step == 2


@pytest.mark.parametrize("metric", ["near_loss", "eval_far_loss"])
def test_metrics_of_parts(tmp_path, metric):
    trainer(tmp_path, metric=metric, evaluated=parts()).train()


@pytest.mark.parametrize("given", [{}, {"compute_metrics": lambda found: {"accuracy": 1.0}}])
@pytest.mark.parametrize("metric", ["loss", "eval_accuracy"])
def test_metrics_of_parts_without_the_name_of_a_part(tmp_path, metric, given):
    said = refused(trainer(tmp_path, metric=metric, evaluated=parts(), **given))
    assert "eval_dataset has several parts, so metrics carry their names: eval_near_loss, " in said


def test_rows_without_labels_have_no_loss(tmp_path):
    unlabelled = Dataset.from_list([{"input_ids": [5, 6], "attention_mask": [1, 1]}] * 4)
    said = refused(trainer(tmp_path, metric="loss", evaluated=unlabelled))
    assert said.startswith(
        "metric_for_best_model='loss': eval_dataset has no labels, so no evaluation will have eval_loss."
    )


class Measures(transformers.TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_accuracy"] = 0.5


class Evaluates(Trainer):
    def evaluate(self, *args, **given):
        return super().evaluate(*args, **given) | {"eval_accuracy": 0.5}


def test_metrics_that_code_of_the_script_makes(tmp_path):
    trainer(tmp_path, compute_metrics=lambda found: {"accuracy": 0.5}).train()
    trainer(tmp_path, callbacks=[Measures()]).train()
    trainer(tmp_path, kind=Evaluates).train()


def sft(tmp_path, rows=None, config=None, **given):
    config = {name: value for name, value in SETTINGS.items() if name != "eval_strategy"} | (config or {})
    data = Dataset.from_list(rows or [{"text": "the plot was good"}] * 8)
    settings = {"train_dataset": data, "eval_dataset": data, "processing_class": make_tokenizer(decoder=True)} | given
    model = settings.pop("model", None) or tiny("llama", "causal-lm", pad_token_id=0)[1]
    return SFTTrainer(model, SFTConfig(str(tmp_path), **config), **settings)


def test_metrics_of_supervised_tuning(tmp_path):
    evaluates = {"eval_strategy": "steps", "metric_for_best_model": "entropy"}
    made = sft(
        tmp_path, config={**evaluates, "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}
    )
    made.train()
    assert made.state.best_metric > 0
    assert "eval_mean_token_accuracy" in refused(sft(tmp_path, config={**evaluates, "metric_for_best_model": "rouge"}))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"train_dataset": None}, ValueError, "nothing to train on; give train_dataset"),
        ({"train_dataset": ["the plot"]}, TypeError, "the training dataset is a list; give a datasets.Dataset"),
        ({"processing_class": "bert"}, TypeError, "processing_class=…) is a str; give the tokenizer"),
        ({"peft_config": {"r": 8}}, TypeError, "peft_config=…) is a dict"),
        ({"config": {"packing": True}, "data_collator": print}, ValueError, "with packing_strategy='bfd' rows hold"),
        ({"config": {"padding_free": True, "max_length": None}, "data_collator": print}, ValueError, "padding_free"),
        ({"config": {"padding_free": True}}, ValueError, "max_length=1024 and without packing"),
        ({"rows": [{"text": "a", "image": "b"}]}, ValueError, "has the column `image`"),
        ({"config": {"completion_only_loss": True}, "formatting_func": str}, ValueError, "completion_only_loss"),
        ({"config": {"eos_token": "nope"}}, ValueError, "the tokenizer has no such token"),
        ({"config": {"router_aux_loss_coef": 0.1}}, ValueError, "has no loss of a router"),
    ],
)  # fmt: skip
def test_errors_that_callers_of_trl_expect(tmp_path, options, error, said):
    """The class of the error is TRL's, and its text is ours."""
    trl = pytest.importorskip("trl")
    with pytest.raises(error) as caught:
        sft(tmp_path, **options)
    assert said in str(caught.value)
    assert isinstance(caught.value, UserError)
    given = {"train_dataset": Dataset.from_list(options.get("rows") or [{"text": "the plot was good"}] * 8)} | options
    config = given.pop("config", {})
    given.pop("rows", None)
    given.setdefault("processing_class", make_tokenizer(decoder=True))
    with pytest.raises(error):
        trl.SFTTrainer(
            tiny("llama", "causal-lm", pad_token_id=0)[1],
            trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=False, **config),
            **given,
        )
    assert "trl" in sys.modules


def test_a_quantisation_that_is_given_twice(tmp_path):
    model = tiny("llama", "causal-lm", pad_token_id=0)[1]
    model.save_pretrained(tmp_path / "model")
    config = {"model_init_kwargs": {"quantization_config": object()}}
    with pytest.raises(ValueError, match="quantization_config is given twice"):
        sft(tmp_path, model=str(tmp_path / "model"), config=config, quantization_config=object())
