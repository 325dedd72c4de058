"""The auto classes: Hugging Face's own, with the reference's keywords honoured or refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import automodel
from automodel.config.errors import UserError
from automodel.kernels import obstacles
from automodel.models.task_head import NEXT_TOKEN

spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[2] / "tiny_models.py")
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)

NAMES = ["CausalLM", "SequenceClassification", "TokenClassification", "Seq2SeqLM"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    tiny_models.tiny("bert", "text-classification", num_labels=3)[1].save_pretrained(path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_subclass_of_the_class_of_the_same_name(name):
    ours = getattr(automodel, f"AutoModelFor{name}")
    assert issubclass(ours, getattr(transformers, f"AutoModelFor{name}"))
    assert getattr(automodel, f"NeMoAutoModelFor{name}") is ours


def test_the_model_is_the_plain_class_and_hf_keywords_work(folder):
    model, info = automodel.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, hidden_dropout_prob=0.25, output_loading_info=True, local_files_only=True
    )
    assert isinstance(model, transformers.BertForSequenceClassification)
    assert isinstance(model, transformers.PreTrainedModel)
    assert str(type(model)) == str(transformers.BertForSequenceClassification)
    assert model.config.hidden_dropout_prob == 0.25
    assert not info["missing_keys"]


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bfloat16", "bf16", torch.bfloat16])
def test_torch_dtype_takes_every_spelling(folder, dtype):
    model = automodel.AutoModelForSequenceClassification.from_pretrained(folder, torch_dtype=dtype)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"torch_dtype": "bfloat17"}, "torch_dtype: 'bfloat17' is not a dtype"),
        ({"torch_dtype": "bf16", "dtype": torch.float16}, "disagree"),
        ({"use_sdpa_patching": False, "attn_implementation": "sdpa"}, "drop one of them"),
    ],
)
def test_contradictions_are_refused(folder, keywords, message):
    with pytest.raises(UserError, match=message):
        automodel.AutoModelForSequenceClassification.from_pretrained(folder, **keywords)


@pytest.mark.parametrize(
    ("keywords", "attention"),
    [
        ({}, "sdpa"),
        ({"use_sdpa_patching": True}, "sdpa"),
        ({"use_sdpa_patching": False}, "eager"),
        ({"attn_implementation": "eager"}, "eager"),
    ],
)
def test_attention_keywords_are_honoured(folder, keywords, attention):
    model = automodel.AutoModelForSequenceClassification.from_pretrained(folder, **keywords)
    assert model.config._attn_implementation == attention


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have flash-attn")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_a_missing_flash_attention_is_mapped_and_said(folder, caplog, name):
    model = automodel.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=name)
    assert model.config._attn_implementation == "sdpa"
    assert f"{name} is mapped to sdpa" in caplog.text


def test_the_engine_gets_stock_models():
    from automodel.models.auto import class_for

    model = class_for(NEXT_TOKEN).from_config(tiny_models.tiny_config("llama"))
    assert type(model) is transformers.LlamaForCausalLM


def test_from_config_takes_a_config_or_a_folder(folder):
    config = tiny_models.tiny_config("llama")
    model = automodel.AutoModelForCausalLM.from_config(config, torch_dtype="bf16", use_sdpa_patching=False)
    assert (type(model).__name__, model.dtype, model.config._attn_implementation) == (
        "LlamaForCausalLM",
        torch.bfloat16,
        "eager",
    )
    assert automodel.AutoModelForSequenceClassification.from_config(str(folder)).config.num_labels == 3


def test_nothing_global_changes(folder):
    before = dict(vars(transformers.BertForSequenceClassification)), dict(vars(transformers.AutoModelForCausalLM))
    automodel.AutoModelForSequenceClassification.from_pretrained(folder, use_liger_kernel=True, use_sdpa_patching=True)
    assert (
        dict(vars(transformers.BertForSequenceClassification)),
        dict(vars(transformers.AutoModelForCausalLM)),
    ) == before


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_packages_imports_no_torch():
    code = (
        "import sys, automodel, nemo_automodel, nemo_automodel.components.distributed.fsdp2;"
        "from nemo_automodel.components.quantization.fp8 import FP8Config;"
        "from nemo_automodel.components._peft.lora import PeftConfig;"
        "print('torch' in sys.modules, 'transformers' in sys.modules, automodel.__version__)"
    )
    version = automodel.__version__
    assert run_python(code) == f"False False {version}"
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    assert f'version = "{version}"' in pyproject.read_text()


def test_the_shim_is_made_of_aliases():
    import nemo_automodel
    from automodel.adapters.config import PeftConfig as OurPeft
    from automodel.distributed.config import DistributedConfig
    from automodel.models.config import Fp8Config
    from nemo_automodel.components._peft.lora import PeftConfig
    from nemo_automodel.components.datasets.llm.squad import make_squad_dataset
    from nemo_automodel.components.datasets.llm.text_classification import TextClassificationDataset
    from nemo_automodel.components.distributed.fsdp2 import FSDP2Manager
    from nemo_automodel.components.quantization.fp8 import FP8Config

    assert nemo_automodel.NeMoAutoModelForCausalLM is automodel.AutoModelForCausalLM
    assert nemo_automodel.TextClassificationDataset is TextClassificationDataset is automodel.TextClassificationDataset
    assert make_squad_dataset is automodel.make_squad_dataset
    assert (FSDP2Manager, FP8Config, PeftConfig) == (DistributedConfig, Fp8Config, OurPeft)
    with pytest.raises(AttributeError, match="nemo_automodel.*has no attribute 'Nope'; it re-exports"):
        _ = nemo_automodel.Nope
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = automodel.Nope


def gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")


def test_the_name_of_fused_steps_says_what_this_machine_has(monkeypatch):
    """Not whether the package liger-kernel is there. Read anew each time it is imported."""

    def told():
        from nemo_automodel.components._transformers.auto_model import HAS_LIGER_KERNEL

        return HAS_LIGER_KERNEL

    assert told() is (torch.cuda.get_device_capability() >= (8, 0) if torch.cuda.is_available() else True)
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(obstacles, "triton_obstacle", lambda: "")
    assert told() is True
    monkeypatch.setattr(obstacles, "triton_obstacle", lambda: "Triton is not installed")
    assert told() is False
    monkeypatch.setattr(obstacles, "triton_obstacle", lambda: "")
    gpu(monkeypatch, (7, 5))
    assert told() is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert told() is True


def test_importing_the_references_names_prints_nothing():
    script = "import nemo_automodel\nfrom nemo_automodel.components._transformers.auto_model import HAS_LIGER_KERNEL"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
