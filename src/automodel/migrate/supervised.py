"""TRL's SFTTrainer and SFTConfig in a script: their own arguments, and where their defaults are others."""

from __future__ import annotations

import ast
from typing import Any

from automodel.migrate.document import Document
from automodel.migrate.values import Script, Unknown, name_of

TRAINER_OPTIONS = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "tokenizer", "peft_config",
    "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_loss_func",
    "preprocess_logits_for_metrics",
)  # fmt: skip
"""Of a trainer's constructor; read here, or blocked by name."""
TEXTS = {
    "max_length": "dataset.max_length",
    "max_seq_length": "dataset.max_length",
    "dataset_text_field": "dataset.text_column",
}
"""Arguments of SFTConfig, and of its trainer until TRL 0.13."""
CHANGES = {
    "loss_type": "nll", "chat_template_path": None, "eos_token": None, "dataset_kwargs": None,
    "model_init_kwargs": None, "truncation_mode": "keep_start", "router_aux_loss_coef": None,
    "trust_remote_code": False,
}  # fmt: skip
"""Arguments of SFTConfig that make another training of it, with their defaults."""


DEFAULTS = CHANGES | {
    "dataset_text_field": "text", "dataset_num_proc": None, "pad_token": None, "shuffle_dataset": False,
    "packing_strategy": "bfd", "padding_free": False, "pad_to_multiple_of": None, "eval_packing": None,
    "activation_offloading": False,
}  # fmt: skip
"""What saved arguments have where nobody said anything."""


def saved_supervised(document: Document, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a saved SFTConfig without its own. They do not say which column the texts were in: the name of
    the default is there for chats as well."""
    if not {"packing", "max_length", "assistant_only_loss"} <= set(given):
        return given
    rest = {k: v for k, v in given.items() if k not in DEFAULTS or v not in (DEFAULTS[k], f"<{k.upper()}>")}
    size, packs = rest.pop("max_length"), rest.pop("packing")
    only = [rest.pop(key, None) for key in ("assistant_only_loss", "completion_only_loss")]
    if size is not None:
        document.set("dataset.max_length", size, "max_length")
    document.set("dataset.on_long", "cut", "SFTConfig")
    if packs and size:
        document.fill_rows(0, "packing", size)
    if any(only) or only[1] is False:
        document.set("dataset.answer_only_loss", any(only), "SFTConfig")
        _by_the_kind_of_rows(document, 0, *only)
    else:
        document.note(
            0, "completion_only_loss: SFTTrainer learns completions alone where rows have a `prompt`, and "
            "conversations whole (dataset.answer_only_loss: false)",
        )  # fmt: skip
    return rest


def other_options(script: Script, document: Document, trainer: ast.Call, given: dict[str, ast.expr]) -> None:
    """Keywords that older versions of TRL's trainer took, and those that nobody knows."""
    packs = 0
    for name, node in given.items():
        if name in TRAINER_OPTIONS or (isinstance(node, ast.Constant) and node.value is None):
            continue
        if name_of(trainer) != "SFTTrainer" or name not in {*TEXTS, "packing"}:
            document.block(node.lineno, f"{name}: there is no counterpart; use `automodel run`")
            continue
        try:
            value = script.value(node)
        except Unknown as unknown:
            document.block(node.lineno, f"{name}: {unknown.text}")
            continue
        if name in TEXTS:
            document.set(TEXTS[name], value, name)
        elif value:
            packs = node.lineno
    if packs:
        document.fill_rows(packs, "packing", document.get("dataset.max_length") or 1024)


def _by_the_kind_of_rows(document: Document, line: int, answers: bool | None, completions: bool | None) -> None:
    """What is the same for some rows only; a script does not say which it has."""
    if answers:
        document.note(
            line, "assistant_only_loss: TRL also learns the newline that ChatML and others write behind an answer's "
            "end; a run of this file learns an answer up to its end. `automodel run` learns what TRL does",
        )  # fmt: skip
    if answers and completions is False:
        document.note(line, "assistant_only_loss: of rows with a `prompt`, SFTTrainer learns answers inside it as well")
    if not answers and document.get("dataset.text_column") is None:
        document.note(
            line, "completion_only_loss: texts in `prompt` and `completion` stay as they are with "
            'dataset.prompt_template: "{prompt}"; without it a chat template of the tokenizer writes them, unlike '
            "in SFTTrainer",
        )  # fmt: skip
        if completions:
            document.note(
                line, "completion_only_loss: SFTTrainer learns `messages` whole, which is answer_only_loss: false"
            )  # fmt: skip


def supervised(document: Document, call: ast.Call, given: dict[str, Any], lines: dict[str, int]) -> None:
    """What SFTTrainer does besides, said in the document; takes its own arguments out of `given`."""
    for key, path in TEXTS.items():
        if given.get(key) is not None:
            document.set(path, given[key], key)
        given.pop(key, None)
    packs, strategy = given.pop("packing", False), given.pop("packing_strategy", "bfd")
    for key in [key for key in given if key in CHANGES]:
        if given.pop(key) not in (None, False, CHANGES[key]):
            document.block(lines[key], f"{key} has no counterpart; use `automodel run`")
    goes_on = packs and strategy != "bfd" and document.get("dataset.text_column") is not None
    document.set("dataset.on_long", "split" if goes_on else "cut", "packing_strategy" if goes_on else "SFTTrainer")
    only = [given.pop(key, None) for key in ("assistant_only_loss", "completion_only_loss")]
    if any(only) or only[1] is False:
        document.set("dataset.answer_only_loss", any(only), name_of(call))
        _by_the_kind_of_rows(document, call.lineno, *only)
    elif document.get("dataset.text_column") is None:
        document.block(
            call.lineno, "SFTTrainer learns whole conversations, but completions alone where rows have a prompt; say "
            "which with completion_only_loss=… or assistant_only_loss=True, or name dataset_text_field",
        )  # fmt: skip
    if name_of(call) == "SFTConfig":
        if not {"max_length", "max_seq_length"} & set(lines):
            document.set("dataset.max_length", 1024, "SFTConfig's default")
        if packs:
            document.fill_rows(lines["packing"], "packing", document.get("dataset.max_length"))
        given.setdefault("learning_rate", 2e-5)
        given.setdefault("bf16", not given.get("fp16", False))
