"""Configs, tokenizers and weights in: from what the user named to a model ready to train.

Three rules. Only safetensors are read: pickled weights run code when they are opened. What is missing from a checkpoint
is either expected (a new classification head; one log line) or an error (any part of the backbone). And everything
random (a new head, a model from its config alone) depends on the seed and on nothing that ran before.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from automodel.config.errors import UserError
from automodel.models.angles import KEYS_OF_ANGLES, with_own_angles
from automodel.models.auto_class import forget_code_that_is_not_run
from automodel.models.config import ModelConfig
from automodel.models.config_values import check_sizes, check_values, no_model_of
from automodel.models.file_checks import (
    CONFIG,
    check_attributes,
    check_config,
    check_no_adapter,
    check_tokenizer,
    check_weights,
    read_json,
)
from automodel.models.quiet import quiet_transformers
from automodel.models.source import Source, find_model, find_tokenizer
from automodel.models.task_head import POOLED, TaskHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ModelLimits",
    "count_parameters",
    "load_hf_config",
    "load_model",
    "load_tokenizer",
    "model_limits",
    "read_hf_config",
    "without_memory",
]

logger = logging.getLogger(__name__)

_POSITIONS_AFTER_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "roberta-prelayernorm",
    "data2vec-text",
    "longformer",
    "mpnet",
    "ibert",
    "xmod",
    "esm",
    "luke",
)
_PAD_CANDIDATES = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|padding|>", "<|PAD_TOKEN|>")


def load_hf_config(
    cfg: ModelConfig,
    head: TaskHead,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    problem_type: str | None = None,
) -> PreTrainedConfig:
    """The model's config with the run's labels and the file's extra attributes in it."""
    source = find_model(cfg)
    said = {} if cfg.attn_implementation is None else {"attn_implementation": cfg.attn_implementation}
    check_attributes(cfg.extra | said, cfg.trust_remote_code)
    if not (cfg.target or "").endswith(".from_config"):
        check_weights(source)
    wanted = {**cfg.extra, **_given_names(cfg.extra.get("id2label"), cfg.num_labels)}
    labels = _label_attributes(cfg, head, num_labels, label_names, problem_type)
    if wanted.keys() & KEYS_OF_ANGLES:
        wanted = with_own_angles(wanted, getattr(_read_config(source, {})[0], "rope_parameters", None))
    config, unused = _read_config(source, {**wanted, **labels})
    unknown = [key for key in wanted if key in unused]
    if unknown:
        raise UserError("\n".join(_unknown_attribute(key, config) for key in unknown))
    check_values(config, place_of(cfg))
    return config


def place_of(cfg: ModelConfig) -> Callable[[str], str]:
    """Where a key of the model's config was said, in words."""

    name = cfg.pretrained_model_name_or_path

    def place(key: str) -> str:
        first = key.partition(".")[0]
        return f"model.{key}" if first in cfg.extra else f"model: the config of {name!r} says {key}"

    return place


def _given_names(id2label: Any, num_labels: int | None) -> dict[str, Any]:
    """`model.id2label` as transformers wants it: YAML and the command line write its numbers as text."""
    if id2label is None:
        return {}
    try:
        names = {int(number): str(name) for number, name in dict(id2label).items()}
    except (TypeError, ValueError):
        names = {}
    if not names or sorted(names) != list(range(len(names))) or len(set(names.values())) < len(names):
        raise UserError(f"model.id2label must number different names from 0 on, as {{0: neg, 1: pos}}; got {id2label}.")
    if num_labels is not None and num_labels != len(names):
        raise UserError(
            f"model.id2label has {len(names)} names, but model.num_labels is {num_labels}; make them agree."
        )
    return {"id2label": dict(sorted(names.items())), "label2id": {name: number for number, name in names.items()}}


def read_hf_config(cfg: ModelConfig) -> PreTrainedConfig:
    """The model's config as it lies there, for a run that does not say its task yet."""
    return _read_config(find_model(cfg), {})[0]


def _label_attributes(
    cfg: ModelConfig,
    head: TaskHead,
    num_labels: int | None,
    label_names: Sequence[str] | None,
    problem_type: str | None,
) -> dict[str, Any]:
    """Config attributes of a classification head."""
    if not head.has_classes:
        return {}
    count = num_labels if num_labels is not None else cfg.num_labels
    if label_names is not None and count is not None and len(label_names) != count:
        raise UserError(
            f"model.num_labels: the head is to have {count} classes, but there are {len(label_names)} class names "
            f"({', '.join(label_names[:5])}{', …' if len(label_names) > 5 else ''}); make them agree"
        )
    attributes: dict[str, Any] = {}
    if label_names is not None:
        attributes["id2label"] = dict(enumerate(label_names))
        attributes["label2id"] = {name: i for i, name in enumerate(label_names)}
    elif count is not None:
        attributes["num_labels"] = count
    kind = problem_type or cfg.problem_type
    if kind is not None and head.wants == "pooled":  # the data of taggers has one, too
        attributes["problem_type"] = kind
    return attributes


def _read_config(source: Source, attributes: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """transformers' `AutoConfig`, with its errors put in words; also what it did not recognise."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_config(source)
    check_sizes(read_json(source, CONFIG) or {}, lambda key: f"model: {CONFIG} of {source.name!r} says {key}")
    check_sizes(attributes, lambda key: f"model.{key}")
    try:
        with quiet_transformers():
            found = AutoConfig.from_pretrained(source.name, return_unused_kwargs=True, **source.keywords, **attributes)
            _validate(found[0])
        if not source.trusted:
            forget_code_that_is_not_run(found[0])
            forget_absent_attention(found[0])
        return found
    except StrictDataclassError as error:
        about = _culprit(source, attributes)
        raise UserError(f"model: the config of {source.name!r} is not valid: {_one_line(error)}.{about}") from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"model: {source.name!r} comes with code of its own, which is not run unless you say so: set "
                "`model.trust_remote_code: true` and pass `--trust remote_code` on the command line, if you trust it"
            ) from error
        raise UserError(f"model: {source.name!r} is not a model transformers knows: {_one_line(error)}") from error
    except OSError as error:
        raise UserError(f"model: the config of {source.name!r} could not be read: {_one_line(error)}") from error
    except Exception as error:  # values of another form than the family's code expects
        raise _not_of_this_family(source, attributes, error) from error


def _validate(config: PreTrainedConfig) -> None:
    """transformers' own check once more: attributes of the run come after it, and saving would make it again."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        config.validate()
    except StrictDataclassError:
        raise
    except Exception as error:  # a check that cannot be made: keys that are filled in when modules are made
        logger.debug("%s was not checked again: %r", config.model_type, error)


def _not_of_this_family(source: Source, attributes: dict[str, Any], error: Exception) -> UserError:
    what, kind = f"{type(error).__name__}: {_one_line(error)}", (read_json(source, CONFIG) or {}).get("model_type")
    about = _culprit(source, attributes)
    return UserError(f"model: the config of {source.name!r} is none of a {kind} model ({what}).{about}")


def _culprit(source: Source, attributes: dict[str, Any]) -> str:
    """The key without which the config can be made, as a sentence; nothing where there is no such key."""
    said = {**(read_json(source, CONFIG) or {}), **attributes}
    found = None if _makes_a_config(said) else next((key for key in said if _makes_a_config(said, key)), None)
    if found is None:
        return ""
    value = " ".join(repr(said[found]).split())[:100]
    return f" It is about `{found}: {value}`: correct it in config.json, or say it under `model:`."


def _makes_a_config(said: dict[str, Any], without: str | None = None) -> bool:
    from transformers import CONFIG_MAPPING

    try:
        with quiet_transformers():
            CONFIG_MAPPING[said["model_type"]].from_dict({k: copy.deepcopy(v) for k, v in said.items() if k != without})
    except Exception:
        return False
    return True


def forget_absent_attention(config: PreTrainedConfig) -> None:
    """A file may name flash attention, which transformers downloads where it is not installed: then the choice is
    left to transformers, which takes what torch has. The function is the same."""
    from automodel.models.auto import attention_to_use

    parts: list[Any] = [config, *(getattr(config, name, None) for name in type(config).sub_configs)]
    for part in parts:
        named = getattr(part, "_attn_implementation", None)
        if isinstance(named, str) and attention_to_use(named, None) is None:
            part._attn_implementation_internal = None


def _unknown_attribute(key: str, config: PreTrainedConfig) -> str:
    known = [name for name in config.to_dict() if not name.startswith("_")] + list(config.attribute_map)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"model.{key}: {config.model_type} models have no attribute of this name{hint}"


def load_tokenizer(cfg: ModelConfig, hf_config: PreTrainedConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token. Nothing is added to the vocabulary, so embeddings keep their size."""
    from transformers import AutoTokenizer

    source = find_tokenizer(cfg)
    check_tokenizer(source)
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(source.name, **source.keywords)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # no common type: OSError, ValueError, ImportError, and panics of Rust code
        raise UserError(
            f"model.tokenizer: no tokenizer could be read from {source.name!r}: {_one_line(error)}. Set "
            "`model.tokenizer` to a hub name or folder that has one."
        ) from error
    if _reads_nothing(tokenizer):
        raise UserError(
            f"model.tokenizer: {source.name!r} holds no vocabulary (tokenizer.json, or what it has instead): "
            "only special tokens came out. Save the tokenizer there too, or set `model.tokenizer` to a hub name or "
            "folder that has one."
        )
    if tokenizer.pad_token is None:
        _choose_pad_token(tokenizer, source.name)
    _check_size(tokenizer, source.name, getattr(hf_config, "vocab_size", None))
    return tokenizer


def _reads_nothing(tokenizer: Any) -> bool:
    """Whether it has no words. Where transformers finds no vocabulary, it makes a tokenizer of the special and added
    tokens that `tokenizer_config.json` lists (22 for Qwen, 256 for Llama 3)."""
    no_word = {tokenizer.unk_token, "▁"}  # the mark of a word's beginning
    ids = tokenizer("Some text, 1.", add_special_tokens=False)["input_ids"]
    if not no_word.issuperset(tokenizer.convert_ids_to_tokens(ids)):
        return False
    return {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), *no_word}.issuperset(tokenizer.get_vocab())


def _check_size(tokenizer: Any, name: str, rows: int | None) -> None:
    """Whether the model's embedding has a row for each token. Tokens that were added to the vocabulary may lie beyond
    it, as long as no text has them (Gemma 3's `<image_soft_token>`): the data is looked through for these."""
    if rows is None or len(tokenizer) <= rows:
        return
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"model.tokenizer: the tokenizer of {name!r} has {len(tokenizer)} tokens, but the model's embedding "
            f"only {rows} (vocab_size); they do not belong together"
        )
    for kind in ("pad", "eos", "bos"):
        if (getattr(tokenizer, f"{kind}_token_id") or 0) >= rows:
            token, number = getattr(tokenizer, f"{kind}_token"), getattr(tokenizer, f"{kind}_token_id")
            raise UserError(
                f"model.tokenizer: the {kind} token {token!r} of {name!r} has the id {number}, but the model's "
                f"embedding only {rows} rows: it was added to the tokenizer alone. Save the model with "
                "`resize_token_embeddings(len(tokenizer))`, or the tokenizer with another token."
            )


def _choose_pad_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    vocabulary = tokenizer.get_vocab()
    choice = next((token for token in _PAD_CANDIDATES if token in vocabulary), None) or tokenizer.eos_token
    if choice is None:
        raise UserError(
            f"model.tokenizer: the tokenizer of {name!r} has neither a pad nor an end-of-text token to pad with"
        )
    tokenizer.pad_token = choice
    logger.info("the tokenizer of %s has no pad token: %r is used", name, choice)


def load_model(
    cfg: ModelConfig,
    hf_config: PreTrainedConfig,
    head: TaskHead,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 42,
) -> PreTrainedModel:
    """The plain Hugging Face model with its weights, on `device`. A `_target_` ending in `.from_config` starts from
    random weights."""
    from automodel.models.auto import class_for

    auto_class = class_for(head)
    hf_config = copy.deepcopy(hf_config)  # the model's attention is switched later, and must not travel with the config
    asked = {
        "attn_implementation": cfg.attn_implementation,
        "use_sdpa_patching": cfg.use_sdpa_patching,
        "use_liger_kernel": cfg.use_liger_kernel,
    }
    drawing = torch.device(device)
    with torch.random.fork_rng([drawing] if drawing.type == "cuda" else []), quiet_transformers():
        torch.manual_seed(seed)
        if (cfg.target or "").endswith(".from_config"):
            logger.info("%s starts from random weights (from_config)", cfg.pretrained_model_name_or_path)
            with drawing:  # a billion random numbers take half a minute on a processor, and no time on a GPU
                model = auto_class.from_config(hf_config, dtype=dtype, trust_remote_code=cfg.trust_remote_code, **asked)
        else:
            model = _load_weights(auto_class, find_model(cfg), hf_config, head, dtype, asked)
    return model.to(device)


def _load_weights(
    auto_class: Any,
    source: Source,
    hf_config: PreTrainedConfig,
    head: TaskHead,
    dtype: torch.dtype,
    asked: dict[str, Any],
) -> Any:
    from safetensors import SafetensorError

    check_weights(source)
    check_no_adapter(source)
    try:
        model, report = auto_class.from_pretrained(
            source.name,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below: a new head may differ, the backbone may not
            **source.keywords,
            **source.keywords_for_adapters,
            **asked,
        )
    except SafetensorError as error:
        raise UserError(
            f"model: the weights of {source.name!r} are damaged ({_one_line(error)}); {source.good_weights}"
        ) from error
    except OSError as error:
        if _has_only_pickled_weights(source):
            raise UserError(
                f"model: {source.name!r} has only pickled weights (pytorch_model.bin), which can run code when opened "
                "and are not loaded. Convert them once where you trust them: load them with transformers and "
                "`save_pretrained`, or use a revision with safetensors."
            ) from error
        raise UserError(f"model: the weights of {source.name!r} could not be read: {_one_line(error)}") from error
    _check_what_was_loaded(model, report, source.name, head)
    return model


def _has_only_pickled_weights(source: Source) -> bool:
    pickled = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    if source.folder is not None:
        return any((source.folder / name).exists() for name in pickled)
    from huggingface_hub import try_to_load_from_cache

    keywords = {key: source.keywords[key] for key in ("cache_dir", "revision") if key in source.keywords}
    return any(isinstance(try_to_load_from_cache(source.name, name, **keywords), str) for name in pickled)


def is_new_head(model: Any, key: str, head: TaskHead) -> bool:
    """Whether a checkpoint may lack this weight: heads of classifiers are new to most models."""
    return head.has_classes and (not key.startswith(f"{model.base_model_prefix}.") or ".pooler" in key)


def _check_what_was_loaded(model: Any, report: dict[str, Any], name: str, head: TaskHead) -> None:
    """New classification heads are expected and said; anything else that the checkpoint lacks is an error."""
    missing = sorted(report["missing_keys"])
    mismatched = {key: (tuple(theirs), tuple(ours)) for key, theirs, ours in report["mismatched_keys"]}
    lost = [key for key in missing if not is_new_head(model, key, head)]
    if lost:
        raise UserError(
            f"model: {name!r} lacks {len(lost)} weights that a {type(model).__name__} needs: {_few(lost)}. "
            "It is not a checkpoint of this architecture, or not a complete one; use `from_config` for random weights."
        )
    refuse_other_shapes(name, model.config, {k: v for k, v in mismatched.items() if not is_new_head(model, k, head)})
    model.newly_initialised = frozenset([*missing, *mismatched])  # an adapter must bring these along
    if missing:
        logger.info("newly initialised: %s", _few(missing))
    if mismatched:
        logger.info("newly initialised, since the checkpoint's head has other classes: %s", _few(sorted(mismatched)))


def refuse_other_shapes(name: str, config: PreTrainedConfig, shapes: dict[str, tuple[tuple, tuple]]) -> None:
    """`shapes`: of weights, in the checkpoint and by the config. Keys with a size that only the config has are said."""
    other = {key: both for key, both in shapes.items() if both[0] != both[1]}
    if not other:
        return
    wrong = [f"{key} {theirs} in the checkpoint, {ours} here" for key, (theirs, ours) in other.items()]
    sizes = {size for theirs, ours in other.values() for size in set(ours) - set(theirs)}
    text = vars(config.get_text_config())
    keys = [f"{key}: {value}" for key, value in text.items() if type(value) is int and value in sizes]
    about = f" The config says {', '.join(keys[:3])}." if keys else ""
    raise UserError(
        f"model: weights of {name!r} do not fit the config: {_few(sorted(wrong))}.{about} Remove the attributes under "
        "`model:` that change sizes, or correct config.json."
    )


def count_parameters(hf_config: PreTrainedConfig, head: TaskHead, **keywords: Any) -> int:
    """Parameters of the model (tied ones once), counted without allocating any. `keywords`: of `from_config`."""
    return sum(parameter.numel() for parameter in without_memory(hf_config, head, **keywords).parameters())


def without_memory(hf_config: PreTrainedConfig, head: TaskHead, **keywords: Any) -> PreTrainedModel:
    """The model on torch's `meta` device: modules, names and shapes, but no numbers. `keywords`: of `from_config`."""
    from transformers.initialization import no_init_weights

    from automodel.models.auto import class_for

    # Drawing random numbers, even for tensors without memory, would import torch's compiler: a second.
    with torch.device("meta"), quiet_transformers(), no_init_weights():
        model = class_for(head).from_config(hf_config, **keywords)
    model.tie_weights()  # part of the initialisation that was left out
    return model


def skeleton_of(cfg: ModelConfig, hf_config: PreTrainedConfig, head: TaskHead) -> PreTrainedModel:
    """`without_memory` for a run: says which keys of the config cannot be, where no model can be made of them."""
    try:
        return without_memory(hf_config, head, trust_remote_code=cfg.trust_remote_code)
    except UserError:
        raise
    except ImportError as error:  # the family needs a package
        raise UserError(f"model: {cfg.pretrained_model_name_or_path!r} cannot be made: {_one_line(error)}") from error
    except Exception as error:
        raise no_model_of(hf_config, error, place_of(cfg)) from error


@dataclass(frozen=True)
class ModelLimits:
    """What the data room must respect."""

    max_positions: int | None
    """Longest sequence in tokens; None: no limit of the architecture."""
    type_vocab_size: int
    """How many segment ids the model takes; 0: none."""


def model_limits(hf_config: PreTrainedConfig, head: TaskHead = POOLED) -> ModelLimits:
    """Limits read from the config; RoBERTa's positions start after its padding index, so two of its 514 are lost."""
    positions = getattr(hf_config, "max_position_embeddings", None)
    if isinstance(positions, int) and hf_config.model_type in _POSITIONS_AFTER_PADDING:
        positions -= (hf_config.pad_token_id or 0) + 1
    if not isinstance(positions, int) or positions <= 0:
        positions = None
    types = getattr(hf_config, "type_vocab_size", 0) or 0
    return ModelLimits(positions, types if types and _takes_token_types(hf_config, head) else 0)


def _takes_token_types(hf_config: PreTrainedConfig, head: TaskHead) -> bool:
    from automodel.models.auto import class_for

    mapping = class_for(head)._model_mapping
    if type(hf_config) not in mapping:
        return False
    return "token_type_ids" in inspect.signature(mapping[type(hf_config)].forward).parameters


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _few(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
