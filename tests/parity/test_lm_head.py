"""A language model that stops short of its head, and a loss that makes the logits itself: the logits of every family of
the table are those of the stock forward, and so are loss and gradients, packed and padded, tied and not."""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from automodel.data.batch import IGNORE, PaddedBatch
from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.kernels.flat_parameters import FlatParameters
from automodel.models.forward import make_forward, make_loss_forward
from automodel.models.fuse import fuse
from automodel.models.head_form import PLAIN, head_form
from automodel.models.head_outputs import Unprojected
from automodel.models.lm_head import is_plain, unprojected_head
from automodel.models.task_head import NEXT_TOKEN
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import CAUSAL_LM

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[1] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

LENGTHS = (5, 19, 7, 12)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
PADDED = ("cohere", "cohere2", "falcon", "gemma2", "llama")
PACKED = sorted(PLAIN - {"falcon"})
STRONG = {
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gemma3_text": {"final_logit_softcapping": 0.5},
}


def make_model(kind: str, **overrides):
    settings = {**tiny_models.SETTINGS[kind], **STRONG.get(kind, {}), **overrides}
    config = tiny_models.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    return tiny_models.class_for(NEXT_TOKEN).from_config(config).train()


def packed_batch():
    generator, writer = torch.Generator().manual_seed(0), SampleWriter()
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(5, 99, (length,), generator=generator).tolist()
        writer.add(row, ids, token_labels=[IGNORE] * (length // 3) + ids[length // 3 :])
    store = TokenStore.in_memory(writer.finish())
    return PackedCollator(store, place="next_token", bucket_tokens=8, max_seqlen=24, micro_batch_size=5)(range(4))


def padded_batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 99, (3, 11), generator=generator)
    mask = (torch.arange(11) < torch.tensor([[11], [6], [9]])).long()
    labels = torch.where(mask.bool(), ids.roll(-1, 1), IGNORE)
    labels[:, -1] = IGNORE
    return PaddedBatch(ids * mask, mask, labels, None, 3, int(mask.sum()), int((labels != IGNORE).sum()))


def compare(kind: str, path: str, batch, swapped: bool = False, **overrides):
    model = make_model(kind, **overrides)
    twin = deepcopy(model)
    if swapped:
        FlatParameters(parameter_groups(model, OptimizerConfig()))
        assert fuse(model, torch.zeros(1, dtype=torch.int64), None, 24) == 2
    loss = CAUSAL_LM.loss(LossConfig(), None, None)
    ours = make_loss_forward(model, NEXT_TOKEN, path, swapped)(batch)
    theirs = make_forward(twin, NEXT_TOKEN, path)(batch)
    assert isinstance(ours, Unprojected)
    torch.testing.assert_close(ours.logits().reshape(theirs.shape), theirs, **TOLERANCE)
    scale = torch.tensor(1 / batch.num_labels)
    mine, stock = loss.scaled_sum(ours, batch, scale), loss.scaled_sum(theirs, batch, scale)
    torch.testing.assert_close(mine, stock, **TOLERANCE)
    mine.backward()
    stock.backward()
    expected = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", PACKED)
def test_packed(kind):
    compare(kind, "packed", packed_batch())


@pytest.mark.parametrize("kind", PADDED)
def test_padded(kind):
    compare(kind, "padded", padded_batch())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi3", "olmo2"])
def test_fused_blocks_end_before_the_head(kind, tied):
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "tie_word_embeddings": tied}
    compare(kind, "packed", packed_batch(), swapped=True, **wide)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_get_both_gradients(kind, tied):
    model = make_model(kind, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    compare(kind, "packed", packed_batch(), tie_word_embeddings=tied)


def test_the_table_is_tested_whole():
    assert {*PACKED, *PADDED} == PLAIN
    for kind in ("granite", "cohere", "gemma3_text", "gemma2"):
        assert head_form(make_model(kind).config) != (1.0, None), f"{kind}: the test should show what is special"


def test_other_families_and_other_heads_keep_their_logits():
    assert head_form(tiny_models.AutoConfig.for_model("mamba")) is None
    assert unprojected_head(make_model("llama")) is not None
    wrapped = make_model("llama")
    wrapped.set_output_embeddings(nn.Sequential(wrapped.lm_head))
    hooked = make_model("llama")
    hooked.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    for model in (wrapped, hooked):
        assert not is_plain(model.get_output_embeddings())
        assert unprojected_head(model) is None
        assert isinstance(make_loss_forward(model, NEXT_TOKEN, "packed")(packed_batch()), torch.Tensor)
    assert isinstance(
        make_loss_forward(make_model("llama"), NEXT_TOKEN, "packed", fused=False)(packed_batch()), torch.Tensor
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_scores_equal_those_of_logits(smoothing):
    model, batch = make_model("llama").eval(), packed_batch()
    loss = CAUSAL_LM.loss(LossConfig(label_smoothing=smoothing, z_loss=0.1), None, None)
    with torch.no_grad():
        found = loss.scores(make_loss_forward(model, NEXT_TOKEN, "packed")(batch), batch)
        known = loss.scores(make_forward(model, NEXT_TOKEN, "packed")(batch), batch)
    assert found.logits is None
    assert known.right is None
    torch.testing.assert_close(found.loss, known.loss, **TOLERANCE)
    assert found.right == ((known.logits.argmax(-1) == batch.labels_R) & (batch.labels_R != IGNORE)).sum()


def test_under_autocast_the_product_has_its_dtype():
    model, batch = make_model("llama"), packed_batch()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = make_loss_forward(model, NEXT_TOKEN, "packed")(batch)
        logits = make_forward(model, NEXT_TOKEN, "packed")(batch)
    assert outputs.hidden_RN.dtype == outputs.weight_VN.dtype == torch.bfloat16
    loss = CAUSAL_LM.loss(LossConfig(), None, None)
    mine = loss.scaled_sum(outputs, batch, torch.tensor(1.0))
    mine.backward()
    torch.testing.assert_close(mine, loss.sum(logits, batch.labels_R), rtol=1e-3, atol=1e-3)
    assert model.lm_head.weight.grad.dtype == torch.float32
