"""The estimate of memory against what torch really keeps, on tiny models on the CPU, and the choices made by it."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from automodel.config.errors import UserError
from automodel.data.batch import PackedBatch
from automodel.data.config import DatasetConfig
from automodel.kernels import cpu_attention_bf16
from automodel.models.checkpointing import layer_dropout, use_gradient_checkpointing
from automodel.models.config import Fp8Config, ModelConfig
from automodel.models.families import FAMILIES
from automodel.models.forward import make_forward
from automodel.models.fp8 import Product
from automodel.optim.build import build_optimizer
from automodel.optim.config import OptimizerConfig
from automodel.optim.kinds import ADAMW, KINDS, Kind
from automodel.plan import fitting
from automodel.plan.config import RunConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import (
    GIB,
    WEIGHTS_KEPT_TO,
    ModelShape,
    Setting,
    activation_bytes,
    estimate,
    largest_batch_tokens,
    layer_bytes,
    logit_bytes,
    mean_document,
    shape_of,
)
from automodel.tasks.registry import CAUSAL_LM, TOKEN_CLASSIFICATION, task_named
from live_bytes import LiveBytes
from tiny_models import SETTINGS, tiny

TOKENS, DOCUMENT, INNER = 512, 64, 160
SIZES = {
    "distilbert": {"dim": 64, "n_heads": 4, "hidden_dim": INNER},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_inner": INNER, "n_positions": 128},
}
USUAL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": INNER, "max_position_embeddings": 128}
ENCODERS = ("bert", "roberta", "distilbert", "electra", "modernbert")
DECODERS = ("gpt2", "llama", "qwen2", "qwen3", "gemma", "gemma3_text", "glm4", "olmo2", "phi3", "starcoder2")
TOLERANCE = 0.25


def made(kind, task, **overrides):
    """(config, model in training mode): the sizes large enough that widths matter, not constants."""
    size = {**SIZES.get(kind, USUAL), **({"head_dim": 16} if "head_dim" in SETTINGS[kind] else {})}
    config, model = tiny(kind, task, **{**size, **overrides})
    return config, model.train()


def batch(kind, task) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    boundaries = torch.arange(0, TOKENS + 1, DOCUMENT, dtype=torch.int32)
    pooled = boundaries[:-1].long() + (0 if FAMILIES[kind].pooling == "first" else DOCUMENT - 1)
    reads = pooled if task == "text-classification" else torch.arange(TOKENS)
    return PackedBatch(
        input_ids_T=torch.randint(5, 90, (TOKENS,), generator=generator),
        position_ids_T=torch.arange(TOKENS) % DOCUMENT,
        cu_seqlens_D=boundaries,
        max_seqlen=DOCUMENT,
        read_positions_R=reads,
        labels_R=torch.zeros(len(reads), dtype=torch.long),
        token_type_ids_T=None,
        num_documents=len(pooled),
        num_tokens=TOKENS,
        num_labels=len(reads),
    )


def saved_bytes(model, run) -> int:
    """Bytes of distinct storages that autograd saves while `run` computes, parameters aside."""
    seen = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept, total = [], 0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
        kept.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return total


def compute(precision):
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def setting(precision, **changes) -> Setting:
    return Setting(precision, False, False, ADAMW, "none", TOKENS, TOKENS, attended=DOCUMENT, **changes)


def measured(kind, task, precision, **overrides):
    config, model = made(kind, task, **overrides)
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
    forward, stream = make_forward(model, task_named(task).head, "packed"), batch(kind, task)

    def run():
        with compute(precision):
            return forward(stream)

    return config, saved_bytes(model, run)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("kind", ENCODERS + DECODERS)
def test_activations_are_what_autograd_saves(kind, precision):
    task = "text-classification" if kind in ENCODERS else "causal-lm"
    layers = {"layer_types": ["full_attention"] * 2} if kind == "gemma3_text" else {}
    config, real = measured(kind, task, precision, **layers)
    half = setting(precision)
    shape = shape_of(config)
    assert shape is not None
    expected = activation_bytes(shape, half)
    if precision == "bf16":  # autocast's copies of the weights are saved too, and counted with the weights
        matrices = 2 * shape.queries * shape.width + 2 * shape.keys * shape.width
        expected += 2 * shape.layers * (matrices + (3 if shape.gated else 2) * shape.width * shape.inner)
    assert expected == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("bert", {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}),
        ("gpt2", {"resid_pdrop": 0.1}),
        ("distilbert", {"dropout": 0.1, "attention_dropout": 0.1}),
    ],
)
def test_dropout_is_counted(kind, overrides, precision):
    config, real = measured(kind, "token-classification", precision, **overrides)
    assert activation_bytes(shape_of(config), setting(precision)) == pytest.approx(real, rel=TOLERANCE)


def test_a_cpu_keeps_bf16_weights_of_attention_up_to_some_length():
    assert WEIGHTS_KEPT_TO == cpu_attention_bf16.KEPT
    shape = shape_of(made("llama", "causal-lm")[0])
    none, kept, longer = (
        layer_bytes(shape, dataclasses.replace(setting("bf16-pure"), attended=attended))
        for attended in (0, WEIGHTS_KEPT_TO, WEIGHTS_KEPT_TO + 1)
    )
    assert kept - none == 2 * shape.heads * WEIGHTS_KEPT_TO
    assert longer == none


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_what_is_alive_after_the_forward_pass(kind, mode):
    """Checkpointed layers hold their inputs where no hook sees them, so living storages are counted."""
    task = "token-classification" if kind == "bert" else "causal-lm"
    config, model = made(kind, task, num_hidden_layers=4)
    if mode != "none":
        assert use_gradient_checkpointing(model, mode) == {"selective": 2, "full": 4}[mode]
    forward, stream = make_forward(model, task_named(task).head, "packed"), batch(kind, task)
    with LiveBytes() as live:
        logits = forward(stream)
        kept = live.total
    assert logits.requires_grad
    shape = shape_of(config)
    own = dataclasses.replace(setting("fp32"), checkpointing=mode)
    expected = activation_bytes(shape, own) + logits.numel() * 4
    if mode != "none":  # one layer more is alive in the backward pass only
        expected -= TOKENS * layer_bytes(shape, own)
    assert expected == pytest.approx(kept, rel=TOLERANCE)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "llama", "gpt2"])
def test_checkpointing_changes_no_gradient(kind, mode, dropout):
    names = {"bert": "hidden_dropout_prob", "modernbert": "mlp_dropout", "llama": "attention_dropout"}
    gradients = []
    for used in ("none", mode):
        config, model = made(kind, "token-classification", **{names.get(kind, "resid_pdrop"): dropout})
        assert (layer_dropout(config.to_dict()) is not None) == (dropout > 0)
        if used != "none":
            use_gradient_checkpointing(model, used)
        forward, stream = make_forward(model, TOKEN_CLASSIFICATION.head, "packed"), batch(kind, "token-classification")
        torch.manual_seed(1)
        torch.nn.functional.cross_entropy(forward(stream), stream.labels_R).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if kind.plain])
def test_optimizer_states_are_counted(name):
    config, model = made("llama", "causal-lm", vocab_size=512)
    parameters = sum(p.numel() for p in model.parameters())
    extra = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = build_optimizer(model, OptimizerConfig(name=name, extra=extra))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    real = sum(
        v.numel() * v.element_size()
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    )
    # Tied or not, a word table counts once; here it is not.
    expected = estimate(shape_of(config), parameters, dataclasses.replace(setting("fp32"), kind=KINDS[name])).states
    assert expected == pytest.approx(real, rel=TOLERANCE if name != "adafactor" else 0.5)


def test_weights_gradients_and_logits():
    shape = ModelShape(16, 2048, 2048, 512, 32, 8192, 128_256, rms=True, gated=True)
    parameters = 1_236_000_000
    captured = Setting("bf16", True, True, ADAMW, "none", 8192, 8192, device="cuda")
    need = estimate(shape, parameters, captured)
    assert need.weights == 6 * parameters  # fp32 masters, bf16 copies
    assert need.gradients == 2 * parameters
    assert need.states == 8 * parameters
    # 4N + 2Q + 2K + 2I for each of 16 layers, in bf16: 7.3 GiB; the ends add a little.
    assert need.activations / GIB == pytest.approx(7.3, rel=0.05)
    again = estimate(shape, parameters, dataclasses.replace(captured, norms_again=True))
    assert need.activations - again.activations == 16 * 2 * 2048 * 2 * 8192  # 2N less
    kept = estimate(shape, parameters, dataclasses.replace(captured, gates_kept=True))
    assert kept.activations - need.activations == 16 * 8192 * 2 * 8192  # I more
    assert need.logits == 8192 * 128_256 * 14
    assert logit_bytes(shape, dataclasses.replace(captured, stored_logits=False)) == 2**30
    eager = estimate(shape, parameters, dataclasses.replace(captured, captured=False, fused=False))
    assert eager.gradients == 4 * parameters
    pure = estimate(shape, parameters, dataclasses.replace(captured, precision="bf16-pure"))
    assert (pure.weights, pure.gradients, pure.states) == (2 * parameters, 2 * parameters, 4 * parameters)
    paged = estimate(shape, parameters, dataclasses.replace(captured, kind=Kind("adamw", paged=True)))
    assert (paged.states, paged.on_host) == (0, 8 * parameters)
    small = estimate(shape, parameters, dataclasses.replace(captured, kind=Kind("adamw", bits=8)))
    assert 2 * parameters < small.states < 4 * parameters


def test_layers_that_differ_count_as_the_largest():
    """Gemma 4's layers with windows have smaller heads; its config refuses to say which size is the model's."""
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    assert [layer.head_dim for layer in config.per_layer_config] == [256, 512]
    shape = shape_of(config)
    assert (shape.queries, shape.keys) == (4 * 512, 2 * 512)


def test_the_largest_of_many_batches():
    lengths = np.random.default_rng(0).lognormal(5.4, 0.55, 20_000).clip(16, 512).astype(np.int64)
    order = np.random.default_rng(1).permutation(20_000)
    real = lengths[order].reshape(-1, 8).sum(1).max()
    assert largest_batch_tokens(lengths, 8, 2500) == pytest.approx(real, rel=0.1)
    assert largest_batch_tokens(lengths, 8, 2500, bucket=512) % 512 == 0
    assert largest_batch_tokens(np.full(10, 100), 4, 1000) == 400
    assert mean_document(np.array([1, 3])) == 2.5


# The choices.

CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
SHAPE_1B = ModelShape(16, 2048, 2048, 512, 32, 8192, 128_256, rms=True, gated=True)
LLAMA = ModelFacts("llama", "llama", 1_236_000_000, True, "packs", can_fuse=True, shape=SHAPE_1B)
BERT = ModelFacts("bert", "bert", 110_000_000, True, "packs", dropout="hidden_dropout_prob")
DATA = DataFacts(rows=1000, tokens=1_000_000, longest=4096, max_length=4096, has_validation=False)


def plan_for(hardware=H200, model=LLAMA, data=DATA, optimizer="adamw", fp8=None, **options):
    cfg = RunConfig(
        fp8=fp8,
        model=ModelConfig(pretrained_model_name_or_path="x"),
        dataset=DatasetConfig(path="x"),
        optimizer=OptimizerConfig(name=optimizer),
        training_optimizations=TrainingOptimizations(**options),
    )
    return make_plan(cfg, CAUSAL_LM, hardware, model, data)


def line(plan, name):
    return next((d for d in plan.decisions if d.name == name), None)


def gpu(gib):
    return dataclasses.replace(H200, memory_gib=gib)


def test_auto_takes_the_first_that_fits():
    """8 × 4,096 tokens of a model of 1.2 B: logits 55 GiB, activations 30."""
    chosen = {size: plan_for(gpu(size), gradient_checkpointing="auto") for size in (140.0, 100.0, 90.0, 40.0)}
    modes = {size: plan.checkpointing for size, plan in chosen.items()}
    assert modes[140.0] == "none"
    assert modes[40.0] == "full"
    assert {modes[100.0], modes[90.0]} <= {"selective", "full"}
    assert [plan.memory_gib for plan in chosen.values()] == sorted(
        (plan.memory_gib for plan in chosen.values()), reverse=True
    )
    said = line(chosen[40.0], "checkpointing")
    assert said.value == "full"
    assert "auto: none" in said.reason
    assert "of the 36.0 GiB that may be filled" in said.reason
    assert "this may not fit" in line(chosen[40.0], "memory").reason
    assert all(plan.capture for plan in chosen.values())  # no dropout: recorded all the same


def test_modes_and_their_lines():
    assert plan_for().checkpointing == "none"
    assert plan_for(gradient_checkpointing="none").checkpointing == "none"
    assert plan_for(gradient_checkpointing=True).checkpointing == "full"
    assert plan_for(gradient_checkpointing="selective").checkpointing == "selective"
    memory = line(plan_for(), "memory")
    assert memory.value.endswith("of 140 GiB")
    assert "weights 6.9 GiB, gradients 2.3 GiB, optimizer 9.2 GiB, activations of 32,768 tokens" in memory.reason
    assert line(plan_for(CPU, BERT), "memory").reason.endswith("activations not known")


@pytest.mark.parametrize(
    ("gib", "tokens", "options", "again"),
    [
        (140.0, 8192, {}, True),
        (140.0, 8192, {"precision": "bf16-pure"}, False),
        (80.0, 8192, {"precision": "bf16-pure"}, True),
        (80.0, 4000, {}, False),
        (80.0, 8192, {"gradient_checkpointing": "selective"}, True),
        (80.0, 8192, {"gradient_checkpointing": "full"}, False),
        (80.0, 8192, {"fp8": Fp8Config()}, False),
        (80.0, 8192, {"shape": dataclasses.replace(SHAPE_1B, norms_before=0)}, False),
    ],
    ids=["many tokens", "little of the memory", "more of it", "few tokens", "some layers", "no layer", "fp8", "olmo2"],
)
def test_norms_are_made_again_where_that_is_worth_something(gib, tokens, options, again):
    products = (Product(("q_proj",), 4096, 6144),)
    changes = {"shape": options.pop("shape", SHAPE_1B), "head_words": 128_256, "products_fused": products}
    model = dataclasses.replace(LLAMA, **changes)
    data = dataclasses.replace(DATA, longest=tokens // 8, max_length=tokens // 8)
    plan = plan_for(dataclasses.replace(gpu(gib), fp8=True), model, data, fp8=options.pop("fp8", None), **options)
    assert plan.norms_again == again
    said = line(plan, "norms")
    assert (said is not None) == again
    if again:
        layers = 8 if plan.checkpointing == "selective" else 16
        saved = layers * 2 * 2048 * 2 * 8192 / GIB
        expected = f"{saved:.1f} GiB" if saved >= 1 else f"{saved * 1024:.0f} MiB"
        assert f"not kept: {expected} less" in said.reason


@pytest.mark.parametrize(
    ("gib", "tokens", "options", "kept"),
    [
        (140.0, 2048, {}, True),
        (140.0, 2056, {}, False),
        (24.0, 2048, {}, False),
        (140.0, 1024, {"gradient_checkpointing": "selective"}, False),
        (140.0, 1024, {"fp8": Fp8Config()}, False),
        (140.0, 1024, {"shape": dataclasses.replace(SHAPE_1B, rms=False)}, False),
    ],
    ids=["few tokens", "many tokens", "little memory", "some layers again", "fp8", "no decoder of ours"],
)
def test_gates_are_kept_where_that_costs_little(gib, tokens, options, kept):
    products = (Product(("q_proj",), 4096, 6144),)
    changes = {"shape": options.pop("shape", SHAPE_1B), "head_words": 128_256, "products_fused": products}
    data = dataclasses.replace(DATA, longest=tokens // 8, max_length=tokens // 8)
    hardware, model = dataclasses.replace(gpu(gib), fp8=True), dataclasses.replace(LLAMA, **changes)
    plan = plan_for(hardware, model, data, fp8=options.pop("fp8", None), **options)
    assert plan.gates_kept == kept
    said = line(plan, "gates")
    assert (said is not None) == kept
    if kept:
        assert f"made again: {16 * 8192 * 2 * tokens / 2**20:.0f} MiB more, for speed" in said.reason


def test_layers_with_dropout_are_not_captured_under_checkpointing():
    plan = plan_for(model=BERT, gradient_checkpointing=True)
    assert not plan.capture
    assert "layers with dropout" in line(plan, "step").reason
    assert plan_for(model=BERT).capture


def test_paging_is_for_states_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(fitting, "has_bitsandbytes", lambda: True)
    fits = plan_for(optimizer="paged_adamw_32bit")
    assert fits.capture
    assert fits.optimizer == ADAMW
    assert line(fits, "paging").value == "not needed"
    large = dataclasses.replace(LLAMA, parameters=8_000_000_000)
    tight = plan_for(model=large, optimizer="paged_adamw_32bit", gradient_checkpointing="full")
    assert tight.optimizer == Kind("adamw", paged=True)
    assert not tight.capture
    assert line(tight, "paging").value == "on"
    assert "AdamW, paged states" in line(tight, "optimizer").value
    on_cpu = plan_for(CPU, optimizer="paged_lion_32bit")
    assert on_cpu.optimizer == Kind("lion")
    assert "host memory anyway" in line(on_cpu, "paging").reason
    monkeypatch.setattr(fitting, "has_bitsandbytes", lambda: False)
    assert plan_for(optimizer="paged_adamw_32bit").optimizer == ADAMW
    with pytest.raises(UserError, match=r"is not installed: pip install 'automodel-finetune\[quant\]'"):
        plan_for(model=large, optimizer="paged_adamw_32bit", gradient_checkpointing="full")


def test_8_bits_need_a_gpu_and_the_library(monkeypatch):
    with pytest.raises(UserError, match="there is no GPU here. Use adamw."):
        plan_for(CPU, optimizer="adamw_bnb_8bit")
    monkeypatch.setattr(fitting, "has_bitsandbytes", lambda: False)
    with pytest.raises(UserError, match="lion_8bit comes from bitsandbytes, which is not installed"):
        plan_for(optimizer="lion_8bit")
    with pytest.raises(UserError, match="adamw_8bit comes from bitsandbytes, unless steps are captured"):
        plan_for(model=BERT, optimizer="adamw_8bit", gradient_checkpointing=True)
    own = plan_for(optimizer="adamw_8bit")
    assert own.capture
    assert own.optimizer == Kind("adamw", bits=8)
    assert not own.late_update
    assert "8-bit moments of our own" in line(own, "step").reason
    monkeypatch.setattr(fitting, "has_bitsandbytes", lambda: True)
    assert not plan_for(model=BERT, optimizer="adamw_8bit", gradient_checkpointing=True).capture
    plan = plan_for(optimizer="paged_adamw_8bit")
    assert plan.optimizer == Kind("adamw", bits=8, paged=True)
    assert "only AdamW is recorded" in line(plan, "step").reason
    assert line(plan, "paging") is None


@pytest.mark.parametrize("name", ["lion", "adafactor", "muon", "sgd", "rmsprop", "adagrad"])
def test_other_optimizers_run_eagerly(name):
    plan = plan_for(optimizer=name)
    assert not plan.capture
    assert plan.optimizer == KINDS[name]


def test_inputs_of_layers_may_wait_on_the_host():
    kept = plan_for(gradient_checkpointing="full")
    moved = plan_for(gradient_checkpointing="full", activation_offload=True)
    assert moved.offload
    assert not kept.offload
    assert moved.memory_gib < kept.memory_gib - 0.5
    assert "comes back one layer ahead" in line(moved, "offload").reason
    plenty = plan_for(gradient_checkpointing="auto", activation_offload=True)
    assert not plenty.offload
    assert line(plenty, "offload").value == "not needed"
    with pytest.raises(UserError, match="activation_offload: the copies are part of captured steps, but the step is n"):
        plan_for(model=BERT, gradient_checkpointing="full", activation_offload=True)


def test_a_table_that_is_the_head_has_8_bit_moments_in_captured_steps():
    shape = dataclasses.replace(LLAMA.shape, tied=True)
    tied = plan_for(model=dataclasses.replace(LLAMA, shape=shape), optimizer="adamw_8bit")
    apart = plan_for(optimizer="adamw_8bit")
    table = shape.vocabulary * shape.width
    assert apart.memory_gib - tied.memory_gib == pytest.approx(table * 2 * (3 - 4 / 256) / 2**30, rel=0.01)
