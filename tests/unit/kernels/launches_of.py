"""What training launches, and what the recipes foresee, both written down without a GPU.

    python tests/unit/kernels/launches_of.py            prints JSON, one object per case

A process of its own, because the tests around it run the same modules in Triton's interpreter. The models are real ones
of transformers, fused by the code a run uses, on CPU tensors: launches are caught, so all numbers are rubbish, and no
control flow depends on them. Flash attention has no CPU version that training could use, so it gets one here.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

import numpy as np
import torch
import transformers as hf

from automodel.data.collate import PackedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.kernels import ahead_recipes, late_update, weight_gradient
from automodel.kernels.ahead_facts import Facts, Head, shape_of
from automodel.kernels.ahead_recipes import Bench, recipes_for
from automodel.kernels.ahead_worker import Gpu, Recorder
from automodel.kernels.flat_adamw import FlatAdamW
from automodel.kernels.late_update import late_parameters
from automodel.kernels.token_scores import TokenScores
from automodel.models.forward import make_loss_forward
from automodel.models.fuse import fuse, layers_of
from automodel.models.fused_decoder import DECODERS
from automodel.optim.build import parameter_groups
from automodel.optim.config import OptimizerConfig
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import task_named

HOPPER = Gpu(90, 132)
COPIES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LONGEST = 40
late_update.SMALLEST = 1  # the matrices here are small
weight_gradient.makes_full_rounds = ahead_recipes.makes_full_rounds = lambda *size: True

aten = torch.library.Library("aten", "IMPL")


def flash_forward(q, k, v, *rest, **options):
    number = torch.zeros((), dtype=torch.int64)
    return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0]), number, number, torch.zeros(0)


def flash_backward(dout, q, k, v, *rest, **options):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


aten.impl("_flash_attention_forward", flash_forward, "CPU")
aten.impl("_flash_attention_backward", flash_backward, "CPU")


def make_model(kind: str, task: str, **options):
    bert = {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192,
        "vocab_size": 90, "max_position_embeddings": 70, "pad_token_id": 0,
    }  # fmt: skip
    distilbert = {
        "dim": 128, "n_layers": 2, "n_heads": 2, "hidden_dim": 192, "vocab_size": 90, "max_position_embeddings": 70,
    }  # fmt: skip
    own = {
        "distilbert": distilbert,
        "electra": bert | {"embedding_size": 64},
        "modernbert": bert | {"local_attention": 16, "num_hidden_layers": 4},
    }
    decoder = bert | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 1}
    config = hf.AutoConfig.for_model(kind, **(own.get(kind, decoder if kind in DECODERS else bert) | options))
    by_task = {
        "causal-lm": hf.AutoModelForCausalLM,
        "text-classification": hf.AutoModelForSequenceClassification,
        "token-classification": hf.AutoModelForTokenClassification,
    }
    return by_task[task].from_config(config)


def make_batch(task: str, size: int, pairs: bool):
    rng, writer = np.random.default_rng(0), SampleWriter()
    for row in range(size):
        ids = rng.integers(10, 80, rng.integers(5, LONGEST)).tolist()
        extra = {"token_types": [0] * (len(ids) - 2) + [1] * 2} if pairs else {}
        label = row % 2
        if task in ("token-classification", "causal-lm"):
            writer.add(row, ids, token_labels=[label] * len(ids), **extra)
        else:
            writer.add(row, ids, label=label, **extra)
    collate = PackedCollator(
        TokenStore.in_memory(writer.finish()), place=task_named(task).rows.labels, bucket_tokens=64,
        max_seqlen=LONGEST, micro_batch_size=size, sort_tokens=True,
    )  # fmt: skip
    return collate(range(size))


def train_and_evaluate(model, facts: Facts, task: str, pairs: bool) -> None:
    """What `engine/captured.py` records, then what `engine/evaluate.py` does."""
    model.to(torch.bfloat16 if facts.precision == "bf16-pure" else torch.float32)
    late = not facts.accumulates and facts.shape.blocks != "stock"
    optimizer = FlatAdamW(
        parameter_groups(model, OptimizerConfig(decay_norms_and_biases=facts.groups == 1)),
        max_norm=1.0,
        copy_dtype=COPIES.get(facts.precision),
        flat_gradients=facts.accumulates,
        lr_factors=torch.ones(7, dtype=torch.float64),
        initial_loss_scale=2.0 if facts.precision == "fp16" else None,
        lazy=model.get_input_embeddings().weight if facts.lazy else None,
        late=late_parameters(layers_of(model)) if late else [],
    )
    optimizer._tables = optimizer._tables[1:]  # the row that a capture gets
    fused = fuse(model, torch.zeros(1, dtype=torch.int64), None, LONGEST) if facts.precision != "fp32" else 0
    fusable = facts.shape.blocks != "stock" and facts.precision != "fp32"
    assert bool(fused) == fusable, (model.config.model_type, fused, facts)
    inside = facts.head.words > 0 or facts.classes > 0
    forward = make_loss_forward(model, task_named(task).head, "packed", swapped=bool(fused), fused=inside)
    tally = TokenScores("cpu") if facts.head.counts else None
    loss = dataclasses.replace(task_named(task).loss(LossConfig(z_loss=facts.head.z_loss), None, None), tally=tally)
    model.train()
    batch = make_batch(task, facts.batch, pairs)
    for part in range(len(optimizer.flat.late_parts)):
        optimizer.update_late(part, beside=part > 0)
    loss.scaled_sum(forward(batch), batch, torch.ones(())).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        optimizer.settle()
        batch = make_batch(task, facts.evaluation_batch, pairs)
        loss.scores(forward(batch), batch, tally)


def compare(kind: str, task: str, pairs: bool, options: dict, **about) -> dict:
    model = make_model(kind, task, **options)
    shape = shape_of(model.config.to_dict())
    shape = dataclasses.replace(shape, pools=shape.pools and task == "text-classification")
    classes = 2 if shape.blocks == "post-norm" and task == "text-classification" else 0
    facts = Facts(shape, evaluation_batch=16, classes=classes, **about).on(HOPPER.capability)
    launched, foreseen, by_recipe = set(), set(), {}
    with Recorder(HOPPER, lambda s: launched.add((s.name, s.data))):
        train_and_evaluate(model, facts, task, pairs)
    for recipe in recipes_for(facts):
        names = by_recipe.setdefault(recipe.name, set())
        with Recorder(HOPPER, lambda s: (foreseen.add((s.name, s.data)), names.add(s.name))):  # noqa: B023
            recipe.run(Bench(facts))
    return {
        "case": f"{kind}, {task}, {'pairs, ' if pairs else ''}{options}, {about}",
        "launched": len(launched),
        "unforeseen": sorted(launched - foreseen),
        "needless": sorted({name for name, _ in foreseen - launched}),
        "by_recipe": {name: sorted(kernels) for name, kernels in by_recipe.items()},
    }


def cases():
    classify, tag, language = "text-classification", "token-classification", "causal-lm"
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    yield "distilbert", classify, False, {}, {"lazy": True}
    yield "distilbert", classify, False, {"dropout": 0.0, "attention_dropout": 0.0}, {"batch": 3, "precision": "fp16"}
    yield "distilbert", tag, False, {}, {"lazy": True}
    yield "bert", classify, False, {}, {"lazy": True, "precision": "bf16-pure"}
    yield "bert", classify, True, {}, {"accumulates": True}
    yield "bert", classify, False, {}, {"precision": "fp32"}
    yield "roberta", classify, False, no_dropout, {"lazy": True, "batch": 6}
    yield "electra", classify, False, {}, {"lazy": True}
    yield "modernbert", classify, False, {}, {"lazy": True}
    yield "modernbert", classify, False, {"attention_dropout": 0.1}, {"accumulates": True, "batch": 5}
    yield "modernbert", classify, False, {"classifier_pooling": "mean"}, {"lazy": True, "groups": 1}
    yield "llama", language, False, {}, {"head": Head(90, z_loss=1e-4)}
    yield "llama", language, False, {}, {"head": Head(90, counts=True)}
    yield "llama", language, False, {"tie_word_embeddings": True}, {"head": Head(90, tied=True), "precision": "fp16"}
    yield "llama", language, False, {"tie_word_embeddings": True}, {"head": Head(90, tied=True), "accumulates": True}
    yield "llama", classify, False, {"attention_bias": True, "mlp_bias": True}, {"lazy": True}
    yield "mistral", language, False, {}, {"accumulates": True}
    yield "qwen2", classify, False, {}, {"lazy": True, "precision": "fp16"}
    yield "qwen3", classify, False, {}, {"lazy": True}
    yield "smollm3", language, False, {"no_rope_layers": [1, 0]}, {"precision": "bf16-pure"}
    yield "phi3", classify, False, {"partial_rotary_factor": 0.5}, {"lazy": True}
    yield "gemma", language, False, {}, {}
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    yield "gemma3_text", language, False, windows, {}
    yield "gemma2", language, False, windows, {}
    yield "gemma2", classify, False, windows, {"lazy": True}
    yield "olmo2", classify, False, {}, {"lazy": True}


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps([compare(*case, **about) for *case, about in cases()]))
