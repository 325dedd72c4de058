"""Adapters against the real PEFT library: logits, gradients, folders in both directions, and a whole loss curve.

PEFT is not a dependency; without it these tests are skipped, visibly.
"""

from __future__ import annotations

import json

import pytest
import torch

import tiny_models
import tiny_runs as tiny
from automodel.adapters.attach import attach, merge, resolve, trained_tensors
from automodel.adapters.config import PeftConfig
from automodel.adapters.peft_folder import read_tensors, resolve_folder, write_folder
from automodel.config.errors import UserError
from automodel.data.batch import PackedBatch
from automodel.models.checkpointing import use_gradient_checkpointing
from automodel.models.forward import make_forward
from automodel.tasks.registry import CAUSAL_LM, task_named

peft = pytest.importorskip("peft")

FP32 = {"rtol": 1e-4, "atol": 2e-6}
KINDS = [
    ("llama", "causal-lm"), ("qwen3", "causal-lm"), ("bert", "text-classification"),
    ("distilbert", "text-classification"), ("gpt2", "causal-lm"), ("llama", "token-classification"),
]  # fmt: skip


def adapted(kind, task, **section):
    """Ours: a tiny model with an adapter that is not zero."""
    _, model = tiny_models.tiny(kind, task)
    attach(model, resolve(PeftConfig(dim=4, alpha=8, **section), model, task_named(task).head.adapter_type, "base"))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.normal_(std=0.1)
    return model


def theirs_from(folder, kind, task):
    _, stock = tiny_models.tiny(kind, task)
    return peft.PeftModel.from_pretrained(stock, folder, is_trainable=True).eval()


def their_gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            found[name.replace(".default.weight", "") if "lora_" in name else name] = parameter.grad
    return found


def documents(task):
    torch.manual_seed(1)
    return [torch.randint(5, 90, (length,)) for length in (9, 4, 13)]


def packed(task, ids):
    lengths = torch.tensor([len(i) for i in ids])
    ends = lengths.cumsum(0)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()
    total = int(ends[-1])
    read = torch.arange(total) if task != "text-classification" else cu[:-1].long()
    return PackedBatch(
        input_ids_T=torch.cat(ids), position_ids_T=torch.cat([torch.arange(n) for n in lengths]), cu_seqlens_D=cu,
        max_seqlen=int(lengths.max()), read_positions_R=read, labels_R=torch.zeros(len(read), dtype=torch.long),
        num_tokens=total, num_documents=len(ids), num_labels=len(read), token_type_ids_T=None,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["plain", "packed", "recomputed", "accumulated"])
@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_logits_and_gradients_are_those_of_peft(tmp_path, kind, task, how):
    ours = adapted(kind, task, use_rslora=kind == "qwen3")
    write_folder(ours, ours._automodel_adapter, tmp_path)
    theirs, ids = theirs_from(tmp_path, kind, task), documents(task)
    if how == "recomputed":
        use_gradient_checkpointing(ours, "full")
        ours.train()  # no dropout in tiny models
    expected = [theirs(input_ids=i[None]).logits[0] for i in ids]
    sum(logits.square().sum() for logits in expected).backward()
    if how in ("packed", "recomputed"):
        logits = make_forward(ours, task_named(task).head, "packed")(packed(task, ids))
        torch.testing.assert_close(logits, torch.cat([e.reshape(-1, e.shape[-1]) for e in expected]), **FP32)
        logits.square().sum().backward()
    else:
        for document, e in zip(ids, expected, strict=True):
            logits = ours(input_ids=document[None]).logits[0]
            torch.testing.assert_close(logits, e, **FP32)
            if how == "accumulated":
                logits.square().sum().backward()
        if how == "plain":
            sum(ours(input_ids=i[None]).logits.square().sum() for i in ids).backward()
    own, other = {n: t.grad for n, t in trained_tensors(ours).items()}, their_gradients(theirs)
    assert own.keys() == other.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-3, atol=1e-4 * float(other[name].abs().max()) + 1e-7)
    assert all(p.grad is None for p in ours.parameters() if not p.requires_grad)


@pytest.mark.parametrize("asked", [r".*\.(q|v)_proj", r"model\.layers\.1\..*_proj", ".*(down_proj|lm_head)"])
def test_a_regular_expression_means_the_modules_that_it_means_to_peft(tmp_path, asked):
    ours = adapted("llama", "causal-lm", target_modules=asked)
    write_folder(ours, ours._automodel_adapter, tmp_path)
    _, stock = tiny_models.tiny("llama", "causal-lm")
    meant = peft.get_peft_model(
        stock, peft.LoraConfig(target_modules=asked, task_type="CAUSAL_LM")
    ).targeted_module_names
    loaded = theirs_from(tmp_path, "llama", "causal-lm").targeted_module_names
    assert sorted(ours._automodel_adapter.ranks) == sorted(meant) == sorted(loaded)


def test_falcons_own_linear_layers_get_adapters(tmp_path):
    """A class of their own, which computes what `nn.Linear` does."""
    ours = adapted("falcon", "causal-lm")
    write_folder(ours, ours._automodel_adapter, tmp_path)
    theirs, ids = theirs_from(tmp_path, "falcon", "causal-lm"), torch.stack([torch.arange(5, 14)])
    assert len(ours._automodel_adapter.ranks) == 8
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **FP32)
    merge(ours)
    torch.testing.assert_close(ours(ids).logits, theirs.merge_and_unload()(ids).logits, **FP32)


@pytest.mark.parametrize(("kind", "task"), [KINDS[1], KINDS[2], KINDS[4]])
def test_dora_is_that_of_peft(tmp_path, kind, task):
    """Logits, gradients of A, B and lengths, and the folder both ways."""
    ours = adapted(kind, task, use_dora=True)
    with torch.no_grad():
        for name, tensor in trained_tensors(ours).items():
            if name.endswith("lora_magnitude_vector"):
                tensor.mul_(torch.linspace(0.8, 1.2, len(tensor)))
    (tmp_path / "ours").mkdir()
    write_folder(ours, ours._automodel_adapter, tmp_path / "ours")
    theirs, ids = theirs_from(tmp_path / "ours", kind, task), documents(task)
    expected = [theirs(input_ids=i[None]).logits[0] for i in ids]
    sum(logits.square().sum() for logits in expected).backward()
    found = [ours(input_ids=i[None]).logits[0] for i in ids]
    sum(logits.square().sum() for logits in found).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **FP32)
    own, other = {n: t.grad for n, t in trained_tensors(ours).items()}, their_gradients(theirs)
    assert own.keys() == other.keys()
    assert sum("magnitude" in name for name in own) == len(ours._automodel_adapter.ranks)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-3, atol=1e-4 * float(other[name].abs().max()) + 1e-7)
    theirs.save_pretrained(tmp_path / "theirs")
    _, again = tiny_models.tiny(kind, task)
    attach(again, resolve_folder(tmp_path / "theirs", again, task_named(task).head.adapter_type, "base"))
    torch.testing.assert_close(again(input_ids=ids[0][None]).logits[0], expected[0], **FP32)


@pytest.mark.parametrize("how", ["plain", "packed", "recomputed", "accumulated"])
@pytest.mark.parametrize(("dora", "dropout"), [(True, 0.0), (True, 0.3), (False, 0.3)])
@pytest.mark.parametrize(("kind", "task"), [KINDS[1], KINDS[2], KINDS[4]])
def test_dropout_and_dora_however_a_step_is_made(tmp_path, kind, task, dora, dropout, how):
    """In training: from the same random state both drop the same inputs of A, so every number can be compared. That is
    so for one document at a time; without dropout several are packed."""
    ours = adapted(kind, task, use_dora=dora, dropout=dropout)
    write_folder(ours, ours._automodel_adapter, tmp_path)
    theirs, ids = theirs_from(tmp_path, kind, task).train(), documents(task)
    forward = None if how == "plain" else make_forward(ours, task_named(task).head, "packed")
    if how == "recomputed":
        use_gradient_checkpointing(ours, "full")
    ours.train()
    torch.manual_seed(7)
    expected = [theirs(input_ids=i[None]).logits[0] for i in ids]
    sum(logits.square().sum() for logits in expected).backward()
    torch.manual_seed(7)
    losses = []
    together = how in ("packed", "recomputed") and not dropout
    for at in [slice(None)] if together else [slice(i, i + 1) for i in range(len(ids))]:
        logits = forward(packed(task, ids[at])) if forward else ours(input_ids=ids[at][0][None]).logits[0]
        torch.testing.assert_close(
            logits, torch.cat([e.reshape(-1, e.shape[-1]) for e in expected[at]]).view_as(logits), **FP32
        )
        losses.append(logits.square().sum())
        if how == "accumulated":
            losses[-1].backward()
    if how != "accumulated":
        sum(losses).backward()
    own, other = {n: t.grad for n, t in trained_tensors(ours).items()}, their_gradients(theirs)
    assert own.keys() == other.keys()
    assert any("magnitude" in name for name in own) == dora
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-3, atol=1e-4 * float(other[name].abs().max()) + 1e-7)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_merged_is_the_adapter(kind, task, dora):
    model, ids = adapted(kind, task, use_dora=dora), documents(task)
    with torch.no_grad():
        before = [model(input_ids=i[None]).logits for i in ids]
        merge(model)
        for document, expected in zip(ids, before, strict=True):
            torch.testing.assert_close(model(input_ids=document[None]).logits, expected, **FP32)


@pytest.mark.parametrize(("kind", "task"), KINDS[:4])
def test_an_adapter_of_peft_is_read_whatever_rule_made_it(tmp_path, kind, task):
    _, stock = tiny_models.tiny(kind, task)
    linear = {"llama": ["q_proj", "down_proj"], "qwen3": ["q_proj", "down_proj"], "bert": ["query", "value"]}
    targets = linear.get(kind, ["q_lin", "lin1"])
    task_type = "CAUSAL_LM" if task == "causal-lm" else "SEQ_CLS"
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, layers_to_transform=[1], rank_pattern={targets[0]: 2},
        alpha_pattern={targets[0]: 16}, init_lora_weights=False, task_type=task_type,
    )  # fmt: skip
    theirs = peft.get_peft_model(stock, config).eval()
    theirs.save_pretrained(tmp_path)
    _, model = tiny_models.tiny(kind, task)
    adapter = resolve_folder(tmp_path, model, task_named(task).head.adapter_type, "base")
    assert sorted(set(adapter.ranks.values())) == [2, 4]
    attach(model, adapter)
    for document in documents(task):
        expected = theirs(input_ids=document[None]).logits
        torch.testing.assert_close(model(input_ids=document[None]).logits, expected, **FP32)
    again = tmp_path / "again"  # and out once more, patterns included
    again.mkdir()
    write_folder(model, adapter, again)
    reloaded = theirs_from(again, kind, task)
    torch.testing.assert_close(reloaded(input_ids=document[None]).logits, expected, **FP32)


@pytest.mark.parametrize(("kind", "task"), [("llama", "causal-lm"), ("distilbert", "text-classification")])
def test_twenty_steps_have_the_losses_of_hf_trainer_with_peft(tmp_path, monkeypatch, kind, task):
    from automodel.engine.run import finetune
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    classifies = task == "text-classification"
    tokenizer = tiny.make_tokenizer()
    _, model = tiny_models.tiny(kind, task, pad_token_id=0, initializer_range=0.2)
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    texts = [(tokenizer(r["text"])["input_ids"], r["label"]) for r in tiny.reviews(96)]
    rows = [
        {"input_ids": ids, "label": label} if classifies else {"input_ids": ids, "labels": ids} for ids, label in texts
    ]
    tiny.write_jsonl(tmp_path / "train.jsonl", rows)
    config = f"""task: {task}
model: {tmp_path}/start
dataset: {{path: {tmp_path}/train.jsonl}}
peft: {{dim: 4, alpha: 16}}
dataloader: {{shuffle: false, batch_size: 4}}
optimizer: {{lr: 1e-2, weight_decay: 0.01}}
step_scheduler: {{max_steps: 20, log_every_steps: 1, grad_acc_steps: {1 if classifies else 2}}}
"""
    (tmp_path / "run.yaml").write_text(config + f"checkpoint: {{checkpoint_dir: {tmp_path}/out}}\n" + tiny.FP32)
    finetune(load_run_config([tmp_path / "run.yaml"]))
    ours = list(tiny.losses(tmp_path / "out").values())
    theirs = their_losses(tmp_path, kind, task, rows, model)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert max(ours) - min(ours) > 0.05 * ours[0], "nothing moved, so equality would prove little"


def their_losses(folder, kind, task, rows, model):
    """HF Trainer over real PEFT, from the A that our run drew (attach draws it from the seed)."""
    from torch.utils.data import SequentialSampler
    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    _, ours = tiny_models.tiny(kind, task, pad_token_id=0, initializer_range=0.2)
    attach(ours, resolve(PeftConfig(dim=4, alpha=16), ours, task_named(task).head.adapter_type, "base"), seed=42)
    start = folder / "adapter"
    start.mkdir()
    write_folder(ours, ours._automodel_adapter, start)
    adapted_model = peft.PeftModel.from_pretrained(model, start, is_trainable=True)
    losses = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    classifies = task == "text-classification"
    collator = (DataCollatorWithPadding if classifies else DataCollatorForSeq2Seq)(
        AutoTokenizer.from_pretrained(folder / "start")
    )
    given = [{"input_ids": r["input_ids"], "labels": r["label"] if classifies else r["labels"]} for r in rows]
    if not classifies:
        given = [{**r, "attention_mask": [1] * len(r["input_ids"])} for r in given]
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=20, per_device_train_batch_size=4,
        gradient_accumulation_steps=1 if classifies else 2, learning_rate=1e-2, weight_decay=0.01, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    InOrder(
        model=adapted_model, args=arguments, train_dataset=given, data_collator=collator, callbacks=[Keep()]
    ).train()
    return losses


def test_a_run_folder_is_loaded_by_peft_with_identical_logits(tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification

    from automodel.engine.run import finetune
    from automodel.engine.saved import open_saved
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    run = tiny.write_run(tmp_path, text="peft: {dim: 4}\nstep_scheduler: {max_steps: 8}\n")
    finetune(load_run_config([run]))
    torch.manual_seed(99)  # PEFT must bring the whole head along: this one is random
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=2)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    saved = open_saved(tmp_path / "out")
    ours = saved.load("cpu")
    ids = torch.tensor([saved.tokenizer("good film and a dull plot")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-7)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "model"
    )
    assert set(read_tensors(tmp_path / "out")) == set(trained_tensors(ours))


def test_the_adapter_of_a_language_model_is_loaded_by_stock_transformers(tmp_path, monkeypatch):
    """Which finds the base by itself, as it does for a folder that PEFT wrote."""
    from transformers import AutoModelForCausalLM

    from automodel.engine.run import finetune
    from automodel.engine.saved import open_saved
    from automodel.plan.check import load_run_config

    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    run = tiny.write_run(tmp_path, kind="llama", text="peft: {dim: 4}\nstep_scheduler: {max_steps: 4}\n")
    finetune(load_run_config([run], ["task=causal-lm", "optimizer.lr=0.1"]))
    theirs, saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), open_saved(tmp_path / "out")
    ours, base = saved.load("cpu"), AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.task == CAUSAL_LM
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(theirs(ids).logits, base(ids).logits, atol=1e-3)


def test_a_folder_that_peft_wrote_answers_questions(tmp_path):
    """It has neither config nor labels nor tokenizer: those come from the base and from the head's size."""
    from transformers import AutoModelForSequenceClassification

    from automodel.engine.predict import Predictor

    folder = tiny.make_model_folder(tmp_path / "model", classifier=True, num_labels=3)
    base = AutoModelForSequenceClassification.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False, task_type="SEQ_CLS")
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    predictor = Predictor(tmp_path / "adapter")
    answer = predictor.classify(["a good film"])[0]
    assert answer is not None
    with torch.no_grad():
        logits = theirs(torch.tensor([predictor.tokenizer("a good film")["input_ids"]])).logits[0]
    assert list(answer.scores.values()) == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)


def test_an_adapter_without_a_part_that_its_base_lacks_is_refused(tmp_path):
    """PEFT trains the classifier, but saves no pooler: with a base that has none, each loading would draw another."""
    from transformers import AutoModelForSequenceClassification

    from automodel.engine.saved import open_saved

    folder = tiny.make_model_folder(tmp_path / "model")
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"'bert.pooler.dense.bias' is neither in the adapter"):
        open_saved(tmp_path / "adapter").load("cpu")


def trained_by_peft(folder, tied=False, save=None, **section):
    """A small adapter that PEFT itself trained, saved with `save`."""
    _, stock = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=tied)
    torch.manual_seed(2)
    model = peft.get_peft_model(stock, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **section))
    ids = torch.randint(5, 90, (2, 9))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder, **save or {})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa.*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: olora"),
        ({"tied": True, "modules_to_save": ["embed_tokens"]}, "'model.embed_tokens.weight' than 'lm_head.weight'"),
        ({"target_modules": ["lm_head"], "save": {"save_embedding_layers": True}}, "save_embedding_layers=False"),
    ],
)  # fmt: skip
def test_an_adapter_that_would_answer_otherwise_here_is_refused(tmp_path, form, message):
    """PiSSA and OLoRA change the base before they train; PEFT unties tables that it trains; a tied model has one."""
    trained_by_peft(tmp_path, **{"target_modules": ["q_proj"], **form})
    _, model = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=bool(form.get("tied")))
    with pytest.raises(UserError, match=message):
        resolve_folder(tmp_path, model, "CAUSAL_LM", "base")


def test_a_tied_table_and_its_head_are_trained_together_and_read_by_peft(tmp_path):
    _, model = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=True)
    section = PeftConfig(dim=4, modules_to_save=("embed_tokens", "lm_head"))
    attach(model, resolve(section, model, "CAUSAL_LM", "base"))
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in trained_tensors(model).values():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    write_folder(model, model._automodel_adapter, tmp_path)
    ids = torch.randint(5, 90, (2, 9))
    wanted = model(input_ids=ids).logits
    _, stock = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=True)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(stock, tmp_path).eval()(input_ids=ids).logits, wanted)
    _, again = tiny_models.tiny("llama", "causal-lm", tie_word_embeddings=True)
    attach(again, resolve_folder(tmp_path, again, "CAUSAL_LM", "base"))
    torch.testing.assert_close(again(input_ids=ids).logits, wanted)
    assert again._automodel_adapter.saved == model._automodel_adapter.saved
