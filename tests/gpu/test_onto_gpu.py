"""Weights reach the GPU as they lie in their files, in pieces of any size and from several threads."""

import pytest
import torch

from automodel.models.task_head import NEXT_TOKEN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import transformers

    import tiny_runs as tiny
    from automodel.models import onto_gpu
    from automodel.models.config import ModelConfig
    from automodel.models.onto_gpu import Way
    from automodel.models.streamed import open_weights


@pytest.mark.parametrize("seat", [64, 1 << 20])
@pytest.mark.parametrize(("of", "to"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_numbers_arrive(monkeypatch, seat, of, to):
    monkeypatch.setattr(onto_gpu, "SEAT", seat)
    sources = [torch.randn(shape).to(getattr(torch, of)) for shape in [(7, 33), (1,), (), (300, 5), (0, 4)]]
    targets = [torch.full(source.shape, 7.0, dtype=getattr(torch, to), device="cuda") for source in sources]
    way = Way(torch.device("cuda", 0))  # waits for what was queued before: the sevens, too
    for target, source in zip(targets, sources, strict=True):
        way.carry(target, source)
    torch.cuda.current_stream().wait_stream(way.stream)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.to(target.dtype))


def test_a_model_is_what_transformers_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(onto_gpu, "SEAT", 1000)
    folder = tiny.make_model_folder(tmp_path / "model", "llama")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cfg = ModelConfig(pretrained_model_name_or_path=str(folder))
    weights = open_weights(cfg, wanted.config, NEXT_TOKEN)
    assert weights is not None
    turned = weights.model.lm_head  # memory that is not contiguous: its numbers go the ordinary way
    turned.weight = torch.nn.Parameter(torch.empty_like(turned.weight.T.contiguous()).T)
    weights.place("cuda")
    assert not weights.model.lm_head.weight.is_contiguous()
    found = dict(weights.model.named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found[name].cpu(), parameter), name
