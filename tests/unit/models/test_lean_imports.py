"""After a lean import of transformers nothing heavy is there, and everything works that needs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import automodel

HEAVY = ["sklearn", "scipy", "pandas", "sympy", "accelerate", "torchao", "torch._dynamo", "torch.distributed.fsdp"]
START = f"""
import sys
from automodel.models.lean_imports import import_transformers
from automodel.models.stand_ins import StandIn
import_transformers()
import torch, transformers
def heavy():
    return [name for name in {HEAVY} if name in sys.modules]
def tiny(**more):
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64, eos_token_id=3, pad_token_id=0, **more)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()
"""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """One for all tests: the first process fills it, the others read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOMODEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def python(code, **env):
    """Runs a script in a process of its own and returns what it printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", START + code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_load_train_save_and_generate_without_them(tmp_path):
    printed = python(f"""
model = tiny()
ids = torch.arange(4, 12)[None]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("{tmp_path}")
loaded = transformers.AutoModelForCausalLM.from_pretrained("{tmp_path}")
torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
loaded.generate(ids, max_new_tokens=3)
print("heavy:", heavy())
""")
    assert printed.splitlines()[-1] == "heavy: []"


@pytest.mark.slow
def test_plain_imports_give_the_same_model_and_the_same_names(tmp_path):
    """What transformers exports, the weights a seed gives, and a training step do not depend on how it was imported."""
    code = """
import hashlib
names = sorted(dir(transformers)) + sorted(dir(transformers.models))
model = tiny()
ids = torch.arange(4, 12)[None]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
print(bool(heavy()), len(names), hashlib.sha256("".join(names).encode()).hexdigest(), model(ids).logits.sum().item())
"""
    lean, plain = python(code).split(), python(code, AUTOMODEL_PLAIN_IMPORTS="1").split()
    assert (lean[0], plain[0]) == ("False", "True")
    assert lean[1:] == plain[1:]


@pytest.mark.slow
def test_the_compiler_gets_what_it_was_promised():
    """The first step was taken without the compiler; afterwards models compile, and optimizers are left alone by it."""
    printed = python("""
from transformers import masking_utils
from transformers.integrations import deepgemm, finegrained_fp8
model, ids = tiny(), torch.arange(4, 12)[None]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
assert not heavy(), heavy()
assert isinstance(masking_utils.TransformGetItemToIndex, StandIn)
expected = model(ids).logits
compiled = torch.compile(model, backend="eager", fullgraph=True)
torch.testing.assert_close(compiled(ids).logits, expected)
assert not isinstance(masking_utils.TransformGetItemToIndex, StandIn)
allowed = torch._dynamo.trace_rules._allowed_callable_ids
assert id(finegrained_fp8._load_finegrained_fp8_kernel) in allowed
assert id(transformers.PreTrainedModel.__dict__.get("get_correct_attn_implementation")) not in allowed
inner = torch.optim.Optimizer.add_param_group.__wrapped__
assert "__dynamo_disable" not in inner.__dict__
torch.optim.AdamW(model.parameters(), lr=0.01)  # asks again, and is given the real thing
assert getattr(inner.__dict__["__dynamo_disable"], "_torchdynamo_disable", False)
optimizer.step()
print("compiled")
""")
    assert printed.strip() == "compiled"


def test_scikit_learn_scipy_and_the_stock_trainer_are_there_for_whoever_asks(tmp_path):
    printed = python(f"""
from transformers.generation import candidate_generator
from transformers.loss import loss_for_object_detection as detection
ids = torch.arange(4, 12)[None]
model = tiny()
alone = model.generate(ids, max_new_tokens=6, do_sample=False)
assert torch.equal(alone, model.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=tiny()))
if hasattr(candidate_generator, "roc_curve"):  # newer versions import it where they use it
    assert isinstance(candidate_generator.roc_curve, StandIn)
from sklearn.metrics import roc_curve
assert getattr(candidate_generator, "roc_curve", roc_curve) is roc_curve
assert detection.linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])[1].tolist() == [1, 0]
import numpy
picture = numpy.zeros((3, 16, 16), dtype=numpy.uint8)
processor = transformers.ViTImageProcessor(size=dict(height=8, width=8))
assert processor(images=picture, return_tensors="pt")["pixel_values"].shape == (1, 3, 8, 8)
from transformers import Trainer, TrainingArguments
rows = [dict(input_ids=torch.arange(4, 12), labels=torch.arange(4, 12)) for _ in range(4)]
arguments = TrainingArguments("{tmp_path}", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
print("loss", Trainer(model, arguments, train_dataset=rows).train().training_loss)
""")
    assert float(printed.split()[-1]) > 0


@pytest.mark.slow
def test_distributed_tensors_and_fsdp_work(tmp_path):
    printed = python(f"""
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.distributed.utils import is_dtensor
mesh = init_device_mesh("cpu", (1,))
a = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
assert is_dtensor(a) and not is_dtensor(torch.zeros(1))
b = (a @ a.T + 1).redistribute(mesh, [Replicate()]).to_local()
assert torch.equal(b, torch.arange(12.0).reshape(4, 3) @ torch.arange(12.0).reshape(4, 3).T + 1)
from transformers.distributed import fsdp
assert isinstance(fsdp.fully_shard, StandIn)
model = torch.nn.Linear(4, 4)
fsdp.fully_shard(model, mesh=mesh)
model(torch.ones(2, 4)).sum().backward()
assert is_dtensor(model.weight.grad)
assert not isinstance(fsdp.fully_shard, StandIn)
dist.destroy_process_group()
from automodel.distributed.farewell import wait_for_gloo
wait_for_gloo()
print("sharded")
""")
    assert printed.strip() == "sharded"


@pytest.mark.slow
def test_what_goes_wrong_falls_back_to_plain_imports():
    printed = python("""
assert "torch" in sys.modules
for name in [name for name in sys.modules if name.startswith("transformers")]:
    del sys.modules[name]
import builtins
builtins.__import__.withdraw()
plain = builtins.__import__
from automodel.models import lean_imports
lean_imports.TRANSFORMERS = ("transformers.no_such_module",)
lean_imports.import_transformers()
assert builtins.__import__ is plain
from transformers import LlamaForCausalLM
print("fell back")
""")
    assert printed.strip() == "fell back"


def test_only_commands_change_how_a_process_imports():
    """A script that imports the library keeps Python's own imports."""
    source = Path(automodel.__file__).parent
    callers = {p.relative_to(source).parts[0] for p in source.rglob("*.py") if "import_transformers()" in p.read_text()}
    assert callers <= {"cli", "benchmark", "models"}
    elsewhere = [p for p in (source / "models").glob("*.py") if "import_transformers()" in p.read_text()]
    assert [p.name for p in elsewhere] == ["lean_imports.py"]
