"""Models that somebody changed after loading them (copied, moved and replaced layers, an attention of their own):
the drop-in classes and Trainer compute what transformers computes, packed where that is right and stock where not."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch import nn
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

import automodel
from automodel.models import drop_in
from automodel.models.auto_class import classes_in_transformers
from automodel.models.changed import as_made, what_changed
from automodel.models.drop_in import path_taken
from automodel.models.families import FAMILIES
from automodel.models.task_head import NEXT_TOKEN
from automodel.tasks.registry import TASKS
from automodel.trainer.obstacles import why_stock
from drop_in_pairs import CLOSE, FUSABLE, assert_same, batch, both
from tiny_models import tiny
from tiny_runs import make_tokenizer

WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def pair(tmp_path, kind, task="causal-lm", **overrides):
    """(the stock model, ours), both in training."""
    if task == "text-classification":
        overrides = {"num_labels": 3} | overrides
    tiny(kind, task, **overrides)[1].save_pretrained(tmp_path / kind)
    return tuple(model.train() for model in both(tmp_path / kind, task))


def layers_of(model):
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers


def with_copied_layer(model):
    """Depth up-scaling: the copy brings a config object of its own along."""
    layers = layers_of(model)
    layers.append(copy.deepcopy(layers[-1]))
    model.config.num_hidden_layers = len(layers)
    if hasattr(layers[-1], "self_attn"):
        layers[-1].self_attn.layer_idx = len(layers) - 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [*model.config.layer_types, model.config.layer_types[-1]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "bert"])
def test_documents_stay_apart_in_copied_layers(tmp_path, kind, fused, monkeypatch):
    if fused:
        monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    task = "text-classification" if kind == "bert" else "causal-lm"
    wide = ({"hidden_size": 64} if kind == "bert" else FUSABLE) if fused else {}
    models = pair(tmp_path, kind, task, **wide)
    for model in models:
        with_copied_layer(model)
    assert_same(*models, batch(task), "fused" if fused else "packed")
    attentions = {m.config._attn_implementation for m in models[1].modules() if hasattr(m, "config")}
    assert attentions == {"sdpa"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_copied_layers_are_recomputed_as_they_were_computed(tmp_path, reentrant):
    models = pair(tmp_path, "llama")
    for model in models:
        with_copied_layer(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same(*models, batch())


def test_documents_stay_apart_in_layers_that_peft_replicates(tmp_path):
    peft = pytest.importorskip("peft")
    stock, ours = pair(tmp_path, "llama")
    settings = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False}
    adapted = []
    for model in (stock, ours):
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", layer_replication=[[0, 2], [1, 2]], **settings)
        adapted.append(peft.get_peft_model(model, config))
    results = []
    for model in adapted:
        loss = model(**batch()).loss
        loss.backward()
        results.append([loss] + [p.grad for p in model.parameters() if p.requires_grad])
    assert path_taken(ours)[0] == "packed"
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_layers_with_another_attention_than_the_model_are_stock(tmp_path):
    models = pair(tmp_path, "llama")
    for model in models:
        with_copied_layer(model)
        model.model.layers[-1].self_attn.config._attn_implementation = "eager"
    losses = [model(**batch()).loss for model in models]
    assert torch.equal(*losses)
    assert path_taken(models[1]) == ("stock", "attention is sdpa in some layers and eager in others")


class OwnAttention(nn.Module):
    """Somebody's: the mask it is given, no rotation, nothing of transformers' interface."""

    def __init__(self, old):
        super().__init__()
        self.q, self.k, self.v, self.o = old.q_proj, old.k_proj, old.v_proj, old.o_proj
        self.head_dim = old.head_dim

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        heads = (p(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        how = {"attn_mask": attention_mask, "is_causal": attention_mask is None, "enable_gqa": True}
        attended = nn.functional.scaled_dot_product_attention(*heads, **how)
        return self.o(attended.transpose(1, 2).flatten(2)), None


class OwnLayer(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.inner = OwnAttention(old.self_attn)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return hidden_states + self.inner(hidden_states, attention_mask)[0]


class QuietSubclass(modeling_llama.LlamaAttention):
    """With transformers' `forward`, and who knows what else."""


def replaced_attention(model):
    for layer in model.model.layers:
        layer.self_attn = OwnAttention(layer.self_attn)


def replaced_forward(model):
    for layer in model.model.layers:
        layer.self_attn.forward = OwnAttention(layer.self_attn).forward


def wrapped_forward(model):
    """`functools.wraps` gives it the name and the module of what it replaces."""
    for layer in model.model.layers:
        own = OwnAttention(layer.self_attn)
        layer.self_attn.forward = functools.wraps(layer.self_attn.forward)(lambda *a, own=own, **k: own(*a, **k))


def replaced_layer(model):
    model.model.layers[0] = OwnLayer(model.model.layers[0])


def subclassed_attention(model):
    model.model.layers[1].self_attn.__class__ = QuietSubclass


CHANGES = {
    replaced_attention: "model.layers.0.self_attn is a OwnAttention, which neither transformers nor",
    replaced_forward: "the forward of model.layers.0.self_attn is somebody's own",
    wrapped_forward: "the forward of model.layers.0.self_attn is somebody's own",
    replaced_layer: "model.layers.0 is a OwnLayer",
    subclassed_attention: "model.layers.1.self_attn is a QuietSubclass",
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_of_somebodys_own_runs_as_in_stock_transformers(tmp_path, change):
    models = pair(tmp_path, "llama")
    for model in models:
        change(model)
    assert_same(*models, batch(), "stock")
    assert path_taken(models[1])[1].startswith(CHANGES[change])


@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaModel", "LlamaForCausalLM"])
def test_a_patched_class_runs_as_in_stock_transformers(tmp_path, name, monkeypatch):
    """Before the model is loaded, or after."""
    models = pair(tmp_path, "llama")
    patched = getattr(modeling_llama, name)
    forward, seen = patched.forward, []

    def own(self, *args, **kwargs):
        seen.append(kwargs.get("attention_mask") is not None)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(patched, "forward", own)
    assert_same(*models, batch(), "stock")
    assert path_taken(models[1])[1].endswith("is somebody's own")
    assert_same(models[0], both(tmp_path / "llama", "causal-lm")[1].train(), batch(), "stock")
    assert all(seen)


class QuietModel(transformers.LlamaForCausalLM):
    """Without a `forward` of its own."""


class OwnModel(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("own", [QuietModel, OwnModel])
def test_a_subclass_of_a_model_runs_as_in_stock_transformers(tmp_path, own):
    stock, _ = pair(tmp_path, "llama")
    ours = drop_in.speed_up(own.from_pretrained(tmp_path / "llama"), NEXT_TOKEN).train()
    assert_same(stock, ours, batch(), "stock")
    assert path_taken(ours)[1].startswith(f"the model is a {own.__name__}, which neither transformers nor")


def test_another_function_under_the_name_of_the_attention_is_called(tmp_path, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    models = pair(tmp_path, "llama")
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *a, **k: (2 * sdpa(*a, **k)[0], None))
    assert_same(*models, batch(), "stock")


class MeanPooler(nn.Module):
    def forward(self, hidden_states):
        return hidden_states.mean(dim=1)


def doubled(loss):
    return lambda *args, **kwargs: 2 * loss(*args, **kwargs)


def loss_in_the_table(model, patch):
    patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", doubled(loss_utils.ForCausalLMLoss))


def other_cross_entropy(model, patch):
    patch.setattr(loss_utils, "fixed_cross_entropy", doubled(loss_utils.fixed_cross_entropy))


def loss_on_the_model(model, patch):
    model.loss_function = loss_utils.ForMaskedLMLoss  # which does not shift labels


@pytest.mark.parametrize("change", [loss_in_the_table, other_cross_entropy, loss_on_the_model])
def test_another_loss_is_the_loss(tmp_path, change, monkeypatch):
    models = pair(tmp_path, "llama")
    usual = models[0](**batch()).loss.item()
    with monkeypatch.context() as patch:
        change(models[0], patch)
        if change is loss_on_the_model:
            change(models[1], patch)
        assert_same(*models, batch(), "stock")
        assert abs(models[0](**batch()).loss.item() - usual) > 0.01
        arguments = automodel.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        found = why_stock(automodel.Trainer(model=models[1], args=arguments), automodel.Trainer)
    assert found == path_taken(models[1])[1] == "the model has a loss function of its own"


@pytest.mark.parametrize("pooler", [MeanPooler, nn.Identity])
def test_a_pooler_of_somebodys_own_sees_whole_rows(tmp_path, pooler):
    models = pair(tmp_path, "bert", "text-classification")
    outputs = []
    for model in models:
        model.bert.pooler = pooler()
        outputs.append(model(**{k: v for k, v in batch("text-classification").items() if k != "labels"}).logits)
    assert path_taken(models[1])[0] == "stock"
    assert torch.equal(*outputs)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_linear_layers_may_be_anybodys(tmp_path):
    models = pair(tmp_path, "llama")
    for model in models:
        model.model.layers[0].self_attn.v_proj.__class__ = OwnLinear
        up = model.model.layers[1].mlp.up_proj
        up.forward = lambda x, up=up: nn.functional.linear(x, up.weight) + 1
    assert_same(*models, batch(), "packed")


PEFT_CONFIGS = {
    "LoraConfig": {"target_modules": "all-linear", "r": 4, "init_lora_weights": False},
    "IA3Config": {"target_modules": ["q_proj", "gate_proj"], "feedforward_modules": ["gate_proj"]},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_modules_of_peft_are_packed(tmp_path, kind):
    peft = pytest.importorskip("peft")
    stock, ours = pair(tmp_path, "llama")
    losses = []
    for model in (stock, ours):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **PEFT_CONFIGS[kind]))
        losses.append(adapted(**batch()).loss)
    assert path_taken(ours)[0] == "packed"
    torch.testing.assert_close(*losses, **CLOSE)


def reversed_layers(model):
    model.model.layers = nn.ModuleList(list(model.model.layers)[::-1])


def shorter_window(model):
    model.config.sliding_window = 3


@pytest.mark.parametrize("change", [reversed_layers, shorter_window])
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen2", "gemma2", "cohere2", "exaone4", "olmo3", "ministral"])
def test_windows_are_those_of_the_place_not_of_the_layer(tmp_path, kind, change):
    """Stock masks are made for places: a layer that was moved has the mask of where it stands."""
    more = {**WINDOWS, "use_sliding_window": True} if kind == "qwen2" else {}
    models = pair(tmp_path, kind, **more)
    for model in models:
        change(model)
    assert_same(*models, batch(), "stock")


def test_a_window_that_layers_read_from_the_config_may_change(tmp_path):
    models = pair(tmp_path, "mistral", sliding_window=6)
    for model in models:
        shorter_window(model)
    assert_same(*models, batch(), "packed")
    for model in models:
        with_copied_layer(model)
        model.config.sliding_window = 5  # the copy keeps its own
    assert_same(*models, batch(), "stock")


def other_activation(model):
    for layer in layers_of(model):
        if hasattr(layer, "mlp"):
            layer.mlp.act_fn = nn.ReLU()
        else:
            layer.intermediate.intermediate_act_fn = nn.ReLU()


def other_norm(model):
    for layer in layers_of(model):
        if hasattr(layer, "mlp"):
            layer.input_layernorm = nn.LayerNorm(model.config.hidden_size)
        else:
            layer.output.LayerNorm = nn.RMSNorm(model.config.hidden_size)


def shared_layer(model):
    layers = layers_of(model)
    layers[0] = layers[1]


@pytest.mark.parametrize("change", [other_activation, other_norm, shared_layer])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_blocks_are_fused_only_of_the_modules_that_transformers_made(tmp_path, kind, change, monkeypatch):
    monkeypatch.setattr(drop_in, "kernels_run", lambda model: True)
    task = "text-classification" if kind == "bert" else "causal-lm"
    models = pair(tmp_path, kind, task, **({"hidden_size": 64} if kind == "bert" else FUSABLE))
    assert_same(*models, batch(task), "fused")
    for model in models:
        model.use_cache = model.config.use_cache = False  # which counts places that shared layers do not have
        change(model)
    assert_same(*models, batch(task), "packed")


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (kind, task.name)
        for task in TASKS
        for kind, family in FAMILIES.items()
        if not task.head.encoder_decoder
        and kind in classes_in_transformers(task.head)
        and (family.decoder or not task.head.next_token)
    ],
)
def test_every_family_is_as_transformers_made_it(kind, task):
    _, model = tiny(kind, task)
    state = torch.get_rng_state()
    assert what_changed(model) is None
    assert as_made(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_positions_of_a_roberta_whose_words_have_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    stock, ours = pair(tmp_path, "roberta", "text-classification")
    losses = []
    for model in (stock, ours):
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "word_embeddings"], r=4)
        losses.append(peft.get_peft_model(model, config)(**batch("text-classification", pad=1)).loss)
    assert path_taken(ours)[0] == "packed"
    torch.testing.assert_close(*losses, **CLOSE)


def test_positions_are_counted_by_the_pad_token_of_the_embeddings(tmp_path):
    models = pair(tmp_path, "roberta", "text-classification")
    for model in models:
        model.config.pad_token_id = 4
    assert_same(*models, batch("text-classification", pad=1), "stock")


def unchanged(model):
    pass


@pytest.mark.parametrize(
    ("kind", "change", "way"),
    [
        ("llama", unchanged, "packed"),
        ("llama", with_copied_layer, "packed"),
        ("bert", with_copied_layer, "packed"),
        ("llama", replaced_attention, "stock"),
        ("bert", other_activation, "stock"),
        ("qwen2", reversed_layers, "stock"),
    ],
)
def test_trainer_learns_the_same(tmp_path, kind, change, way):
    task, windows = "text-classification", {**WINDOWS, "use_sliding_window": True} if kind == "qwen2" else {}
    rows = [
        {"input_ids": b["input_ids"][0].tolist(), "label": n % 3}
        for n in range(20)
        for b in [batch(task, rows=(4 + n,), seed=n)]
    ]
    losses = []
    for home in (transformers, automodel):
        model = tiny(kind, task, num_labels=3, pad_token_id=0, **windows)[1]
        change(model)
        arguments = home.TrainingArguments(
            str(tmp_path), max_steps=10, per_device_train_batch_size=4, learning_rate=5e-3, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        collator = transformers.DataCollatorWithPadding(make_tokenizer())
        trainer = home.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert trainer.acceleration.path == way, trainer.acceleration
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}


def test_trainer_names_what_is_somebodys_own(tmp_path, monkeypatch):
    def obstacle():
        arguments = automodel.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        return why_stock(automodel.Trainer(model=model, args=arguments), automodel.Trainer)

    _, model = tiny("roberta", "text-classification")
    assert obstacle() is None
    model.roberta.embeddings.word_embeddings = nn.Embedding(99, 32)  # without a pad token: its neighbour has it
    assert obstacle() is None
    _, model = tiny("llama", "text-classification", pad_token_id=0)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, *args, **kwargs: None)
    assert obstacle() == "the forward of model.layers.0.self_attn is somebody's own"
