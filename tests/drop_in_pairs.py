"""A model of transformers and the same one of automodel, the batches they get, and what must be the same."""

from __future__ import annotations

import torch
import transformers

import automodel
from automodel.models.drop_in import path_taken
from tiny_models import VOCAB

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
FUSABLE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
CLASS = {
    "causal-lm": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}


def both(path, task, **keywords):
    """(the stock model, ours), ready to be trained."""
    homes = (transformers, automodel)
    return tuple(getattr(home, CLASS[task]).from_pretrained(path, **keywords).train() for home in homes)


def batch(task="causal-lm", side="right", rows=(9, 4, 13), pad=0, seed=1):
    """A padded rectangle with labels: of half the tokens, or one a row."""
    generator = torch.Generator().manual_seed(seed)
    width = max(rows)
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, length in enumerate(rows):
        here = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, here] = torch.randint(5, VOCAB, (length,), generator=generator)
        mask[row, here] = 1
    if task == "text-classification":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row % 3 for row in range(len(rows))])}
    labels = torch.where(mask.bool(), ids if task == "causal-lm" else ids % 3, -100)
    labels[:, ::2] = -100
    if task == "causal-lm":
        labels[torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0] = -100  # predicted from padding, if at all
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def assert_same(stock, ours, inputs, path="packed"):
    """Loss, logits (only where there are tokens, unless the path is stock), and gradients."""
    results = []
    for model in (stock, ours):
        model.zero_grad(set_to_none=True)
        output = model(**inputs)
        output.loss.backward()
        results.append(output)
    assert path_taken(ours)[0] == path, path_taken(ours)
    theirs, mine = results
    torch.testing.assert_close(mine.loss, theirs.loss, **CLOSE)
    assert mine.logits.shape == theirs.logits.shape
    assert mine.logits.dtype == theirs.logits.dtype
    kept = inputs["attention_mask"].bool() if mine.logits.dim() == 3 and path != "stock" else ...
    torch.testing.assert_close(mine.logits[kept], theirs.logits[kept], **CLOSE)
    gradients = {name: p.grad for name, p in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        if gradients[name] is None or parameter.grad is None:
            for gradient in (gradients[name], parameter.grad):
                assert gradient is None or not gradient.any(), name
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
