"""400 configs, each with one thing wrong in it.

Most are made from the schema: every key gets values of wrong types, values beyond its range, a misspelling and a second
line. What is refused is not looked up there: a fault is one by the meaning of the key's type. The rest is written out:
keys that contradict each other, settings of the command line, files that are no YAML, flat settings, targets, paths,
and what only model or data can tell.
"""

# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import json
import random
import typing
from collections.abc import Iterator
from typing import Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Lt

from automodel.config.fields import Field, arms, bare, fields_of, sections_of
from automodel.config.section import Section
from automodel.plan.config import RunConfig
from bad_input.case import BERT, LLAMA, SEED, T5, Case, lines_of

COUNT = 400
SHARES = {"wrong type": 0.4, "out of range": 0.25, "misspelt": 0.17, "twice": 0.1, "on the command line": 0.08}
"""How much of each kind is taken from the schema's faults, to fill up the cases that are written out."""

REVIEWS = lines_of([json.dumps({"text": f"{w} film", "label": i % 2}) for i, w in enumerate(["bad", "good"] * 8)])
QUESTIONS = lines_of(
    [json.dumps({"question": "what is good ?", "answer": f"the {w}"}) for w in ("film", "plot", "actor", "scene")]
)
CHATS = lines_of(
    [json.dumps({"messages": [{"role": "user", "content": "what is good ?"}, {"role": "assistant", "content": w}]})
     for w in ("film", "plot", "actor", "scene")]
)  # fmt: skip
PAIRS = lines_of([json.dumps({"source": "the film", "target": f"the {w}"}) for w in ("film", "plot", "actor", "scene")])
FILES = {"train.jsonl": REVIEWS, "test.jsonl": REVIEWS}


def base(kind: str = "classifier") -> dict[str, Any]:
    """A config that trains, as a file has it."""
    model, task = {
        "classifier": (BERT, "text-classification"),
        "language": (LLAMA, "causal-lm"),
        "pairs": (T5, "seq2seq"),
    }[kind]
    return {
        "model": {"pretrained_model_name_or_path": model},
        "task": task,
        "dataset": {"path": "train.jsonl"},
        "validation_dataset": {"path": "test.jsonl"},
        "step_scheduler": {"max_steps": 2},
        "checkpoint": {"checkpoint_dir": "out"},
    }


def text_of(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=10**6)


def command(*settings: str, verb: str = "finetune", file: str = "run.yaml") -> tuple[str, ...]:
    return (*{"finetune": ("finetune", "llm"), "plan": ("plan",)}[verb], "-c", file, *settings)


def good_cases() -> list[Case]:
    """The configs that the bad ones are made from; they must be planned without a complaint."""
    files = {"classifier": REVIEWS, "language": QUESTIONS, "pairs": PAIRS}
    return [
        Case(f"good-{kind}", "nothing", "-", command(verb="plan"),
             {"run.yaml": text_of(base(kind)).encode(), "train.jsonl": rows, "test.jsonl": rows})
        for kind, rows in files.items()
    ]  # fmt: skip


def cases() -> list[Case]:
    """All of them, in the same order every time."""
    chance = random.Random(SEED)
    found = written_out()
    by_kind: dict[str, list[Case]] = {kind: [] for kind in SHARES}
    for kind, case in from_schema(chance):
        by_kind[kind].append(case)
    counts = {kind: int(share * (COUNT - len(found))) for kind, share in SHARES.items()}
    counts["wrong type"] += COUNT - len(found) - sum(counts.values())
    for kind, count in counts.items():
        found += _spread(by_kind[kind], count, chance)
    return found


def _spread(candidates: list[Case], count: int, chance: random.Random) -> list[Case]:
    """So many, with as many keys as possible among them."""
    by_key: dict[str, list[Case]] = {}
    for case in candidates:
        by_key.setdefault(case.names, []).append(case)
    for group in by_key.values():
        chance.shuffle(group)
    keys = list(by_key)
    chance.shuffle(keys)
    taken: list[Case] = []
    while len(taken) < count:
        for key in keys:
            if by_key[key] and len(taken) < count:
                taken.append(by_key[key].pop())
    return taken


# --- from the schema -------------------------------------------------------------------------------------------------


def from_schema(chance: random.Random) -> Iterator[tuple[str, Case]]:
    """Every key with everything that can be wrong with it."""
    for path, section in sections_of(RunConfig, items=True):
        for f in fields_of(section).values():
            if f.items is None:
                yield from _faults_of(path, section, f, chance)


def _faults_of(path: str, section: type[Section], f: Field, chance: random.Random) -> Iterator[tuple[str, Case]]:
    spelt = f"{path.replace('[]', '.0')}.{f.key}".lstrip(".")
    names = rf"\b{spelt}".replace(".", r"\.")
    for number, (what, value) in enumerate(_wrong_types(f)):
        yield "wrong type", _case(f"type-{spelt}-{number}", f"{spelt} is {what}", names, _with(path, f.key, value))
        # Quotes do not reach a program, so that 8 is a number there however it was typed.
        if "[]" not in path and isinstance(value, str | int | float | bool) and value != "8":
            setting = f"{spelt}={json.dumps(value) if isinstance(value, bool) else value}"
            yield (
                "on the command line",
                _case(f"setting-{spelt}-{number}", f"{setting} on the command line", names, base(), setting),
            )
    for number, (what, value) in enumerate(_out_of_range(f)):
        yield "out of range", _case(f"range-{spelt}-{number}", f"{spelt} is {what}", names, _with(path, f.key, value))
    if f.section is None and f.key != "_target_":
        wrong = _misspelt(f.key, section, chance)
        at = f"{path.replace('[]', '.0')}.{wrong}".lstrip(".")
        yield "misspelt", _case(f"misspelt-{spelt}", f"{spelt} is spelt {wrong}", rf"\b{at}\b".replace(".", r"\."),
                                _with(path, wrong, _usual(f)))  # fmt: skip
        alias = next((alias for alias, real in section.ALIASES.items() if real == f.name), None)
        if "[]" not in path:
            yield "twice", _twice(path, f, alias, spelt)


def _with(path: str, key: str, value: Any) -> dict[str, Any]:
    """The good config with one value in it."""
    config = base()
    node: dict[str, Any] = config
    for part in filter(None, path.split(".")):
        if part.endswith("[]"):
            del node["path"]
            node[part[:-2]] = [{"path": "train.jsonl"}]
            node = node[part[:-2]][0]
        else:
            node = node.setdefault(part, {})
    if key == "mixture":
        node.pop("path", None)
    node[key] = value
    return config


def _case(name: str, fault: str, names: str, config: dict[str, Any], *settings: str) -> Case:
    verb = "plan" if sum(map(ord, name)) % 4 == 0 else "finetune"
    return Case(
        _file_name(name), fault, names, command(*settings, verb=verb), {"run.yaml": text_of(config).encode(), **FILES}
    )


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def _kinds(f: Field) -> set[Any]:
    """The simple types a key takes."""
    found: set[Any] = set()
    for arm in arms(f.hint):
        origin = typing.get_origin(bare(arm))
        found.add(Literal if origin is Literal else origin or bare(arm))
    return found - {type(None)}


def _wrong_types(f: Field) -> Iterator[tuple[str, Any]]:
    if f.section is not None:
        if not f.section.SHORTHAND:
            yield "a number instead of a section", 3
            yield "a word instead of a section", "yes please"
        yield "a list instead of a section", ["a", "b"]
        return
    kinds = _kinds(f)
    if kinds & {int, float} and str not in kinds:
        yield "a word instead of a number", "many"
        yield "a number in quotes", "8"
        yield "a mapping instead of a number", {"value": 1}
        if tuple not in kinds:
            yield "a list instead of a number", [1, 2]
        if float not in kinds and bool not in kinds:
            yield "a fraction", 1.5
            yield "a truth value instead of a number", True
    elif bool in kinds and kinds <= {bool, Literal}:
        yield "neither true nor false", "perhaps"
        yield "a number instead of a switch", 3
        yield "a list instead of a switch", [True]
    elif kinds == {Literal}:
        yield "no choice of this key", "nonsense"
        yield "a list instead of a choice", ["nonsense"]
        yield "a number instead of a choice", 17
    elif tuple in kinds:
        yield "a mapping instead of a list", {"a": 1}
        if str not in kinds:
            yield "a word instead of a list", "balanced"
            yield "a list of lists", [["a"], ["b"]]
    elif dict in kinds:
        yield "a word instead of a mapping", "a to b"
        yield "a list instead of a mapping", ["a", "b"]
    elif str in kinds:
        yield "a list instead of text", ["a", "b"]
        yield "a mapping instead of text", {"a": "b"}
    if not f.nullable and not f.required and kinds:
        yield "null", None


def _out_of_range(f: Field) -> Iterator[tuple[str, Any]]:
    numbers = [arm for arm in arms(f.hint) if bare(arm) in (int, float)]
    if not numbers:
        return
    if len(numbers) == 1:
        whole = bare(numbers[0]) is int
        for limit in getattr(numbers[0], "__metadata__", ()):
            match limit:
                case Ge(ge=bound):
                    yield "below its smallest value", bound - 1
                case Gt(gt=bound):
                    yield "at a smallest value that is left out", bound
                case Le(le=bound):
                    yield "above its largest value", bound * 2 + 1 if whole else bound * 1.5
                case Lt(lt=bound):
                    yield "at a largest value that is left out", bound
    yield "negative", -7
    yield "no number", float("nan")
    yield "without end", float("inf")
    yield "a number of 27 digits", 10**26


def _misspelt(key: str, section: type[Section], chance: random.Random) -> str:
    """The key with two letters swapped or one left out; never another key."""
    known = (
        {f.key for f in fields_of(section).values()} | set(section.ALIASES) | set(section.INLINE) | set(section.HOMES)
    )
    options = [key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1) if key[i] != key[i + 1]]
    options += [key[:i] + key[i + 1 :] for i in range(len(key)) if len(key) > 3]
    return chance.choice(sorted({option for option in options if option not in known} - {key}))


def _usual(f: Field) -> Any:
    """Some value that is right for a key."""
    kinds = _kinds(f)
    if bool in kinds:
        return True
    if Literal in kinds:
        literals = (bare(arm) for arm in arms(f.hint) if typing.get_origin(bare(arm)) is Literal)
        return typing.get_args(next(literals))[0]
    if dict in kinds:
        return {"a": "b"}
    if kinds & {int, float} and str not in kinds:
        return 1
    return ["a"] if tuple in kinds and str not in kinds else "a"


def _twice(path: str, f: Field, alias: str | None, spelt: str) -> Case:
    """The key on two lines of one section, or beside another name of it."""
    lines = text_of(base()).splitlines()
    parts = [part for part in path.split(".") if part]
    value = json.dumps(_usual(f))
    inside = [f"{f.key}: {value}", f"{alias or f.key}: {value}"]
    if not parts:
        lines = [line for line in lines if not line.startswith(f"{f.key}:")] + inside
    else:
        top = next((i for i, line in enumerate(lines) if line.startswith(f"{parts[0]}:")), None)
        if top is not None:
            end = next((i for i in range(top + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
            del lines[top:end]
        lines += [f"{'  ' * i}{part}:" for i, part in enumerate(parts)]
        lines += [f"{'  ' * len(parts)}{line}" for line in inside]
    names = rf"\b({f.key}|{alias or f.key})\b"
    return Case(_file_name(f"twice-{spelt}"), f"{spelt} is given twice", names, command(),
                {"run.yaml": ("\n".join(lines) + "\n").encode(), **FILES})  # fmt: skip


# --- written out -----------------------------------------------------------------------------------------------------


def _changed(changes: dict[str, Any], kind: str = "classifier", without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The good config with sections changed key by key; `without` names sections that are left out."""
    config = base(kind)
    for key in without:
        del config[key]
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    return config


def written_out() -> list[Case]:
    found = []
    for name, fault, names, changes, *more in CONTRADICTIONS:
        kind, without = (*more, *("classifier", ())[len(more) :])
        rows = {"classifier": REVIEWS, "language": QUESTIONS, "pairs": PAIRS}[kind]
        files = {
            "run.yaml": text_of(_changed(changes, kind, without)).encode(),
            "train.jsonl": rows,
            "test.jsonl": rows,
        }
        found.append(Case(name, fault, names, command(), files))
    for name, fault, names, *settings in SETTINGS:
        found.append(Case(name, fault, names, command(*settings), {"run.yaml": text_of(base()).encode(), **FILES}))
    for name, fault, names, file, content in NO_CONFIGS:
        found.append(Case(name, fault, names, command(file=file), {file: content, **FILES}))
    for name, fault, names, content, *settings in WHOLE_FILES:
        found.append(Case(name, fault, names, command(*settings), {"run.yaml": content.encode(), **FILES}))
    for name, fault, names, flat in FLAT:
        files = {"run.yaml": text_of(base()).encode(), "flat.json": flat.encode(), **FILES}
        found.append(Case(name, fault, names, (*command(), "-c", "flat.json"), files))
    return found


CONTRADICTIONS: list[tuple] = [
    ("two-precisions", "bf16 and fp16", "training_optimizations.fp16", {"training_optimizations": {"bf16": True, "fp16": True}}),
    ("precision-and-switch", "fp32 asked for, and bf16", "training_optimizations.precision",
     {"training_optimizations": {"bf16": True, "precision": "fp32"}}),
    ("dtype-and-precision", "weights in bf16, precision fp16", "model.torch_dtype",
     {"model": {"torch_dtype": "bfloat16"}, "training_optimizations": {"precision": "fp16"}}),
    ("no-such-dtype", "a dtype that does not exist", "model.torch_dtype", {"model": {"torch_dtype": "float12"}}),
    ("no-such-attention", "an attention that does not exist", "model.attn_implementation",
     {"model": {"attn_implementation": "flash_attention_9"}}),
    ("quantised-twice", "4 and 8 bits", "quantization.load_in_8bit",
     {"quantization": {"load_in_4bit": True, "load_in_8bit": True}, "peft": {}}),
    ("quantised-nothing", "neither 4 nor 8 bits", "quantization", {"quantization": {"load_in_4bit": False}, "peft": {}}),
    ("quantised-alone", "weights in few bits without an adapter", "quantization", {"quantization": {"load_in_4bit": True}}),
    ("quantised-dtype", "a compute dtype that does not exist", "quantization.bnb_4bit_compute_dtype",
     {"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "nf4"}, "peft": {}}),
    ("two-warm-ups", "steps and a share of them", "lr_scheduler.warmup_ratio",
     {"lr_scheduler": {"warmup_steps": 5, "warmup_ratio": 0.1}}),
    ("two-floors", "a rate and a share of the peak", "lr_scheduler.min_lr_ratio",
     {"lr_scheduler": {"name": "cosine", "min_lr": 1e-6, "min_lr_ratio": 0.1}}),
    ("floor-above-peak", "the lowest rate is above the highest", "lr_scheduler.min_lr",
     {"optimizer": {"lr": 1e-5}, "lr_scheduler": {"name": "cosine", "min_lr": 1e-3}}),
    ("floor-of-constant", "a constant rate with a floor", "lr_scheduler.min_lr",
     {"lr_scheduler": {"name": "constant", "min_lr": 1e-6}}),
    ("no-floor", "a shape that needs a floor", "lr_scheduler.min_lr", {"lr_scheduler": "cosine_with_min_lr"}),
    ("constant-warm-up", "a constant rate with a warm-up", "lr_scheduler.name",
     {"lr_scheduler": {"name": "constant", "warmup_steps": 5}}),
    ("two-decays", "steps and a share of them", "lr_scheduler.decay_ratio",
     {"lr_scheduler": {"name": "wsd", "decay_steps": 5, "decay_ratio": 0.3}}),
    ("power-of-cosine", "a key of another shape", "lr_scheduler.power", {"lr_scheduler": {"name": "cosine", "power": 2.0}}),
    ("timescale-of-linear", "a key of another shape", "lr_scheduler.timescale", {"lr_scheduler": {"timescale": 100}}),
    ("plateau", "a schedule that is no function of the step", "lr_scheduler.name", {"lr_scheduler": "reduce_lr_on_plateau"}),
    ("greedy", "a schedule that is no function of the step", "lr_scheduler.name", {"lr_scheduler": {"name": "greedy"}}),
    ("two-batches", "two sizes of the micro-batch", "step_scheduler.local_batch_size",
     {"step_scheduler": {"local_batch_size": 4}, "dataloader": {"batch_size": 8}}),
    ("odd-global-batch", "no multiple of the micro-batch", "step_scheduler.global_batch_size",
     {"step_scheduler": {"global_batch_size": 10}, "dataloader": {"batch_size": 4}}),
    ("workers-none", "batches made ahead by no worker", "dataloader.prefetch_factor",
     {"dataloader": {"num_workers": 0, "prefetch_factor": 4}}),
    ("workers-kept", "no workers to keep", "validation_dataloader.persistent_workers",
     {"validation_dataloader": {"num_workers": 0, "persistent_workers": True}}),
    ("stopping-blind", "early stopping without validation data", "early_stopping", {"early_stopping": {}}, "classifier",
     ("validation_dataset",)),
    ("best-blind", "a best metric without validation data", "checkpoint.best_metric", {"checkpoint": {"best_metric": "f1"}},
     "classifier", ("validation_dataset",)),
    ("mode-blind", "a best mode without validation data", "checkpoint.best_mode", {"checkpoint": {"best_mode": "max"}},
     "classifier", ("validation_dataset",)),
    ("evaluating-nothing", "evaluations without validation data", "step_scheduler.val_every_steps",
     {"step_scheduler": {"val_every_steps": 5}}, "classifier", ("validation_dataset",)),
    ("two-metrics", "two metrics that decide", "early_stopping.metric",
     {"early_stopping": {"metric": "accuracy"}, "checkpoint": {"best_metric": "f1"}}),
    ("worst-model", "the largest loss is best", "checkpoint.best_mode", {"checkpoint": {"best_metric": "loss", "best_mode": "max"}}),
    ("no-such-metric", "a metric that is not measured", "checkpoint.best_metric", {"checkpoint": {"best_metric": "bleu"}}),
    ("metric-of-another-task", "perplexity of a classifier", "early_stopping.metric", {"early_stopping": {"metric": "perplexity"}}),
    ("two-compile-switches", "on and off", "training_optimizations.use_compile",
     {"training_optimizations": {"use_compile": True}, "compile": {"enabled": False}}),
    ("packing-off-and-on", "bins, and no packing", "packed_sequence.packed_sequence_size",
     {"packed_sequence": {"enabled": False, "packed_sequence_size": 512}}),
    ("buckets-and-bins", "two sizes of the bucket", "packed_sequence.bucket_tokens",
     {"packed_sequence": {"bucket_tokens": 64, "packed_sequence_size": 512}}),
    ("offload-nothing", "moves what is not kept", "training_optimizations.activation_offload",
     {"training_optimizations": {"activation_offload": True, "gradient_checkpointing": False}}),
    ("fp8-twice", "two sections for one thing", "model.fp8_config", {"fp8": {}, "model": {"fp8_config": {}}}),
    ("weights-for-three", "three weights for two classes", "loss_fn.class_weights",
     {"loss_fn": {"class_weights": [1, 2, 3]}, "model": {"num_labels": 2}}),
    ("weights-of-the-data", "three weights, and two classes in the data", "class_weights", {"loss_fn": {"class_weights": [1, 2, 3]}}),
    ("weights-of-nothing", "no class counts", "loss_fn.class_weights", {"loss_fn": {"class_weights": [0, 0]}}),
    ("labels-twice", "one column, and several", "dataset.label_columns",
     {"dataset": {"label_column": "label", "label_columns": ["a", "b"]}}),
    ("mixture-and-path", "several datasets, and one", "dataset.mixture", {"dataset": {"mixture": ["train.jsonl"]}}),
    ("mixture-of-nothing", "an empty list of datasets", "dataset.mixture", {"dataset": {"path": None, "mixture": []}}),
    ("mixture-with-a-bad-path", "a dataset that is not there", r"dataset.mixture\.1|nowhere.jsonl",
     {"dataset": {"path": None, "mixture": ["train.jsonl", "nowhere.jsonl"]}}),
    ("mixture-weights-of-evaluation", "an evaluation with weights", "validation_dataset.mixture",
     {"validation_dataset": {"path": None, "mixture": [{"path": "test.jsonl", "weight": 2}]}}),
    ("columns-of-chats", "chats for a classifier", "dataset.messages_column", {"dataset": {"messages_column": "text"}}),
    ("prefix-of-a-classifier", "a key of seq2seq", "dataset.source_prefix", {"dataset": {"source_prefix": "sum: "}}),
    ("task-of-another-class", "a class for another task", "task",
     {"model": {"_target_": "automodel.AutoModelForCausalLM.from_pretrained"}}),
    ("remote-code", "code of the model", "model.trust_remote_code", {"model": {"trust_remote_code": True}}),
    ("empty-model", "an empty name", "model.pretrained_model_name_or_path", {"model": {"pretrained_model_name_or_path": ""}}),
    ("empty-run-folder", "an empty name", "checkpoint.checkpoint_dir", {"checkpoint": {"checkpoint_dir": ""}}),
    ("empty-data", "an empty name", "dataset.path", {"dataset": {"path": ""}}),
    ("no-data", "no data", "dataset", {}, "classifier", ("dataset",)),
    ("no-model", "no model", "model", {}, "classifier", ("model",)),
    ("no-such-model", "a folder that is not there", "model.pretrained_model_name_or_path",
     {"model": {"pretrained_model_name_or_path": "./models/brt"}}),
    ("model-is-data", "a file of data for a model", "model.pretrained_model_name_or_path",
     {"model": {"pretrained_model_name_or_path": "train.jsonl"}}),
    ("model-with-spaces", "a name that the hub cannot have", "model.pretrained_model_name_or_path",
     {"model": {"pretrained_model_name_or_path": "my best model"}}),
    ("model-is-long", "a name of 5,000 letters", "model.pretrained_model_name_or_path",
     {"model": {"pretrained_model_name_or_path": "x" * 5000}}),
    ("tokenizer-nowhere", "a tokenizer that is not there", "model.tokenizer", {"model": {"tokenizer": "./nowhere"}}),
    ("dropout-two", "a share of two", "model.hidden_dropout_prob", {"model": {"hidden_dropout_prob": 2}}),
    ("dropout-nan", "a share that is no number", "model.attention_probs_dropout_prob",
     {"model": {"attention_probs_dropout_prob": float("nan")}}),
    ("model-key-nobody-knows", "a key of no model", "model.flavour", {"model": {"flavour": "vanilla"}}),
    ("id2label-of-text", "names without numbers", "model.id2label", {"model": {"id2label": {"a": "neg", "b": "pos"}}}),
    ("id2label-of-three", "three names, and two labels", "id2label|num_labels",
     {"model": {"id2label": {0: "a", 1: "b", 2: "c"}, "num_labels": 2}}),
    ("too-few-labels", "one name for two classes", r"dataset", {"dataset": {"labels": ["a"]}}),
    ("regression-of-many", "a regression with three outputs", r"row \d+",
     {"model": {"num_labels": 3, "problem_type": "regression"}}),
    ("longer-than-the-model", "more tokens than positions", "dataset.max_length", {"dataset": {"max_length": 1000}}),
    ("no-such-column", "a column that is not there", "dataset.text_column", {"dataset": {"text_column": "texts"}}),
    ("no-such-label", "a column that is not there", "dataset.label_column", {"dataset": {"label_column": "labels"}}),
    ("labels-of-others", "names that are not those of the data", r"dataset|row \d+", {"dataset": {"labels": ["a", "a"]}}),
    ("no-such-split", "a split that is not there", "dataset.split", {"dataset": {"split": "holdout"}}),
    ("split-of-nonsense", "a slice that is none", "dataset.split", {"dataset": {"split": "train[five:]"}}),
    ("split-of-nothing", "a slice without rows", "dataset.split|no rows", {"dataset": {"split": "train[100:200]"}}),
    ("hub-config-of-a-folder", "a hub configuration of a file", "dataset", {"dataset": {"path": ".", "name": "mrpc"}}),
    ("files-of-a-file", "files inside a file", "dataset.data_files", {"dataset": {"data_files": "*.jsonl"}}),
    ("data-is-the-model", "a model for data", "dataset.path", {"dataset": {"path": BERT}}),
    ("run-is-the-data", "the run folder is the data", "checkpoint.checkpoint_dir", {"checkpoint": {"checkpoint_dir": "train.jsonl"}}),
    ("run-in-the-data", "the run folder lies in the data", "checkpoint.checkpoint_dir", {"dataset": {"path": "."}}),
    ("run-is-the-model", "the run folder is the model", "checkpoint.checkpoint_dir|model.pretrained",
     {"checkpoint": {"checkpoint_dir": BERT}}),
    ("run-below-a-file", "a folder inside a file", "checkpoint.checkpoint_dir", {"checkpoint": {"checkpoint_dir": "train.jsonl/out"}}),
    ("run-on-the-roof", "a folder where nobody may write", "checkpoint.checkpoint_dir", {"checkpoint": {"checkpoint_dir": "/proc/out"}}),
    ("cache-is-a-file", "a cache that is a file", "dataset.cache_dir|cache", {"dataset": {"cache_dir": "train.jsonl"}}),
    ("adapter-nowhere", "an adapter that is not there", "peft.pretrained_adapter", {"peft": {"pretrained_adapter": "./adapter"}}),
    ("modules-nowhere", "modules that the model does not have", "peft.target_modules", {"peft": {"target_modules": ["q_projection"]}}),
    ("modules-no-pattern", "a pattern that is none", "peft.target_modules", {"peft": {"target_modules": "(attention"}}),
    ("modules-all-excluded", "no module is left", "peft", {"peft": {"exclude_modules": ["*"]}}),
    ("saved-modules-nowhere", "modules that the model does not have", "peft.modules_to_save", {"peft": {"modules_to_save": ["nose"]}}),
    ("rank-of-its-adapter", "a rank above any matrix", "peft.dim", {"peft": {"dim": 100000}}),
    ("optimizer-closure", "an optimizer that needs a closure", "optimizer._target_", {"optimizer": {"_target_": "torch.optim.lbfgs.LBFGS"}}),
    ("optimizer-sparse", "an optimizer of sparse gradients", "optimizer._target_",
     {"optimizer": {"_target_": "torch.optim.sparse_adam.SparseAdam"}}),
    ("optimizer-of-nobody", "a class that does not exist", "optimizer._target_", {"optimizer": {"_target_": "torch.optim.AdamX"}}),
    ("optimizer-a-module", "a module", "optimizer._target_", {"optimizer": {"_target_": "torch.optim"}}),
    ("optimizer-os-system", "a function of Python's own", "optimizer._target_", {"optimizer": {"_target_": "os.system"}}),
    ("optimizer-twice", "a name, and a class", "optimizer.name", {"optimizer": {"name": "sgd", "_target_": "torch.optim.AdamW"}}),
    ("optimizer-argument", "an argument it does not have", "optimizer.momentum", {"optimizer": {"momentum": 0.9}}),
    ("optimizer-refuses", "arguments that do not fit together", "optimizer", {"optimizer": {"name": "sgd", "nesterov": True}}),
    ("optimizer-momentum", "a momentum of two", "optimizer.momentum", {"optimizer": {"name": "sgd", "momentum": 2}}),
    ("optimizer-word", "a word for a number", "optimizer.momentum", {"optimizer": {"name": "sgd", "momentum": "much"}}),
    ("loss-of-nobody", "a loss that does not exist", "loss_fn._target_", {"loss_fn": {"_target_": "torch.nn.HuberLoss"}}),
    ("dataset-of-nobody", "a class that is not trusted", "dataset._target_", {"dataset": {"_target_": "my_rows.Rows"}}),
    ("smoothing-of-a-regression", "a cross-entropy's key", "loss_fn|label_smoothing",
     {"model": {"problem_type": "regression", "num_labels": 1}, "loss_fn": {"label_smoothing": 0.1}}),
    ("ranks-that-do-not-divide", "replicas that do not divide the ranks", "distributed.dp_replicate_size",
     {"distributed": {"strategy": "fsdp2", "dp_size": 4, "dp_replicate_size": 3}}),
    ("tensor-parallel-ddp", "cut matrices without fsdp2", "distributed", {"distributed": {"strategy": "ddp", "tp_size": 2}}),
    ("fp8-of-nobody", "a recipe that does not exist", "fp8.recipe_name", {"fp8": {"recipe_name": "blockwise"}}),
    ("prompt-of-gigabytes", "a width of 10 billion", "dataset.prompt_template", {"dataset": {"prompt_template": "{question:>9999999999}"}},
     "language"),
    ("prompt-of-nobody", "a column that is not there", "dataset.prompt_template", {"dataset": {"prompt_template": "{query}"}}, "language"),
    ("prompt-without-columns", "no place for a column", "dataset.prompt_template", {"dataset": {"prompt_template": "Say it."}}, "language"),
    ("prompt-with-its-answer", "the answer is in the prompt", "dataset",
     {"dataset": {"prompt_template": "{question} {answer}", "target_column": "answer"}}, "language"),
    ("mapping-of-nobody", "a column that is not there", "dataset.column_mapping",
     {"dataset": {"column_mapping": {"question": "query", "answer": "answer"}}}, "language"),
    ("mapping-without-answer", "no answer to learn", "dataset.column_mapping", {"dataset": {"column_mapping": {"question": "question"}}},
     "language"),
    ("template-nowhere", "a template that is not there", "dataset.chat_template", {"dataset": {"chat_template": "nowhere.jinja"}}, "language"),
    ("messages-nowhere", "a column that is not there", "dataset.messages_column", {"dataset": {"messages_column": "talks"}}, "language"),
    ("labels-of-a-language-model", "classes of a language model", "dataset.labels", {"dataset": {"labels": ["a", "b"]}}, "language"),
    ("classes-of-a-language-model", "classes of a language model", "model.num_labels", {"model": {"num_labels": 2}}, "language"),
    ("source-nowhere", "a column that is not there", "dataset.source_column", {"dataset": {"source_column": "from"}}, "pairs"),
    ("target-is-source", "the source is to be learned", "dataset", {"dataset": {"source_column": "source", "target_column": "source"}}, "pairs"),
    ("language-of-t5", "a language code of a model without", "dataset.target_lang", {"dataset": {"target_lang": "de_DE"}}, "pairs"),
    ("classifier-of-t5-rows", "a language model of a classifier", "task|model", {"task": "causal-lm"}),
]  # fmt: skip

SETTINGS: list[tuple] = [
    ("setting-without-value", "no value", "dataset.path", "dataset.path="),
    ("setting-without-equals", "no equals sign", "optimizer", "optimizer.lr"),
    ("setting-with-spaces", "an equals sign on its own", "=|lr", "optimizer.lr", "=", "1e-5"),
    ("setting-of-nothing", "an empty key", "empty key", "=3"),
    ("setting-with-two-dots", "an empty key", "empty key", "optimizer..lr=1"),
    ("setting-in-a-number", "a key in a number", "seed", "seed.value=3"),
    ("setting-beyond-a-list", "the fifth of no tags", "wandb.tags", "wandb.tags.5=x"),
    ("setting-of-a-name", "a name for an item", "wandb.tags", "wandb.tags=[a]", "wandb.tags.first=x"),
    ("setting-of-a-superscript", "a sign that is no number", "wandb.tags", "wandb.tags=[a]", "wandb.tags.²=x"),
    ("setting-of-trust", "trust as a setting", "trust", "trust=[os]"),
    ("setting-deep", "thousands of keys inside each other", "letters", "model." + "a." * 3000 + "b=1"),
    ("setting-deep-list", "thousands of lists inside each other", "seed", "seed=" + "[" * 5000 + "]" * 5000),
    ("setting-deep-json", "thousands of objects inside each other", "optimizer", "optimizer=" + '{"a":' * 3000 + "1" + "}" * 3000),
    ("setting-of-digits", "a number of 5,000 digits", "seed", "seed=" + "9" * 5000),
    ("setting-steps-without-end", "10²⁶ steps", "step_scheduler.max_steps", "step_scheduler.max_steps=1e26"),
    ("setting-rate-of-ten-billion", "an absurd learning rate", "optimizer.lr", "optimizer.lr=1e10"),
    ("setting-of-half-letters", "bytes that are no letters", "model", "model=\udc80\udc81"),
    ("setting-of-another-tool", "a key of TrainingArguments", "per_device_train_batch_size", "--per_device_train_batch_size", "8"),
    ("setting-of-a-section", "a list for a section", "optimizer", "optimizer=[adamw]"),
    ("setting-to-null", "no model", "model", "model=null"),
    ("setting-of-an-open-bracket", "a list that is not closed", "optimizer.betas", "optimizer.betas=[0.9,"),
    ("setting-of-three-betas", "three of two numbers", "optimizer.betas", "optimizer.betas=[0.9, 0.99, 0.999]"),
    ("setting-of-a-variable", "a variable that is not set", "NO_SUCH_VARIABLE_HERE", "seed=${NO_SUCH_VARIABLE_HERE}"),
    ("setting-of-half-a-variable", "a variable that is not closed", "seed", "seed=${SEED"),
]  # fmt: skip

_SMALL = f"model: {BERT}\ntask: text-classification\ndataset: train.jsonl\n"
NO_CONFIGS: list[tuple] = [
    ("file-empty", "an empty file", r"run\.yaml", "run.yaml", b""),
    ("file-of-comments", "comments alone", r"run\.yaml", "run.yaml", b"# nothing\n\n# at all\n"),
    ("file-of-a-list", "a list", r"run\.yaml", "run.yaml", b"- model\n- dataset\n"),
    ("file-of-a-word", "a word", r"run\.yaml", "run.yaml", b"bert-base-uncased\n"),
    ("file-latin", "letters of an old encoding", r"run\.yaml", "run.yaml", (_SMALL + "wandb: {notes: caf\xe9}\n").encode("latin-1")),
    ("file-utf16", "a file in UTF-16", r"run\.yaml", "run.yaml", _SMALL.encode("utf-16")),
    ("file-of-bytes", "no text at all", r"run\.yaml", "run.yaml", bytes(range(256)) * 40),
    ("file-of-nul", "NUL bytes", r"run\.yaml", "run.yaml", _SMALL.encode() + b"\0\0\0"),
    ("file-of-data", "a file of rows", r"train\.json", "train.json", REVIEWS * 2000),
    ("file-deep-yaml", "thousands of lists", r"run\.yaml", "run.yaml", (_SMALL + "peft: " + "[" * 5000 + "]" * 5000).encode()),
    ("file-deep-blocks", "a thousand levels of indentation", r"run\.yaml", "run.yaml",
     "".join(f"{' ' * n}a:\n" for n in range(1000)).encode()),
    ("file-deep-json", "thousands of objects", r"run\.json", "run.json", ('{"model": ' + '{"a": ' * 5000 + "1" + "}" * 5001).encode()),
    ("file-bomb", "aliases of aliases", r"run\.yaml", "run.yaml",
     (_SMALL + "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
         f"{chr(b)}: &{chr(b)} [{','.join(['*' + chr(b - 1)] * 9)}]\n" for b in range(98, 110))).encode()),
    ("file-chain", "aliases inside aliases", r"run\.yaml", "run.yaml",
     (_SMALL + "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))).encode()),
    ("file-json-cut", "JSON that breaks off", r"run\.json", "run.json", b'{"model": "bert", "dataset": "tra'),
    ("file-json-comma", "two values without a comma", r"run\.json", "run.json", b'{"model": "bert" "dataset": "train.jsonl"}'),
]  # fmt: skip

WHOLE_FILES: list[tuple] = [
    ("yaml-tab", "a tab for indentation", r"run\.yaml:", _SMALL + "optimizer:\n\tlr: 1\n"),
    ("yaml-two-keys", "two keys on a line", r"run\.yaml:", _SMALL + "optimizer: lr: 1e-5\n"),
    ("yaml-open-quote", "a quote that is not closed", r"run\.yaml:", _SMALL + "wandb: {notes: 'open}\n"),
    ("yaml-open-bracket", "a bracket that is not closed", r"run\.yaml:", _SMALL + "optimizer: {betas: [0.9, 0.99}\n"),
    ("yaml-indentation", "lines that do not line up", r"run\.yaml:", _SMALL + "optimizer:\n    lr: 1e-5\n  eps: 1e-8\n"),
    ("yaml-two-documents", "a second document", r"run\.yaml:", _SMALL + "---\nseed: 1\n"),
    ("yaml-no-colon", "a line without a colon", r"run\.yaml:", _SMALL + "seed\n"),
    ("yaml-alias", "an alias of nothing", r"run\.yaml:", _SMALL + "optimizer: *defaults\n"),
    ("yaml-tag", "a tag that would make an object", r"run\.yaml:", _SMALL + "seed: !!python/object/apply:os.system [ls]\n"),
    ("yaml-merge-number", "a merge key with a number", "<<", _SMALL + "<<: 3\n"),
    ("yaml-merge-list", "a merge key with a list of texts", "<<", _SMALL + "<<: [a, b]\n"),
    ("yaml-list-key", "a list as a key", r"run\.yaml:", _SMALL + "[a, b]: 3\n"),
    ("yaml-twice", "a key twice", "seed", _SMALL + "seed: 1\nseed: 2\n"),
    ("yaml-section-twice", "a section twice", "optimizer", _SMALL + "optimizer: {lr: 1e-5}\noptimizer: {eps: 1e-8}\n"),
    ("yaml-nul", "a NUL character", "dataset", f'model: {BERT}\ndataset: "train\\0.jsonl"\n'),
    ("yaml-half-letter", "half of a letter", "dataset", f'model: {BERT}\ndataset: "train\\ud800.jsonl"\n'),
    ("yaml-octal", "a number with a zero before it", "seed", _SMALL + "seed: 007\n"),
    ("yaml-sexagesimal", "hours and minutes", "seed", _SMALL + "seed: 1:30\n"),
    ("yaml-date", "a date", "seed", _SMALL + "seed: 2024-01-01\n"),
    ("yaml-variable", "a variable that is not set", "NO_SUCH_VARIABLE_HERE", _SMALL + "seed: ${NO_SUCH_VARIABLE_HERE}\n"),
    ("yaml-nested-target", "a target where none is built", "_target_", _SMALL + "seed: {_target_: os.system}\n"),
    ("yaml-long-key", "a key of 900 letters", r"run\.yaml", _SMALL + "k" * 900 + ": 1\n"),
    ("yaml-seed-beyond", "a seed of 65 bits", "seed", _SMALL + f"seed: {2**64}\n"),
    ("yaml-digits", "a number of 5,000 digits", "step_scheduler.max_steps", _SMALL + f"step_scheduler: {{max_steps: {'9' * 5000}}}\n"),
    ("axolotl", "a file of Axolotl", "base_model|sequence_len", "base_model: bert\nsequence_len: 512\ndatasets: [{path: x}]\n"),
]  # fmt: skip

FLAT: list[tuple] = [
    ("flat-rank", "an absurd rank", "peft|lora_r", '{"lora_r": 1000000, "lora_alpha": 16}'),
    ("flat-word", "a word for a number", "per_device_train_batch_size|batch_size", '{"per_device_train_batch_size": "four"}'),
    ("flat-deep", "thousands of objects", r"flat\.json", '{"lora_r": ' + '{"a": ' * 3000 + "1" + "}" * 3001),
    ("flat-both", "4 and 8 bits", "quantization", '{"use_4bit": true, "use_8bit": true, "lora_r": 8}'),
    ("flat-optimizer", "an optimizer that does not exist", "optimizer.name", '{"optim": "adamax_3bit", "lora_r": 8}'),
    ("flat-nobody", "a key that nobody knows", "favourite_colour", '{"favourite_colour": "blue", "lora_r": 8}'),
    ("flat-twice", "a key twice", "lora_r", '{"lora_r": 8, "lora_r": 16}'),
    ("flat-list", "a list of settings", r"flat\.json", '[{"lora_r": 8}]'),
    ("flat-steps", "steps without end", "max_steps", '{"lora_r": 8, "max_steps": 1e26}'),
    ("flat-rate", "a negative rate", "lr|learning_rate", '{"lora_r": 8, "learning_rate": -1e-4}'),
]  # fmt: skip
