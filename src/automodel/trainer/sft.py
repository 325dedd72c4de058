"""`SFTTrainer` and `SFTConfig`: supervised tuning with TRL's names and arguments, on our Trainer.

    from automodel import SFTConfig, SFTTrainer
    SFTTrainer("Qwen/Qwen3-0.6B", SFTConfig("out", assistant_only_loss=True), train_dataset=data).train()

Written from TRL's documented arguments; TRL itself is not needed. Rows become tokens and labels when the trainer is
made (`sft_rows.py`), and from there on it is the drop-in Trainer. Two defaults are not TRL's: `gradient_checkpointing`
is off (packed batches need less memory; with it steps are not captured), and `bf16` is on only where the GPU has it.
What TRL's arguments ask for and is not here is refused by name.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from automodel.config.errors import UserError, WrongTypeError
from automodel.models.drop_in import counting_tokens
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.sft_metrics import MODES, LineMetrics
from automodel.trainer.sft_packing import STRATEGIES, FlatCollator, packed_rows
from automodel.trainer.sft_rows import RowFormat, columns_of, prepared
from automodel.trainer.trainer import Trainer

REFUSED = {
    "chat_template_path": "set tokenizer.chat_template",
    "activation_offloading": "use `automodel finetune` with training_optimizations.activation_offload",
}


@dataclass(init=False)
class SFTConfig(TrainingArguments):
    """`TrainingArguments` and what TRL's SFTConfig adds to them."""

    model_init_kwargs: dict | None = None
    """Arguments of `from_pretrained`, where the model is given by its name."""
    dataset_text_field: str = "text"
    """The column of plain texts."""
    dataset_num_proc: int | None = None
    """Processes that tokenise."""
    max_length: int | None = 1024
    """Longest row in tokens; longer ones are cut. None: no limit."""
    packing: bool = False
    """Fill rows of `max_length` tokens with several documents, which never see each other."""
    packing_strategy: str = "bfd"
    """`bfd`, `bfd_split` or `wrapped` (`sft_packing.py`)."""
    eval_packing: bool | None = None
    """None: as `packing`."""
    shuffle_dataset: bool = False
    """Shuffle once, when rows are made; with packing before it, too."""
    dataset_kwargs: dict | None = None
    """`{"skip_prepare_dataset": True}`: the dataset is used as it is."""
    truncation_mode: str = "keep_start"
    eos_token: str | None = None
    """Ends texts instead of the tokenizer's own."""
    pad_token: str | None = None
    trust_remote_code: bool = False
    """Models and tokenizers, given by name, may bring code of their own."""
    padding_free: bool = False
    """There is no padding in any case; with this, documents of tokenised rows (`seq_lengths`) are kept apart."""
    pad_to_multiple_of: int | str | None = None
    """Accepted: a number, or TRL's `auto`, which on these devices means none."""
    completion_only_loss: bool | None = None
    """Learn completions alone; None: where rows have `prompt` and `completion`."""
    assistant_only_loss: bool = False
    """Learn what the assistant says alone."""
    router_aux_loss_coef: float | None = None
    """How much the loss of a mixture's router counts; None: as the model's config says, 0: not at all."""
    loss_type: str = "nll"

    def __init__(self, output_dir: str | None = None, *args: Any, **given: Any):
        for name, instead in REFUSED.items():
            if given.pop(name, None):
                raise UserError(f"SFTConfig({name}=…) is not part of this trainer: {instead}.")
        if "max_seq_length" in given:  # its name until TRL 0.20
            given["max_length"] = given.pop("max_seq_length")
        for name in SFTConfig.__annotations__:
            setattr(self, name, given.pop(name, getattr(SFTConfig, name)))
        if self.loss_type != "nll":
            raise UserError(f"SFTConfig(loss_type={self.loss_type!r}): only 'nll', the ordinary loss, is here.")
        if self.packing_strategy not in STRATEGIES:
            raise UserError(
                f"SFTConfig(packing_strategy={self.packing_strategy!r}): give one of {', '.join(STRATEGIES)}."
            )
        if self.truncation_mode != "keep_start":
            raise UserError(f"SFTConfig(truncation_mode={self.truncation_mode!r}): only 'keep_start' is here.")
        self._check_preparation()
        given.setdefault("learning_rate", 2e-5)
        given.setdefault("logging_steps", 10)
        can = torch.cuda.is_available() and torch.cuda.is_bf16_supported() and not given.get("use_cpu")
        given.setdefault("bf16", can and not given.get("fp16", False))
        super().__init__(output_dir, *args, **given)

    def _check_preparation(self) -> None:
        unknown = set(self.dataset_kwargs or {}) - {"skip_prepare_dataset"}
        if unknown:
            raise UserError(
                f"SFTConfig(dataset_kwargs=…): {sorted(unknown)[0]} is unknown; skip_prepare_dataset is the one."
            )
        if self.packing and self.max_length is None:
            raise UserError("SFTConfig(packing=True) needs max_length: the size of the rows that are filled.")
        if self.eval_packing and not self.packing:
            raise UserError("SFTConfig(eval_packing=True) without packing=True: one collator serves both datasets.")
        if self.pad_to_multiple_of == "auto":
            self.pad_to_multiple_of = None


class SFTTrainer(Trainer):
    """TRL's SFTTrainer for supervised tuning, on the drop-in Trainer."""

    counts_as_trained = False
    counts_tokens = True
    _evaluates = False
    """Whether an evaluation runs, so that a log line is its own."""

    @classmethod
    def ours(cls) -> type:
        return SFTTrainer

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: Any = None,
        formatting_func: Any = None,
        quantization_config: Any = None,
        tokenizer: Any = None,
        **given: Any,
    ):
        args = as_sft_config(args, model)
        _check_given(args, data_collator, train_dataset, processing_class or tokenizer)
        transformers.set_seed(args.seed)  # new adapters are drawn here
        words = _words(processing_class or tokenizer, model, args)
        model = _loaded(model, args, quantization_config)
        if peft_config is not None:
            model = _adapted(model, peft_config)
        if args.completion_only_loss and formatting_func is not None:
            raise UserError(
                "SFTTrainer: formatting_func makes one text of a row, so completion_only_loss has no meaning."
            )
        self._balance = _balanced(model, args.router_aux_loss_coef)
        apart = args.padding_free and train_dataset is not None and "seq_lengths" in columns_of(train_dataset)
        form = RowFormat(
            words,
            args.dataset_text_field,
            args.max_length,
            args.completion_only_loss,
            args.assistant_only_loss,
            formatting_func,
            apart,
        )
        packs, self._form = args.packing, form
        train_dataset = _rows(train_dataset, form, args, packs, "training")
        eval_dataset = _evaluated(eval_dataset, form, args)
        flat = (packs and args.packing_strategy != "wrapped") or apart
        self._columns = ["input_ids", "attention_mask", "labels"]
        if flat or data_collator is not None:
            self._columns.append("seq_lengths")
        if data_collator is None:
            multiple: Any = args.pad_to_multiple_of
            padded = transformers.DataCollatorForSeq2Seq(_padding_right(words), pad_to_multiple_of=multiple)
            data_collator = FlatCollator() if flat else padded
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class=words, **given
        )  # fmt: skip
        self._line = LineMetrics(self.accelerator)
        self.token_scores, self.evaluated_scores = (self._line.scores[mode] for mode in MODES)
        balance = ("aux_loss",) if self.aux_loss_enabled else ()
        self.metrics_beside_loss = ("entropy", "mean_token_accuracy", "num_tokens", *balance)
        self.model.add_model_tags(["trl", "sft"])  # what TRL's models are found by on the hub

    def _set_signature_columns_if_needed(self) -> None:
        """Collators are given what TRL gives them; `position_ids` of rows, which the model would take, nobody pads."""
        self._signature_columns = self._columns

    def prediction_step(self, *args: Any, **given: Any) -> Any:
        """As in TRL, the loss of an evaluated batch is the model's own mean. Trainer divides by a count of labels,
        which for GPT-2 and its like has every row's first token in it."""
        vars(self)["_get_num_items_in_batch"] = lambda *_: None
        try:
            return super().prediction_step(*args, **given)
        finally:
            del vars(self)["_get_num_items_in_batch"]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As in TRL, the loss of a mixture's router is a mean over the batches of a step. Trainer adds that of each
        batch to losses that are divided by the labels of the whole step, so it would count once for each."""
        own = self.compute_loss_func is not None or self.label_smoother is not None
        mode, labels = "train" if self.model.training else "eval", inputs.get("labels")
        scores = self._line.scores[mode]
        calls = scores.calls
        with counting_tokens(self.model, scores):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if labels is not None and scores.calls == calls:
            self._line.count_logits(mode, outputs, labels)
        if mode == "train":
            self._line.count_tokens(inputs)
        balance = getattr(outputs, "aux_loss", None) if self.aux_loss_enabled else None
        if balance is not None:
            self._line.balances[mode].append(balance.detach().to(self.args.device))
        if balance is not None and not own and num_items_in_batch is not None:
            counted = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            wanted = 1 / self.current_gradient_accumulation_steps
            loss = loss - (counted - wanted) * self._balance * balance.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the loss of a router is part of the loss, as TRL names it."""
        return self._balance != 0

    def _fast_step(self, fast: Any, held: list[Any], epoch: int, steps_in_epoch: int) -> None:
        super()._fast_step(fast, held, epoch, steps_in_epoch)
        self._line.tokens += sum(h.batch.num_tokens for h in held)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what TRL's lines have beside the loss, of what was trained or evaluated since the last line."""
        mode = "eval" if self._evaluates else "train"
        values = self._line.take(mode)
        logs.update(values if mode == "train" else {f"eval_{name}": value for name, value in values.items()})
        super().log(logs, start_time)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **given: Any) -> Any:
        dataset = self._as_at_first(eval_dataset)
        self._line.forget("eval")  # of predictions, which have no line
        before, self._evaluates = self._evaluates, True
        try:
            return super().evaluate(dataset, *args, **given)
        finally:
            self._evaluates = before

    def predict(self, test_dataset: Any, *args: Any, **given: Any) -> Any:
        return super().predict(self._as_at_first(test_dataset), *args, **given)

    def _as_at_first(self, dataset: Any) -> Any:
        """Rows that are handed over later are made as those that the constructor saw; tokens with labels are ready."""
        columns = getattr(dataset, "column_names", None)
        ready = isinstance(columns, list) and {"input_ids", "labels"} <= {*columns}
        if dataset is None or isinstance(dataset, str) or dataset is self.eval_dataset or ready:
            return dataset
        if isinstance(dataset, dict):
            return {name: self._as_at_first(part) for name, part in dataset.items()}
        if type(dataset) is list:
            import datasets  # not above: nobody who names a dataset needs it here

            dataset = datasets.Dataset.from_list(dataset)
        return _evaluated(dataset, self._form, self.args)


def _check_given(args: SFTConfig, collator: Any, dataset: Any, words: Any) -> None:
    """What cannot be trained with, before a model is read."""
    if dataset is None:
        raise UserError("SFTTrainer: there is nothing to train on; give train_dataset.")
    flat = args.padding_free or (args.packing and args.packing_strategy != "wrapped")
    if flat and collator is not None:
        what = "padding_free=True" if args.padding_free else f"packing_strategy={args.packing_strategy!r}"
        raise UserError(
            f"SFTTrainer: with {what} rows hold several documents, which the trainer's own collator alone keeps apart. "
            "Leave data_collator out, or turn that off."
        )
    if args.padding_free and not args.packing and args.max_length is not None:
        raise UserError(
            f"SFTConfig(padding_free=True) with max_length={args.max_length} and without packing: such rows are never "
            "cut. Set max_length=None, or packing=True."
        )
    if words is not None and not isinstance(words, transformers.PreTrainedTokenizerBase):
        raise WrongTypeError(
            f"SFTTrainer(processing_class=…) is a {type(words).__name__}; give the tokenizer (of a processor: its "
            ".tokenizer)."
        )
    columns = columns_of(dataset) if hasattr(dataset, "column_names") else []
    pictures = {"image", "images"} & {*columns}
    if pictures:
        raise UserError(
            f"SFTTrainer: the training dataset has the column `{pictures.pop()}`, and models are trained on text alone "
            "here. Remove the column where the pictures are not needed."
        )


def _evaluated(dataset: Any, form: RowFormat, args: Any, what: str = "evaluation") -> Any:
    if isinstance(dataset, dict):
        return {name: _evaluated(part, form, args, name) for name, part in dataset.items()}
    packs = args.packing if args.eval_packing is None else args.eval_packing
    return _rows(dataset, form, args, packs, what)


def _words(given: Any, model: Any, args: SFTConfig) -> Any:
    """The tokenizer; one without a pad token pads with its end of text."""
    name = model if isinstance(model, str) else model.config._name_or_path
    library: Any = transformers.AutoTokenizer
    words = given if given is not None else library.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    for key in ("eos_token", "pad_token"):
        token = getattr(args, key)
        if token is not None and token not in words.get_vocab():
            raise UserError(f"SFTConfig({key}={token!r}): the tokenizer has no such token.")
        if token is not None:
            setattr(words, key, token)
    if words.pad_token is None:
        words.pad_token = words.eos_token
    return words


def _padding_right(words: Any) -> Any:
    """The tokenizer for batches to learn from. Padding on the left is for writing: here the last of it would predict a
    row's first token, which would be learned."""
    if words.padding_side == "right":
        return words
    other = copy.copy(words)
    other.padding_side = "right"
    return other


def _loaded(model: Any, args: SFTConfig, quantization: Any) -> Any:
    """The model, read where it is given by its name: as in TRL in full precision, whatever the checkpoint has. Steps of
    2e-5 are smaller than what bf16 weights can tell apart."""
    if not isinstance(model, str):
        if quantization is not None or args.model_init_kwargs:
            raise UserError(
                "SFTTrainer: quantization_config and model_init_kwargs are for a model that is given by its name."
            )
        return model
    options = dict(args.model_init_kwargs or {})
    options.setdefault("trust_remote_code", args.trust_remote_code)
    if quantization is not None and "quantization_config" in options:
        raise UserError(
            "SFTTrainer: quantization_config is given twice, to the trainer and in model_init_kwargs. Keep the first."
        )
    if "torch_dtype" not in options:  # the older name
        options.setdefault("dtype", "float32")
    if quantization is not None:
        options["quantization_config"] = quantization
    return transformers.AutoModelForCausalLM.from_pretrained(model, **options)


def _balanced(model: Any, asked: float | None) -> float:
    """How much the loss of the router counts in a mixture of experts: as in TRL what its config says, though
    transformers leaves it out unless `output_router_logits` is set as well."""
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits") or not hasattr(config, "router_aux_loss_coef"):
        if asked:
            raise UserError(
                f"SFTConfig(router_aux_loss_coef={asked}): {type(model).__name__} has no loss of a router to weigh."
            )
        return 0.0
    weight = config.router_aux_loss_coef if asked is None else asked
    config.router_aux_loss_coef, config.output_router_logits = weight, weight != 0
    for module in model.modules():
        if "router_aux_loss_coef" in vars(module):  # taken from the config when the model was made
            module.router_aux_loss_coef = weight
    return weight


def as_sft_config(args: Any, model: Any) -> SFTConfig:
    """The arguments as an `SFTConfig`; a plain `TrainingArguments` is taken over field by field."""
    if isinstance(args, SFTConfig):
        return args
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return SFTConfig(f"{name.split('/')[-1] or 'model'}-SFT")
    made = args.to_dict()
    made |= {name: getattr(args, name) for name in made if name.endswith("_token")}  # to_dict hides what they are
    return SFTConfig(**{name: value for name, value in made.items() if not name.startswith("_")})


def _rows(dataset: Any, form: RowFormat, args: SFTConfig, packs: bool, what: str) -> Any:
    if dataset is None:
        return None
    if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return _as_they_are(dataset, what)
    if packs and args.packing_strategy != "bfd":
        form = replace(form, max_length=None)  # nothing is cut off: it goes on in another row
    rows = prepared(dataset, form, args.dataset_num_proc, what)
    if packs:
        rows = rows.shuffle(seed=args.seed) if args.shuffle_dataset else rows
        rows = packed_rows(rows, args.max_length or 0, args.packing_strategy)
    return rows.shuffle(seed=args.seed) if args.shuffle_dataset else rows


def _as_they_are(dataset: Any, what: str) -> Any:
    """Rows that are not to be prepared: all tokens are learned where there are no labels."""
    columns = getattr(dataset, "column_names", None) or ()
    if "input_ids" not in columns or "labels" in columns:
        return dataset
    if {"completion_mask", "assistant_masks"} & set(columns):
        raise UserError(
            f"SFTTrainer: rows of the {what} dataset have masks and no `labels`, and skip_prepare_dataset leaves masks "
            "alone, so every token would be learned. Give them labels (-100: not learned), or remove that setting."
        )
    return dataset.map(lambda row: {"labels": row["input_ids"]})


def _adapted(model: Any, config: Any) -> Any:
    try:
        from peft import PeftConfig, PeftModel, get_peft_model
    except ImportError as error:
        raise UserError(
            "SFTTrainer(peft_config=…) needs the package peft: pip install 'automodel-finetune[compare]'."
        ) from error
    if not isinstance(config, PeftConfig):
        raise WrongTypeError(
            f"SFTTrainer(peft_config=…) is a {type(config).__name__}; give a configuration of PEFT, such as "
            "peft.LoraConfig(r=16)."
        )
    if isinstance(model, PeftModel):
        raise UserError(
            "SFTTrainer: the model has adapters already, and peft_config would put others around them, which nobody "
            "could load. Leave peft_config out to train those, or give model.merge_and_unload() to begin new ones."
        )
    return get_peft_model(model, config)
