"""HF Trainer as the reference of a loss curve: data in order, fp32, every step's loss kept."""

import torch

AUTO = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def trainer_losses(
    folder, model, rows, *, accumulation: int, batch: int, task: str, steps: int, weight_decay: float = 0.01, kind=None
):
    """Losses of stock Trainer, or of `kind`, from the weights in `folder/start`, with the tokenizer in `model`."""
    import transformers
    from torch.utils.data import SequentialSampler
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(42)
    capped = AutoConfig.from_pretrained(folder / "start").model_type == "gemma2"
    attention = {"attn_implementation": "eager"} if capped else {}  # transformers 5.17 would take SDPA, without the cap
    stock = getattr(transformers, AUTO[task]).from_pretrained(folder / "start", **attention)
    if task == "text-classification":
        collator = DataCollatorWithPadding(tokenizer)
    elif task == "token-classification":
        collator = DataCollatorForTokenClassification(tokenizer)
    else:
        shift = getattr(stock, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:  # FSMT's writes into the labels it gets, and padding would be learned
            stock.prepare_decoder_input_ids_from_labels = lambda labels: shift(labels=labels.clone())
        collator = DataCollatorForSeq2Seq(tokenizer, model=stock if task == "seq2seq" else None)
    losses = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    class InOrder(kind or Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=steps, per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation, learning_rate=1e-3, weight_decay=weight_decay, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
        logging_nan_inf_filter=False,
    )  # fmt: skip
    trainer = InOrder(model=stock, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Keep()])
    trainer.train()
    return losses
