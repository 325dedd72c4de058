"""Every family that has a tensor-parallel table, cut in two: hidden states, loss and gradients are those of the whole.
`python cut_families.py [family …]`, under torchrun with two ranks. Prints one line for each."""

from __future__ import annotations

import sys

import torch
import transformers as t

from automodel.distributed.grid import make_grid
from automodel.distributed.layout import Layout
from automodel.distributed.shards import whole_of
from automodel.distributed.tensor_parallel import apply_tensor_parallel
from automodel.distributed.world import joined
from automodel.models.lm_head import unprojected_head
from automodel.tasks.loss_config import LossConfig
from automodel.tasks.registry import CAUSAL_LM

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": 51, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "granite": ("Granite", {}),
    "olmo2": ("Olmo2", {}),
    "phi": ("Phi", {"tie_word_embeddings": True}),  # its head has a bias
    "phi3": ("Phi3", {}),
    "smollm3": ("SmolLM3", {}),
    "starcoder2": ("Starcoder2", {}),
    "gpt_neox": ("GPTNeoX", {}),
}


def loss_of(model) -> torch.Tensor:
    ids = torch.arange(12).remainder(51).unsqueeze(0) * 7 % 51
    hidden = getattr(model, model.base_model_prefix)(
        input_ids=ids, position_ids=torch.arange(12).unsqueeze(0), use_cache=False
    ).last_hidden_state
    later = unprojected_head(model)
    assert later is not None
    loss = CAUSAL_LM.loss(LossConfig(), None, None).sum(later(hidden), (ids + 3) % 51)
    loss.backward()
    return loss.detach()


def compare(family: str, sequence: bool, rank: int) -> str:
    name, more = FAMILIES[family]
    config = getattr(t, f"{name}Config")(**SIZES | more)
    torch.manual_seed(0)
    whole = getattr(t, f"{name}ForCausalLM")(config).train()
    torch.manual_seed(0)
    cut = getattr(t, f"{name}ForCausalLM")(config).train()
    grid = make_grid(Layout(tp=2, fsdp=True, sequence_parallel=sequence), rank, "cpu")
    matrices = apply_tensor_parallel(cut, grid)
    wanted, got = loss_of(whole), loss_of(cut)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    parameters = dict(cut.named_parameters())
    worst = 0.0
    for key, parameter in whole.named_parameters():
        assert parameter.grad is not None, key
        found = parameters[key].grad
        assert found is not None, key
        torch.testing.assert_close(
            whole_of(found), parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )
        worst = max(worst, float((whole_of(found) - parameter.grad).abs().max()))
    return f"{family}{' sp' if sequence else ''}: {matrices} cut, loss {float(got):.4f}, gradients within {worst:.0e}"


if __name__ == "__main__":
    with joined() as ranks:
        for family in sys.argv[1:] or FAMILIES:
            for sequence in (False, True):
                said = compare(family, sequence, ranks.rank)
                if ranks.first:
                    print(said, flush=True)
