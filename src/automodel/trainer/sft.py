"""`SFTTrainer` and `SFTConfig`: supervised tuning with TRL's names and arguments, on our Trainer.

    from automodel import SFTConfig, SFTTrainer
    SFTTrainer("Qwen/Qwen3-0.6B", SFTConfig("out", assistant_only_loss=True), train_dataset=data).train()

Written from TRL's documented arguments; TRL itself is not needed. Rows become tokens and labels when the trainer is
made (`sft_rows.py`), and from there on it is the drop-in Trainer. Two defaults are not TRL's: `gradient_checkpointing`
is off (packed batches need less memory; with it steps are not captured), and `bf16` is on only where the GPU has it.
What TRL's arguments ask for and is not here is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from automodel.config.errors import UserError
from automodel.trainer.arguments import TrainingArguments
from automodel.trainer.sft_rows import FlatCollator, RowFormat, packed_rows, prepared
from automodel.trainer.trainer import Trainer

REFUSED = {
    "dataset_kwargs": "prepare the dataset yourself, or give formatting_func",
    "chat_template_path": "set tokenizer.chat_template",
    "activation_offloading": "use `automodel finetune` with training_optimizations.activation_offload",
    "eos_token": "set tokenizer.eos_token",
    "pad_token": "set tokenizer.pad_token",
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
    eval_packing: bool | None = None
    padding_free: bool = False
    """Accepted: there is no padding in any case."""
    pad_to_multiple_of: int | None = None
    completion_only_loss: bool | None = None
    """Learn completions alone; None: where rows have `prompt` and `completion`."""
    assistant_only_loss: bool = False
    """Learn what the assistant says alone."""
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
        if self.packing_strategy != "bfd":
            raise UserError(f"SFTConfig(packing_strategy={self.packing_strategy!r}): only 'bfd' keeps documents whole.")
        given.setdefault("learning_rate", 2e-5)
        given.setdefault("logging_steps", 10)
        can = torch.cuda.is_available() and torch.cuda.is_bf16_supported() and not given.get("use_cpu")
        given.setdefault("bf16", can and not given.get("fp16", False))
        super().__init__(output_dir, *args, **given)


class SFTTrainer(Trainer):
    """TRL's SFTTrainer for supervised tuning, on the drop-in Trainer."""

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
        tokenizer: Any = None,
        **given: Any,
    ):
        args = as_sft_config(args, model)
        words = self._words(processing_class or tokenizer, model)
        if isinstance(model, str):
            model = transformers.AutoModelForCausalLM.from_pretrained(model, **(args.model_init_kwargs or {}))
        if peft_config is not None:
            model = _adapted(model, peft_config)
        form = RowFormat(
            words,
            args.dataset_text_field,
            args.max_length,
            args.completion_only_loss,
            args.assistant_only_loss,
            formatting_func,
        )
        packs = args.packing
        train_dataset = _rows(train_dataset, form, args, packs, "training")
        evaluation_packs = packs if args.eval_packing is None else args.eval_packing
        if evaluation_packs != packs:
            raise UserError("SFTConfig(eval_packing=…) must be what packing is: one collator serves both datasets.")
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: _rows(part, form, args, packs, name) for name, part in eval_dataset.items()}
        else:
            eval_dataset = _rows(eval_dataset, form, args, packs, "evaluation")
        if packs:
            args.remove_unused_columns = False  # `seq_lengths` is for the collator
        if data_collator is None:
            data_collator = FlatCollator() if packs else transformers.DataCollatorForSeq2Seq(
                words, pad_to_multiple_of=args.pad_to_multiple_of
            )  # fmt: skip
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class=words, **given
        )  # fmt: skip

    @staticmethod
    def _words(given: Any, model: Any) -> Any:
        """The tokenizer; one without a pad token pads with its end of text."""
        name = model if isinstance(model, str) else model.config._name_or_path
        words: Any = given if given is not None else transformers.AutoTokenizer.from_pretrained(name)
        if words.pad_token is None:
            words.pad_token = words.eos_token
        return words


def as_sft_config(args: Any, model: Any) -> SFTConfig:
    """The arguments as an `SFTConfig`; a plain `TrainingArguments` is taken over field by field."""
    if isinstance(args, SFTConfig):
        return args
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return SFTConfig(f"{name.split('/')[-1] or 'model'}-SFT")
    made = args.to_dict()
    made["hub_token"] = args.hub_token
    return SFTConfig(**{name: value for name, value in made.items() if not name.startswith("_")})


def _rows(dataset: Any, form: RowFormat, args: SFTConfig, packs: bool, what: str) -> Any:
    if dataset is None:
        return None
    rows = prepared(dataset, form, args.dataset_num_proc, what)
    if not packs:
        return rows
    if args.max_length is None:
        raise UserError("SFTConfig(packing=True) needs max_length: the size of the rows that are filled.")
    return packed_rows(rows, args.max_length)


def _adapted(model: Any, config: Any) -> Any:
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise UserError("SFTTrainer(peft_config=…) needs the package peft: pip install 'automodel[peft]'.") from error
    return get_peft_model(model, config)
