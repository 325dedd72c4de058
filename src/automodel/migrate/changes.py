"""What a script does to its objects between making them and training: `args.learning_rate = 1e-5`, frozen layers, a new
head, tokens that are added. A config is made from how objects were made, so every such line is reported.

Only what is known to change nothing is passed over: printing, moving to a device, pad tokens, `use_cache`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from automodel.migrate.document import Document
from automodel.migrate.values import Script, dotted, name_of

ARGUMENTS_AFTERWARDS = (
    "output_dir",
    "run_name",
    "logging_dir",
    "report_to",
    "hub_model_id",
    "hub_token",
    "push_to_hub",
)
MODEL_ATTRIBUTES = (  # names of classes are read by class_names.py
    "config.use_cache", "config.pad_token_id", "config.eos_token_id", "config.bos_token_id", "config.id2label",
    "config.label2id", "config.pretraining_tp", "generation_config", "is_parallelizable", "model_parallel",
)  # fmt: skip
MODEL_METHODS = (
    "to", "cuda", "cpu", "train", "eval", "parameters", "named_parameters", "num_parameters", "modules", "children",
    "named_modules", "named_children", "print_trainable_parameters", "get_nb_trainable_parameters", "save_pretrained",
    "enable_input_require_grads", "push_to_hub", "generate", "state_dict", "get_memory_footprint", "tie_weights",
    "items", "get_input_embeddings", "get_output_embeddings", "size", "numel", "to_dict", "keys", "values",
)  # fmt: skip
TOKENIZER_ATTRIBUTES = ("pad_token", "pad_token_id", "padding_side", "add_eos_token", "add_bos_token")
TOKENIZER_CHANGES = ("add_tokens", "add_special_tokens", "train_new_from_iterator", "set_truncation_and_padding")
LOOKERS = (
    "print", "len", "type", "isinstance", "str", "repr", "sum", "id", "dir", "vars", "hasattr", "getattr", "any", "all",
    "next", "iter", "list", "dict", "summary", "Trainer", "Seq2SeqTrainer", "SFTTrainer", "get_peft_model", "pipeline",
    "prepare_model_for_kbit_training", "info", "warning", "debug", "format", "max", "min", "set",
)  # fmt: skip
"""Functions that look at an object and leave it as it is, or whose result is followed elsewhere."""


def names_made_by(script: Script, *calls: ast.AST | None) -> set[str]:
    """Names that hold what one of these expressions gives, here or there in the script."""
    wanted = {id(call) for call in calls if call is not None}
    made: set[str] = set()
    for _ in range(3):  # names of names
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Assign) and (
                id(node.value) in wanted or (isinstance(node.value, ast.Name) and node.value.id in made)
            ):
                made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return made


class Changes:
    """Reports, for groups of names, what is done to the objects behind them."""

    def __init__(self, script: Script, document: Document):
        self.script, self.document = script, document

    def of_arguments(self, names: set[str]) -> None:
        for node, path in self._assigned(names):
            if path in ARGUMENTS_AFTERWARDS:
                self.document.drop(node.lineno, f"{path} is set afterwards")
            else:
                self.document.block(node.lineno, f"{path} is set after the arguments were made; set it in the call")
        for call, method in self._methods(names):
            if method.startswith("set_"):
                self.document.block(call.lineno, f"{method}(…) changes the arguments; set them in the call")
        self._handed_over(names, "the arguments")

    def of_trainer(self, names: set[str]) -> None:
        for node, path in self._assigned(names):
            self.document.block(node.lineno, f"trainer.{path} is replaced by the script; use `automodel run`")
        for call, method in self._methods(names):
            if method == "train" and (call.args or call.keywords):
                self.document.drop(call.lineno, "train(…): `--resume` is how a run goes on")
            elif method in ("remove_callback", "pop_callback"):
                self.document.drop(call.lineno, f"{method}(…): there are no callbacks")
        self._handed_over(names, "the trainer")

    def of_model(self, names: set[str]) -> None:
        for node, path in self._assigned(names):
            if not path.startswith(MODEL_ATTRIBUTES):
                self.document.block(node.lineno, f"model.{path} is changed by the script; use `automodel run`")
        for call, method in self._methods(names):
            if method == "gradient_checkpointing_enable":
                self.document.set("training_optimizations.gradient_checkpointing", True, f"line {call.lineno}")
            elif method not in MODEL_METHODS:
                self.document.block(call.lineno, f"model….{method}(…) may change the model; use `automodel run`")
        for node in ast.walk(self.script.tree):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                    self.document.block(target.lineno, "parameters are frozen by the script; use `automodel run`")
        self._handed_over(names, "the model")

    def of_tokenizer(self, names: set[str]) -> None:
        for node, path in self._assigned(names):
            if path not in TOKENIZER_ATTRIBUTES:
                self.document.block(node.lineno, f"tokenizer.{path} is changed by the script; use `automodel run`")
        for call, method in self._methods(names):
            if method in TOKENIZER_CHANGES:
                self.document.block(call.lineno, f"{method}(…) changes the vocabulary; use `automodel run`")

    def _assigned(self, names: set[str]) -> Iterable[tuple[ast.expr, str]]:
        """Attributes that are set, with their path: `config.use_cache`."""
        for node in ast.walk(self.script.tree):
            for target in _targets(node):
                base = target.value if isinstance(target, ast.Subscript) else target
                root, _, path = dotted(base).partition(".")
                if root in names and path and path.split(".")[-1] != "requires_grad":
                    yield target, path
            if isinstance(node, ast.Call) and name_of(node) in ("setattr", "delattr") and len(node.args) > 1:
                root, _, path = dotted(node.args[0]).partition(".")
                if root in names:
                    last = node.args[1].value if isinstance(node.args[1], ast.Constant) else "…"
                    yield node, ".".join(part for part in (path, str(last)) if part)

    def _methods(self, names: set[str]) -> Iterable[tuple[ast.Call, str]]:
        """Calls of methods of the object, or of its parts."""
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _root(node.func.value) in names:
                yield node, node.func.attr

    def _handed_over(self, names: set[str], what: str) -> None:
        """Functions that get the object, and whose result nobody takes: they are called for what they do to it."""
        for node in ast.walk(self.script.tree):
            call = node.value if isinstance(node, ast.Expr) else None
            if not isinstance(call, ast.Call) or name_of(call) in LOOKERS:
                continue
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            own = isinstance(call.func, ast.Name) and call.func.id in {*self.script.functions, *self._imported()}
            if own and any(isinstance(value, ast.Name) and value.id in names for value in given):
                text = ast.unparse(call)[:50]
                self.document.block(call.lineno, f"`{text}`: what it does to {what} cannot be seen")

    def _imported(self) -> set[str]:
        nodes = [node for node in ast.walk(self.script.tree) if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name for node in nodes for alias in node.names}


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        parts = [
            part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        return list(parts)
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _root(node: ast.expr) -> str:
    """`model` of `model.encoder.layer[0].parameters()`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
