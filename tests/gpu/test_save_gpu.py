"""A model leaves the GPU tensor by tensor, and is what transformers would have written."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    import transformers as t
    from safetensors.torch import load_file

    import tiny_models
    from automodel.checkpoint import tensor_file
    from automodel.models import save
    from automodel.models.save import save_hf_folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seat", [1000, 1 << 23])
def test_the_folder_is_that_of_the_host(tmp_path, monkeypatch, seat, dtype):
    """Shared weights, memory that is not contiguous, weights that are views of one buffer and were just written."""
    monkeypatch.setattr(tensor_file, "SEAT", seat)
    model = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=True)[1].to(dtype)
    wanted = load_file(save_hf_folder(model, None, tmp_path / "host") / "model.safetensors")
    model.cuda()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        view = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
        parameter.data = view.T.contiguous().T if parameter.ndim == 2 and parameter.shape[0] % 3 else view
    assert not all(parameter.is_contiguous() for parameter in model.parameters())
    written = []
    plain = save.write_streamed
    monkeypatch.setattr(save, "write_streamed", lambda *given: (written.append(1), plain(*given)))
    folder = save_hf_folder(model, None, tmp_path / "device")
    assert written, "not by transformers"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    again = dict(t.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_parameters())
    assert all(torch.equal(again[name], parameter.cpu()) for name, parameter in model.named_parameters())
