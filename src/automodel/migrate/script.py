"""A script for HF Trainer, read by its syntax tree and never executed, as a config.

What is looked for: one `TrainingArguments(…)`, one `Trainer(…)`, the model it gets (through `get_peft_model` and
quantisation), the datasets it gets (`dataset_source.py`), early stopping. What a config cannot say (a loss or a step of
the script's own, a collator, data that is made in the script, arguments of the command line) is reported with its line,
and then there is no YAML.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from automodel.migrate.changes import Changes, names_made_by
from automodel.migrate.class_names import ClassNames
from automodel.migrate.dataset_source import DatasetReader
from automodel.migrate.document import Document
from automodel.migrate.script_words import (
    ARGUMENTS,
    CLASS_NAMES,
    HARMLESS_METHODS,
    NOT_NEEDED,
    NOT_OF_THE_MODEL,
    OF_THE_DOWNLOAD,
    PACKAGES,
    PADDING_COLLATORS,
    TASKS,
    TRAINER_ORDER,
    TRAINERS,
    WRAPPERS,
)
from automodel.migrate.supervised import other_options, supervised
from automodel.migrate.training_arguments import carry_over
from automodel.migrate.values import Script, Unknown, dotted, name_of
from automodel.tasks.registry import CAUSAL_LM


def migrate_script(path: Path) -> Document:
    """The script as a document; whatever stands in the way is in its `blocked`."""
    document = Document(path.name)
    try:
        script = Script(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    except (SyntaxError, ValueError) as error:
        document.block(getattr(error, "lineno", 0) or 0, f"this is not Python: {error}")
        return document
    _Reader(script, document).read()
    return document


class _Reader:
    def __init__(self, script: Script, document: Document):
        self.script, self.document = script, document
        self.model_names: set[str] = set()
        self.class_names = ClassNames(script, document)
        self.datasets = DatasetReader(script, document)

    def read(self) -> None:
        trainer = self._trainer()
        arguments = self._arguments()
        if trainer is not None:
            given = self._given(trainer)
            self._trainer_options(trainer, given)
            self._model(given.get("model"), trainer.lineno)
            self._datasets(given, trainer.lineno)
        if arguments is not None:
            self._carry(arguments)
        self.datasets.name_columns()
        self._changes(trainer, arguments)
        for line, text in self.script.assumed:
            self.document.note(line, f"{text} is taken to be true")
        if self.script.calls("initialize") and "apex" in ast.unparse(self.script.tree):
            line = self.script.calls("initialize")[0].lineno
            self.document.note(line, "Apex is not used: precision is training_optimizations.precision")

    def _given(self, trainer: ast.Call) -> dict[str, ast.expr]:
        """What the trainer's constructor gets, by name."""
        starred = [arg for arg in trainer.args if isinstance(arg, ast.Starred)]
        if starred or len(trainer.args) > len(TRAINER_ORDER):
            self.document.block(
                trainer.lineno, "arguments of the trainer are only known when the script runs; name them"
            )
        pairs = list(zip(TRAINER_ORDER, trainer.args))
        for keyword in trainer.keywords:
            pairs += [(keyword.arg, keyword.value)] if keyword.arg else self._unpacked(keyword.value)
        return dict(pairs)

    def _changes(self, trainer: ast.Call | None, arguments: ast.Call | None) -> None:
        """What happens to the objects after they were made."""
        changes = Changes(self.script, self.document)
        names = names_made_by(self.script, trainer)
        changes.of_trainer(names)
        for call in self.script.calls("add_callback"):
            self._callbacks(call.args[0] if call.args else None)
        changes.of_arguments(names_made_by(self.script, arguments))
        changes.of_model(self.model_names)
        self.class_names.afterwards(self.model_names, trainer.lineno if trainer is not None else 0)
        self.class_names.write()
        loads = [c for c in self.script.calls("from_pretrained") if "Tokenizer" in dotted(c.func)]
        changes.of_tokenizer(names_made_by(self.script, *loads))
        for call in (trainer, arguments):
            if call is not None and call.lineno in self.script.bindings.looped:
                self.document.block(call.lineno, "this stands in a loop; a config is one training")

    def _imported_elsewhere(self, name: str) -> str | None:
        """The package a name comes from, where that is not one whose trainer is meant."""
        if name in self.script.classes:
            return f"line {self.script.classes[name].lineno}"
        imports = [node for node in ast.walk(self.script.tree) if isinstance(node, ast.ImportFrom)]
        for node in imports:
            package = (node.module or "").split(".")[0]
            known = package in PACKAGES and node.level == 0
            if not known and any((a.asname or a.name) == name for a in node.names):
                return f"{'.' * node.level}{node.module or ''}"
        return None

    def _trainer(self) -> ast.Call | None:
        own = {c.name: c for c in self.script.classes.values() if any(name_of(b) in TRAINERS for b in c.bases)}
        calls = self.script.calls(*TRAINERS, *own)
        if len(calls) != 1:
            for call in calls:
                self.document.block(call.lineno, f"one of {len(calls)} trainers; a config is one training")
            if not calls:
                self.document.block(0, "there is no call of Trainer(…)")
            return None
        name = calls[0].func.id if isinstance(calls[0].func, ast.Name) else ""
        elsewhere = self._imported_elsewhere(name) if name not in own else None
        if elsewhere is not None:
            self.document.block(calls[0].lineno, f"{name} is not transformers' own: it comes from {elsewhere}")
            return None
        for method in own[name_of(calls[0])].body if name_of(calls[0]) in own else ():
            if isinstance(method, ast.FunctionDef) and method.name not in HARMLESS_METHODS:
                where = f"{name_of(calls[0])}.{method.name}"
                self.document.block(method.lineno, f"{where} is code of the script's own; use `automodel run`")
        return calls[0]

    def _arguments(self) -> ast.Call | None:
        calls = self.script.calls(*ARGUMENTS)
        if len(calls) == 1:
            return calls[0]
        parsers = self.script.calls("parse_args_into_dataclasses", "parse_json_file", "parse_args")
        for call in parsers if not calls else ():
            self.document.block(
                call.lineno, "arguments come from the command line; migrate a training_args.bin instead"
            )
        for call in calls:
            self.document.block(call.lineno, f"one of {len(calls)} sets of arguments; which one is meant?")
        if not calls and not parsers:
            self.document.block(0, "there is no call of TrainingArguments(…)")
        return None

    def _carry(self, call: ast.Call) -> None:
        given, lines = self._keywords(call, positional=("output_dir",))
        if name_of(call) == "SFTConfig" or self.script.calls("SFTTrainer"):
            supervised(self.document, call, given, lines)
        carry_over(given, self.document, lines)

    def _keywords(self, call: ast.Call, positional: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, int]]:
        """Values of a call's keywords; those that nobody can know are in the document's lists."""
        given: dict[str, Any] = {}
        lines: dict[str, int] = {}
        if len(call.args) > len(positional) or any(isinstance(arg, ast.Starred) for arg in call.args):
            self.document.block(call.lineno, f"{name_of(call)}: arguments without a name; name them")
        pairs = [(name, node) for name, node in zip(positional, call.args) if not isinstance(node, ast.Starred)]
        for keyword in call.keywords:
            if keyword.arg is None:
                pairs += self._unpacked(keyword.value)
            else:
                pairs.append((keyword.arg, keyword.value))
        for name, node in pairs:
            try:
                given[name], lines[name] = self.script.value(node), node.lineno
            except Unknown as unknown:
                if name in NOT_NEEDED:
                    self.document.drop(node.lineno, f"{name}: {unknown.text}")
                else:
                    self.document.block(node.lineno, f"{name}: {unknown.text}")
        return given, lines

    def _unpacked(self, node: ast.expr) -> list[tuple[str, ast.expr]]:
        """`**options`, where that is a dictionary that stands in the script."""
        found = self.script.before(node.id, node.lineno) if isinstance(node, ast.Name) else None
        inner = found[1] if found else node
        if isinstance(inner, ast.Dict) and all(isinstance(key, ast.Constant) for key in inner.keys):
            return [
                (str(key.value), value) for key, value in zip(inner.keys, inner.values) if isinstance(key, ast.Constant)
            ]
        why = self.script.why_unknown(node.id, node.lineno) if isinstance(node, ast.Name) else "only known in a run"
        self.document.block(node.lineno, f"`**{ast.unparse(node)[:50]}`: {why}")
        return []

    def _trainer_options(self, trainer: ast.Call, given: dict[str, ast.expr]) -> None:
        for name, text in (
            ("compute_loss_func", "a loss of the script's own"),
            ("optimizers", "an optimizer of the script's own; set optim and learning_rate in TrainingArguments"),
            ("optimizer_cls_and_kwargs", "an optimizer of the script's own"),
        ):
            node = given.get(name)
            if node is not None and not (isinstance(node, ast.Tuple) and all(_is_none(part) for part in node.elts)):
                self.document.block(node.lineno, f"{name}: {text}; use `automodel run`")
        if "compute_metrics" in given:
            line = given["compute_metrics"].lineno
            self.document.note(line, "compute_metrics: the task's own metrics are computed instead")
        for name in ("preprocess_logits_for_metrics",):
            if name in given:
                self.document.drop(given[name].lineno, f"{name}: there is nothing to preprocess")
        other_options(self.script, self.document, trainer, given)
        self._collator(given.get("data_collator"), trainer.lineno)
        self._callbacks(given.get("callbacks"))
        self._adapter(given.get("peft_config"), trainer.lineno)

    def _collator(self, node: ast.expr | None, line: int) -> None:
        if node is None or _is_none(node):
            return
        found = self._resolved(node, line)
        name = name_of(found) or name_of(node)
        if name not in PADDING_COLLATORS:
            self.document.block(node.lineno, f"data_collator: {name or 'this'} may do anything with a batch")
        elif name == "DataCollatorForLanguageModeling":
            mlm = next((k.value for k in getattr(found, "keywords", ()) if k.arg == "mlm"), None)
            if not (isinstance(mlm, ast.Constant) and mlm.value is False):
                self.document.block(node.lineno, "masked language modelling (mlm=True) is not a task here")

    def _resolved(self, node: ast.expr, line: int) -> ast.expr:
        """What a name stands for."""
        for _ in range(20):
            found = self.script.before(node.id, line) if isinstance(node, ast.Name) else None
            if found is None:
                return node
            line, node = found
        return node

    def _callbacks(self, node: ast.expr | None) -> None:
        for item in node.elts if isinstance(node, ast.List) else ([] if node is None else [node]):
            if name_of(item) == "EarlyStoppingCallback":
                given, _ = (
                    self._keywords(item, ("early_stopping_patience",)) if isinstance(item, ast.Call) else ({}, {})
                )
                self.document.set(
                    "early_stopping.patience", given.get("early_stopping_patience", 1), "EarlyStoppingCallback"
                )
                if given.get("early_stopping_threshold"):
                    self.document.set("early_stopping.min_delta", given["early_stopping_threshold"], "threshold")
            else:
                self.document.drop(item.lineno, f"the callback {name_of(item) or ast.unparse(item)} is not called")

    # The model.

    def _model(self, node: ast.expr | None, line: int) -> None:
        call = self._loading(node, line)
        if call is None:
            return
        kind = dotted(call.func).split(".")[0] if isinstance(call.func, ast.Attribute) else ""
        task = next((task for part, task in TASKS.items() if part in kind), None)
        if task is None:
            self.document.block(
                call.lineno, f"{kind or 'this'} is a model for another task than {', '.join(TASKS.values())}"
            )
        else:
            self.document.set("task", task, kind)
        given, lines = self._keywords_of_model(call)
        if "pretrained_model_name_or_path" not in given:
            return
        self.document.set("model.pretrained_model_name_or_path", given.pop("pretrained_model_name_or_path"))
        for old, new in (("dtype", "torch_dtype"),):
            if old in given:
                given[new] = given.pop(old)
        for name, value in given.items():
            if name in ("load_in_4bit", "load_in_8bit"):
                self.document.set(f"quantization.{name}", value, name)
            elif name in ("num_labels", "problem_type", "torch_dtype", "attn_implementation", "revision", "cache_dir"):
                self.document.set(f"model.{name}", value, "")
            elif name == "trust_remote_code":
                self.document.set("model.trust_remote_code", value, "needs --trust on the command line")
            elif name in OF_THE_DOWNLOAD:
                self.document.drop(lines[name], f"{kind}.from_pretrained({name}=…) has no counterpart")
            else:
                self.document.block(lines[name], f"{kind}.from_pretrained({name}=…) changes the model")

    def _loading(self, node: ast.expr | None, line: int) -> ast.Call | None:
        """The `from_pretrained` behind the trainer's model."""
        for _ in range(50):
            if node is None:
                self.document.block(line, "the trainer's model is not given by `model=`")
                return None
            if isinstance(node, ast.Name):
                self.model_names.add(node.id)
                found = self.script.before(node.id, line)
                if found is None:
                    self.document.block(line, f"the trainer's model: {self.script.why_unknown(node.id, line)}")
                    return None
                line, node = found
                continue
            name = name_of(node)
            if isinstance(node, ast.Call) and name == "from_pretrained":
                return node
            if isinstance(node, ast.Call) and name in WRAPPERS:
                if name == "get_peft_model" and len(node.args) + len(node.keywords) > 1:
                    config = node.args[1] if len(node.args) > 1 else node.keywords[0].value
                    self._adapter(config, node.lineno)
                node = node.args[0] if node.args else getattr(node.func, "value", None)
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # SFTTrainer(model="name")
                self.document.set("model.pretrained_model_name_or_path", node.value)
                self.document.set("task", CAUSAL_LM.name, "SFTTrainer")
                return None
            self.document.block(node.lineno, f"the model is made by `{ast.unparse(node)[:60]}`, not by from_pretrained")
            return None
        return None

    def _keywords_of_model(self, call: ast.Call) -> tuple[dict[str, Any], dict[str, int]]:
        keywords: list[ast.keyword] = []
        for keyword in call.keywords:
            pairs = self._unpacked(keyword.value) if keyword.arg is None else [(keyword.arg, keyword.value)]
            keywords += [ast.keyword(name, value) for name, value in pairs]
        self.class_names.in_call(keywords)
        quantised = [k for k in keywords if k.arg == "quantization_config"]
        skipped = ("quantization_config", *NOT_OF_THE_MODEL, *CLASS_NAMES)
        plain = ast.Call(call.func, call.args, [k for k in keywords if k.arg not in skipped])
        ast.copy_location(plain, call)
        for keyword in quantised:
            made = self._resolved(keyword.value, call.lineno)
            if isinstance(made, ast.Call) and name_of(made) == "BitsAndBytesConfig":
                given, lines = self._keywords(made)
                for name, value in given.items():
                    if name in ("load_in_4bit", "load_in_8bit") or name.startswith("bnb_4bit_"):
                        text = value.removeprefix("torch.") if isinstance(value, str) else value
                        self.document.set(f"quantization.{name}", text, "")
                    else:
                        self.document.drop(lines[name], f"BitsAndBytesConfig({name}=…) has no counterpart")
            else:
                self.document.block(
                    keyword.value.lineno, "quantization_config: only BitsAndBytesConfig(…) is understood"
                )
        return self._keywords(plain, ("pretrained_model_name_or_path",))

    def _adapter(self, node: ast.expr | None, line: int) -> None:
        if node is None or _is_none(node):
            return
        made = self._resolved(node, line)
        if not isinstance(made, ast.Call) or name_of(made) != "LoraConfig":
            self.document.block(node.lineno, "only LoraConfig(…) is understood as an adapter")
            return
        given, lines = self._keywords(made)
        if not given.get("target_modules"):
            self.document.block(
                made.lineno, "LoraConfig without target_modules: PEFT's choice depends on the model; name them"
            )
        self.document.set("peft.dim", given.pop("r", 8), "r")
        self.document.set("peft.alpha", given.pop("lora_alpha", 8), "lora_alpha")
        for name, path in (("lora_dropout", "dropout"), ("target_modules", "target_modules"), ("use_dora", "use_dora"),
                           ("use_rslora", "use_rslora"), ("modules_to_save", "modules_to_save")):  # fmt: skip
            if given.get(name) not in (None, 0.0, False):
                self.document.set(f"peft.{path}", given[name], name)
            given.pop(name, None)
        for name, value in given.items():
            if name not in ("task_type", "inference_mode") and not (name == "bias" and value == "none"):
                self.document.block(lines[name], f"LoraConfig({name}={value!r}) has no counterpart")

    # The data.

    def _datasets(self, given: dict[str, ast.expr], line: int) -> None:
        if "train_dataset" not in given:
            self.document.block(line, "the trainer has no train_dataset")
            return
        self.datasets.read(given["train_dataset"], line, "dataset")
        if "eval_dataset" in given and not _is_none(given["eval_dataset"]):
            self.datasets.read(given["eval_dataset"], line, "validation_dataset")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
