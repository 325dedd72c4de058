"""Weights of 4 and 8 bits against the real bitsandbytes, on the CPU: codes, scales, what they expand to, and a whole
QLoRA model as transformers and PEFT make it.

bitsandbytes is not a dependency; without it these tests are skipped, visibly.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers

import tiny_models
from automodel.adapters.attach import attach, trained_tensors
from automodel.adapters.packed_linear import Packing, pack_layers
from automodel.adapters.peft_folder import resolve_folder
from automodel.data.batch import PackedBatch
from automodel.kernels.packed import expand_reference, group_scales, pack
from automodel.models.forward import make_forward
from automodel.models.task_head import NEXT_TOKEN

bnb = pytest.importorskip("bitsandbytes")
SHAPES = [(48, 64), (96, 256), (37, 64), (320, 1024)]


def weights(shape, seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(shape) * torch.rand(shape[0], 1) * 0.05
    weight[0] = 0.0  # a group of zeros
    return weight


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_bits_are_theirs(shape, kind, double):
    weight = weights(shape)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type=kind)
    ours = pack(weight, kind, double)
    their_codes = torch.stack([codes.flatten() >> 4, codes.flatten() & 15])
    our_codes = torch.stack([ours.codes >> 4, ours.codes & 15])
    # Half-way between two entries either is right; of a group of zeros, every code of fp4's two zeros is.
    assert (their_codes != our_codes).float().mean() < 1e-3
    if double:
        assert (state.absmax != ours.scales).float().mean() < 1e-2
        torch.testing.assert_close(ours.mean, state.offset, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.wide_scales, state.state2.absmax, rtol=1e-5, atol=1e-9)
    else:
        torch.testing.assert_close(ours.scales, state.absmax, rtol=0, atol=0)
    theirs = bnb.functional.dequantize_4bit(codes, state)
    different = ((expand_reference(ours) - theirs).abs() > 2e-3 * theirs.abs().max()).float().mean()
    assert different < 1e-3


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_their_codes_expand_to_their_numbers(kind):
    """The same bytes, read by both: equal to the last bit but one."""
    weight = weights((96, 256), seed=3)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type=kind)
    ours = pack(weight, kind)
    theirs = type(ours)(kind, (96, 256), codes.flatten(), state.absmax, state.state2.absmax, state.offset)
    nested = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    torch.testing.assert_close(group_scales(theirs), nested, rtol=1e-6, atol=1e-8)
    expected = bnb.functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(expand_reference(theirs), expected, rtol=1e-6, atol=1e-8)


def test_eight_bits_are_theirs():
    weight = weights((48, 64))
    weight[0] = 0.01
    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    ours = pack(weight.half(), "int8")
    torch.testing.assert_close(ours.scales, scales.float(), rtol=1e-3, atol=0)
    assert (codes.int() - ours.codes.int()).abs().max() <= 1
    assert (codes != ours.codes).float().mean() < 5e-3
    expected = bnb.functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(expand_reference(ours), expected, rtol=0, atol=float(scales.max()) / 127 * 1.01)


def test_a_layer_computes_what_linear4bit_computes():
    weight, x = weights((96, 64), seed=5), torch.randn(7, 64)
    layer = bnb.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float32, compress_statistics=True)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
    layer = layer.to("cpu")
    if layer.weight.quant_state is None:
        layer.weight = layer.weight._quantize("cpu")
    ours = x @ pack(weight, "nf4").expand(torch.float32).t()
    torch.testing.assert_close(ours, layer(x), rtol=1e-3, atol=1e-3 * float(ours.detach().abs().max()))


FOUR_BITS = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("theirs_is", "packing", "same_bytes", "near"),
    [
        (FOUR_BITS, Packing("nf4", double=True), True, 1e-5),
        # Packed by ourselves: a scale in a hundred may be the neighbour of theirs, half-way between two.
        (FOUR_BITS, Packing("nf4", double=True), False, 1e-3),
        # Theirs rounds activations to 8 bits as well, ours does not.
        ({"load_in_8bit": True}, Packing("int8"), False, 0.03),
    ],
    ids=["4-bit-their-bytes", "4-bit", "8-bit"],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_qlora_model_is_that_of_transformers_peft_and_bitsandbytes(
    tmp_path, kind, theirs_is, packing, same_bytes, near
):
    """Logits and gradients of A and B, of documents one by one and packed."""
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    _, stock = tiny_models.tiny(kind, "causal-lm", **sizes)
    stock.save_pretrained(tmp_path / "base")
    wanted = transformers.BitsAndBytesConfig(**theirs_is)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=wanted, device_map="cpu", dtype=torch.float32
    )
    for module in theirs.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = (
                False  # processors that have it would compute in bf16, whatever is asked
            )
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    torch.manual_seed(3)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = deepcopy(stock)
    adapter = resolve_folder(tmp_path / "adapter", ours, "CAUSAL_LM", "base")
    for name in pack_layers(ours, packing, "cpu", torch.float32, adapter.saved):
        if same_bytes:
            _take_bytes(ours.get_submodule(name), theirs.base_model.model.get_submodule(name).base_layer.weight)
    attach(ours, adapter)

    ids = [torch.randint(5, 90, (length,)) for length in (9, 4, 13)]
    expected = [theirs(input_ids=i[None]).logits[0] for i in ids]
    sum(logits.square().sum() for logits in expected).backward()
    logits = make_forward(ours, NEXT_TOKEN, "packed")(_packed(ids))
    logits.square().sum().backward()

    def off(found, other):
        return float((found - other).detach().abs().max() / other.detach().abs().max())

    assert off(logits, torch.cat(expected)) < near
    gradients = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    own = trained_tensors(ours)
    assert own.keys() == gradients.keys()
    assert max(off(own[name].grad, gradients[name]) for name in own) < 3 * near


def _take_bytes(layer, weight):
    state = weight.quant_state
    layer.weight.data = weight.data.flatten()
    layer.scales, layer.wide_scales, layer.mean = state.absmax, state.state2.absmax, state.offset


def _packed(ids):
    lengths = torch.tensor([len(i) for i in ids])
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    total = int(ends[-1])
    return PackedBatch(
        input_ids_T=torch.cat(ids), position_ids_T=torch.cat([torch.arange(n) for n in lengths]), cu_seqlens_D=ends,
        max_seqlen=int(lengths.max()), read_positions_R=torch.arange(total), labels_R=torch.zeros(total).long(),
        num_tokens=total, num_documents=len(ids), num_labels=total, token_type_ids_T=None,
    )  # fmt: skip


def test_an_adapter_of_a_base_in_few_bits_says_what_it_needs(tmp_path):
    """`…-bnb-4bit` folders are what Unsloth's adapters name as their base."""
    peft = pytest.importorskip("peft")
    import tiny_runs as tiny
    from automodel.config.errors import UserError
    from automodel.engine.saved import open_saved

    plain, packed = tiny.make_model_folder(tmp_path / "plain", "llama"), tmp_path / "packed"
    form = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=form, device_map="cpu")
    base.save_pretrained(packed)
    tiny.make_tokenizer(decoder=True).save_pretrained(packed)
    base = transformers.AutoModelForCausalLM.from_pretrained(packed, device_map="cpu")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(UserError, match=r"packed', whose weights are in few bits. Write the model that those"):
        open_saved(tmp_path / "adapter").load("cpu")
