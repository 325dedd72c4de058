"""Language models that cannot share a row (attention sinks, ALiBi, attention of their own, families that
are in no table) are padded, and learn the same: logits, loss and gradients of a padded batch, made by the data room and
read by the training forward, equal those of stock transformers on each document alone (fp32)."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from automodel.data.batch import IGNORE
from automodel.data.collate import PaddedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.models.auto import class_for
from automodel.models.families import packing_support
from automodel.models.forward import make_forward, make_loss_forward
from automodel.models.task_head import NEXT_TOKEN
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import CAUSAL_LM
from tiny_models import SETTINGS, VOCAB

LENGTHS = (5, 19, 7, 23)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
DECODER = SETTINGS["llama"]
PLAIN = {name: value for name, value in DECODER.items() if name != "head_dim"}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}

CASES = [
    ("falcon", SETTINGS["falcon"], "attention code of its own"),
    ("falcon", {**SETTINGS["falcon"], "new_decoder_architecture": True, "num_kv_heads": 2}, "code of its own"),
    ("falcon", {**SETTINGS["falcon"], "multi_query": False, "bias": True}, "attention code of its own"),
    (
        "gpt_oss",
        {
            **DECODER, "intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_dropout": 0.0,
        },
        "has attention sinks",
    ),
    ("bloom", BLOOM, "ALiBi"),
    ("stablelm", PLAIN, "not among"),
    ("opt", {
        "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 37, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0,
    }, "not among"),
]  # fmt: skip


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, VOCAB, (length,), generator=generator) for length in LENGTHS]


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """The first third carries none."""
    return torch.where(torch.arange(len(ids)) < len(ids) // 3, IGNORE, ids)


def padded(side: str):
    writer = SampleWriter()
    for row, ids in enumerate(documents()):
        writer.add(row, ids.tolist(), token_labels=labels_of(ids).tolist())
    store = TokenStore.in_memory(writer.finish())
    return PaddedCollator(store, "next_token", pad_token_id=3, padding_side=side)(range(len(LENGTHS)))


def make_model(kind: str, settings: dict):
    torch.manual_seed(0)
    model = class_for(NEXT_TOKEN).from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.train()


def each_alone(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the tokens that carry labels, and their labels; every document through the stock model by itself."""
    logits, labels = [], []
    for ids in documents():
        kept = labels_of(ids)[1:] != IGNORE
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0, :-1][kept])
        labels.append(ids[1:][kept])
    return torch.cat(logits), torch.cat(labels)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"), CASES, ids=[f"{kind}-{n}" for n, (kind, *_) in enumerate(CASES)]
)
def test_padded_equals_each_document_alone(kind, settings, reason):
    stock = make_model(kind, settings)
    ours = deepcopy(stock)
    support = packing_support(ours.config, NEXT_TOKEN)
    assert not support.packed
    assert reason in support.reason
    batch = padded("right")
    theirs, labels = each_alone(stock)
    kept = batch.labels != IGNORE
    torch.testing.assert_close(make_forward(ours, NEXT_TOKEN, "padded")(batch)[kept], theirs, **TOLERANCE)
    assert torch.equal(batch.labels[kept], labels)

    loss = CAUSAL_LM.loss(LossConfig(), None, None)
    outputs = make_loss_forward(ours, NEXT_TOKEN, "padded")(batch)  # as the step calls it, without whole logits
    mine = loss.scaled_sum(outputs, batch, torch.tensor(1 / batch.num_labels))
    stock_loss = F.cross_entropy(theirs, labels)
    torch.testing.assert_close(mine, stock_loss, **TOLERANCE)
    mine.backward()
    stock_loss.backward()
    expected = {name: p.grad for name, p in stock.named_parameters()}
    for name, parameter in ours.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert parameter.grad is not None, f"no gradient reaches {name}"
            torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
