"""Which tasks a model can do, and which task a run means when it does not say.

The answers come from names: of the `_target_` class, of the dataset class, of the architecture in the model's config,
and from transformers' own tables of which model type has a class for which task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from automodel.config.errors import UserError
from automodel.models.config import ModelConfig, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TASKS: tuple[Task, ...] = ("text-classification", "token-classification", "causal-lm", "seq2seq")

_TASK_OF_CLASS: tuple[tuple[str, Task], ...] = (
    ("ForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForSeq2SeqLM", "seq2seq"),
    ("ForConditionalGeneration", "seq2seq"),
    ("MTModel", "seq2seq"),
)
_TASK_OF_DATASET: tuple[tuple[str, Task], ...] = (
    ("TextClassification", "text-classification"),
    ("TokenClassification", "token-classification"),
    ("squad", "causal-lm"),
    ("Instruction", "causal-lm"),
    ("Chat", "causal-lm"),
)


_AUTO_CLASS = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def infer_task(cfg: ModelConfig, dataset_target: str | None, hf_config: PreTrainedConfig | None) -> Task | None:
    """The task that the model's `_target_` names, else the dataset's, else the architecture in the model's config; None
    where none of them says."""
    architecture = (getattr(hf_config, "architectures", None) or [None])[0]
    return (
        _match(cfg.target, _TASK_OF_CLASS)
        or _match(dataset_target, _TASK_OF_DATASET)
        or _match(architecture, _TASK_OF_CLASS)
    )


def _match(name: str | None, table: tuple[tuple[str, Task], ...]) -> Task | None:
    if name:
        for part, task in table:
            if part.lower() in name.lower():
                return task
    return None


def tasks_of(hf_config: PreTrainedConfig) -> tuple[Task, ...]:
    """The tasks a model of this config can be fine-tuned for."""
    from transformers.models.auto import modeling_auto as auto

    own = getattr(hf_config, "auto_map", None) or {}  # classes that come with the model
    has_class = [task for task in TASKS if task in _tasks_in_transformers(hf_config) or _AUTO_CLASS[task] in own]
    if "causal-lm" in has_class and not _predicts_the_next_token(hf_config, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        has_class.remove("causal-lm")
    if "seq2seq" in has_class and not _has_source_and_target(hf_config):
        has_class.remove("seq2seq")
    return tuple(has_class)


def _tasks_in_transformers(hf_config: PreTrainedConfig) -> set[str]:
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "text-classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token-classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return {task for task, table in tables.items() if hf_config.model_type in table}


def forget_code_that_is_not_run(hf_config: PreTrainedConfig) -> None:
    """For a model whose own code nobody trusts. Some have code beside a class in transformers (Phi-3), which then is
    the one that is trained: as fast as without that code, and saved without a word of files that are not saved. A class
    that transformers lacks stays named, for the message that asks for trust."""
    own = getattr(hf_config, "auto_map", None) or {}
    lacking = {_AUTO_CLASS[task] for task in TASKS if task not in _tasks_in_transformers(hf_config)}
    if own and not lacking & set(own):
        del hf_config.auto_map


def _has_source_and_target(hf_config: PreTrainedConfig) -> bool:
    """transformers lists decoders that listen to audio (Voxtral, Qwen2-Audio) beside the encoder-decoders; their text
    is one stream, without a source."""
    own = getattr(hf_config, "auto_map", None) or {}
    return bool(getattr(hf_config, "is_encoder_decoder", False)) or _AUTO_CLASS["seq2seq"] in own


def _predicts_the_next_token(hf_config: PreTrainedConfig, masked_lm_names) -> bool:
    """BERT and BART have causal classes for use inside other models; alone, BERT sees the token it should predict and
    BART lacks its encoder."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return False
    return hf_config.model_type not in masked_lm_names or bool(getattr(hf_config, "is_decoder", False))


def require_task(hf_config: PreTrainedConfig, task: str, name: str) -> None:
    """Refuses a task the model cannot do, naming those it can."""
    can = tasks_of(hf_config)
    if task in can:
        return
    if not can:
        home = "its own code" if getattr(hf_config, "auto_map", None) else "transformers"
        raise UserError(
            f"task: {name!r} is a {hf_config.model_type} model, which {home} has no class for in any of "
            f"{', '.join(TASKS)}; choose another model"
        )
    raise UserError(
        f"task: {name!r} is a {hf_config.model_type} model, which cannot do {task}; it can do {', '.join(can)}. Change "
        "`task` (or the `_target_` of the model), or choose another model."
    )
