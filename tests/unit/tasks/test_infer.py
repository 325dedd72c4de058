"""Which task a run means, and whether a model can do it."""

from __future__ import annotations

import pytest
from transformers import GPT2Config

import tiny_models
from automodel.config.errors import UserError
from automodel.models.config import ModelConfig
from automodel.tasks.infer import infer_task, load_config, tasks_of
from automodel.tasks.registry import CAUSAL_LM, TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION, task_named

TEXT = "text-classification"


def cfg(name, **fields) -> ModelConfig:
    return ModelConfig(pretrained_model_name_or_path=str(name), **fields)


@pytest.mark.parametrize(("kind", "task"), [("gpt2", "causal-lm"), ("t5", "seq2seq"), ("bert", "token-classification")])
def test_a_problem_type_means_nothing_for_other_tasks(tmp_path, kind, task):
    """It was accepted, and nothing came of it."""
    tiny_models.tiny(kind, task)[1].save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"model\.problem_type: regression means nothing for {task}; remove it"):
        load_config(cfg(tmp_path, problem_type="regression"), task_named(task))
    # What the data has is not asked for.
    load_config(cfg(tmp_path), task_named(task), problem_type="single_label_classification")


def test_num_labels_means_nothing_for_a_language_model(tmp_path):
    tiny_models.tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.num_labels: 2 means nothing for causal-lm"):
        load_config(cfg(tmp_path, num_labels=2), CAUSAL_LM)


@pytest.mark.parametrize(
    ("kind", "task", "can"),
    [
        ("t5", "causal-lm", "text-classification, token-classification, seq2seq"),
        ("bart", "causal-lm", "text-classification, seq2seq"),
        ("bert", "causal-lm", "text-classification, token-classification"),
        ("llama", "seq2seq", "text-classification, token-classification, causal-lm"),
    ],
)
def test_a_task_the_model_cannot_do_names_those_it_can(tmp_path, kind, task, can):
    tiny_models.tiny_config(kind).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{kind} model, which cannot do {task}; it can do {can}"):
        load_config(cfg(tmp_path), task_named(task))


@pytest.mark.parametrize(
    ("target", "dataset", "architecture", "task"),
    [
        ("nemo_automodel.NeMoAutoModelForSequenceClassification.from_pretrained", None, None, TEXT),
        ("automodel.AutoModelForCausalLM.from_config", "x.TextClassificationDataset", None, "causal-lm"),
        (
            None,
            "nemo_automodel.components.datasets.llm.text_classification.TextClassificationDataset",
            "X",
            TEXT,
        ),
        (None, "nemo_automodel.components.datasets.llm.squad.make_squad_dataset", "BertForMaskedLM", "causal-lm"),
        (None, None, "T5ForConditionalGeneration", "seq2seq"),
        (None, None, "GPT2LMHeadModel", "causal-lm"),
        (None, None, "BertForTokenClassification", "token-classification"),
        (None, None, "BertForMaskedLM", None),
        (None, None, None, None),
    ],
)
def test_the_task_is_read_from_names(target, dataset, architecture, task):
    config = GPT2Config(architectures=[architecture] if architecture else None)
    assert infer_task(cfg("m", target=target), dataset, config) == (task and task_named(task))


def test_tasks_of_a_decoder():
    assert tasks_of(tiny_models.tiny_config("qwen2")) == (
        TEXT_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        CAUSAL_LM,
    )
