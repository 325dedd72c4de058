"""SFTTrainer against TRL's own: the same rows, arguments and seed give the same losses, step by step.

TRL is among the tools for comparisons (`automodel-finetune[compare]`); without it these tests are skipped, and say so.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset

import marked_words
from automodel import SFTConfig, SFTTrainer
from automodel.config.errors import UserError
from tiny_models import tiny
from tiny_runs import BAD, GOOD, NEUTRAL, make_tokenizer

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'automodel-finetune[compare]'")

BASE = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none",
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
PACKS = {"packing": True, "max_length": 32}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
WORDS, CHANCE = [*GOOD, *BAD, *NEUTRAL], random.Random(0)


def said(count=None):
    return " ".join(CHANCE.choice(WORDS) for _ in range(count or CHANCE.randint(2, 14)))


def turns(*roles):
    return [{"role": role, "content": said()} for role in roles]


TEXTS = [{"text": said()} for _ in range(24)]
PAIRS = [{"prompt": said() + " ", "completion": said()} for _ in range(24)]
ASKED = [{"prompt": turns("user"), "completion": turns("assistant")} for _ in range(24)]
CHATS = [{"messages": turns("system", "user", "assistant", "user", "assistant")} for _ in range(24)]
LABELLED = [{"input_ids": [5, 6, 7, 8, 9 + n], "labels": [-100, 8, 9 + n, 5, 6]} for n in range(24)]

SKIPS = {"dataset_kwargs": {"skip_prepare_dataset": True}}
DOCUMENTS = [
    {"input_ids": [5 + n, 6, 7, 8, 9, 10 + n, 11], "seq_lengths": [3, 4], "position_ids": [0, 1, 2, 0, 1, 2, 3]}
    for n in range(12)
] + [{"input_ids": [5 + n, 6, 7], "seq_lengths": [3], "position_ids": [0, 1, 2]} for n in range(12)]

CASES = {
    "texts": (TEXTS, {}),
    "texts cut": (TEXTS, {"max_length": 8, **EVALUATES}),
    "another column": ([{"body": row["text"]} for row in TEXTS], {"dataset_text_field": "body"}),
    "completions": (PAIRS, {"gradient_accumulation_steps": 2}),
    "completions and prompts": (PAIRS, {"completion_only_loss": False}),
    "prompts that fill the row": (PAIRS, {"max_length": 6}),
    "completions of chats": (ASKED, {}),
    "chats": (CHATS, {}),
    "answers": (CHATS, {"assistant_only_loss": True}),
    "answers in completions and prompts": (ASKED, {"assistant_only_loss": True, "completion_only_loss": False}),
    "labels of one's own": (LABELLED, EVALUATES),
    "packed": (TEXTS * 50, {**PACKS}),
    "packed and shuffled": (TEXTS, {**PACKS, "shuffle_dataset": True, **EVALUATES}),
    "packed, evaluated as they are": (TEXTS, {**PACKS, **EVALUATES, "eval_packing": False}),
    "packed completions": (PAIRS, {**PACKS, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "packed answers": (CHATS, {"packing": True, "max_length": 90, "assistant_only_loss": True}),
    "packed and split": (PAIRS, {**PACKS, "max_length": 8, "packing_strategy": "bfd_split"}),
    "wrapped": (PAIRS, {**PACKS, "packing_strategy": "wrapped"}),
    "documents in rows": (DOCUMENTS, {"padding_free": True, "max_length": None, **EVALUATES}),
    "documents in rows as they are": (DOCUMENTS, {"padding_free": True, "max_length": None, **SKIPS}),
    "positions of one's own": (DOCUMENTS, SKIPS),
}


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through():
    """accelerate collects garbage before every training, and half a million imported objects take 0.2 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()


BESIDE = ("entropy", "mean_token_accuracy", "num_tokens")
OF_TRAINING = ("loss", "learning_rate", *BESIDE, "aux_loss")
LOGGED = (*OF_TRAINING, "eval_loss", *(f"eval_{name}" for name in BESIDE), "eval_aux_loss")
"""What log lines have in TRL."""


def trained(home, folder, rows, options, family="llama", words=None, model=None, made=Dataset.from_list, **given):
    transformers.set_seed(1)
    data = made(rows)
    evaluates = data.select(range(9)) if "eval_strategy" in options else None
    model = model or tiny(family, "causal-lm", pad_token_id=0, max_position_embeddings=256)[1]
    words = words or make_tokenizer(decoder=True)
    trainer = home.SFTTrainer(
        model, home.SFTConfig(str(folder), **BASE | options),
        train_dataset=data, eval_dataset=evaluates, processing_class=words, **given,
    )  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    return trainer, {key: [e[key] for e in history if key in e] for key in LOGGED}


class Ours:
    SFTTrainer, SFTConfig = SFTTrainer, SFTConfig


@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_trl(name, tmp_path):
    rows, options = CASES[name]
    trainer, ours = trained(Ours, tmp_path / "ours", rows, options)
    theirs = trained(trl, tmp_path / "theirs", rows, options)[1]
    assert trainer.acceleration.path == "packed"
    assert [len(theirs[key]) for key in ("loss", *BESIDE)] == [4] * 4
    evaluations = 2 if "eval_strategy" in options else 0
    assert [len(theirs[key]) for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")] == [evaluations] * 3
    assert trainer.model.model_tags == ["trl", "sft"]
    assert trainer.aux_loss_enabled is False
    for key, values in theirs.items():
        assert ours[key] == pytest.approx(values, abs=1e-4), key


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3"])
@pytest.mark.parametrize("rows", ["chats", "completions of chats"])
def test_answers_of_templates_that_do_not_mark_them(family, rows, tmp_path):
    """TRL takes a training form of the template; ours learns the same tokens without one."""
    losses = []
    for home in (Ours, trl):
        words = marked_words.words(family)
        template = words.chat_template
        assert "generation %}" not in template
        sizes = {"pad_token_id": 0, "max_position_embeddings": 512, "vocab_size": len(words)}
        options = {"assistant_only_loss": True, **EVALUATES}
        model = tiny("llama", "causal-lm", **sizes)[1]
        trainer, found = trained(home, tmp_path, CASES[rows][0], options, words=words, model=model)
        assert trainer.processing_class.chat_template == template, "generation goes on with the model's own"
        losses.append(found)
    for key in ("loss", "eval_loss"):
        assert losses[0][key] == pytest.approx(losses[1][key], abs=1e-4), key


def test_adapters_and_formatting(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = {"peft_config": config, "formatting_func": lambda row: f"what is {row['text']} ?"}
    ours, theirs = (trained(home, tmp_path, TEXTS, {"max_length": 20}, **given)[1] for home in (Ours, trl))
    for key in LOGGED:
        assert ours[key] == pytest.approx(theirs[key], abs=1e-4), key
    assert ours["loss"][0] != pytest.approx(ours["loss"][-1], abs=1e-4)


@pytest.mark.parametrize("loss_only", [True, False])
def test_evaluated_means_of_models_that_count_labels_otherwise(loss_only, tmp_path):
    """GPT-2's training counts every row's first token; its evaluation does not, in TRL."""
    options = {**EVALUATES, "prediction_loss_only": loss_only}
    ours, theirs = (trained(home, tmp_path, TEXTS, options, family="gpt2")[1] for home in (Ours, trl))
    for key in LOGGED:
        assert ours[key] == pytest.approx(theirs[key], abs=1e-4), key


@pytest.mark.parametrize(
    ("rows", "options", "given"),
    [
        (CHATS, {"assistant_only_loss": True}, {}),
        (TEXTS, PACKS, {}),
        (TEXTS, {"max_length": 8}, {"formatting_func": lambda row: f"what is {row['text']} ?"}),
    ],
)
def test_rows_that_are_given_later_are_made_as_the_first_ones(rows, options, given, tmp_path):
    found = []
    for home in (Ours, trl):
        trainer = trained(home, tmp_path, rows, {**options, **EVALUATES}, **given)[0]
        at_first = trainer.evaluate()["eval_loss"]
        later = trainer.evaluate(Dataset.from_list(rows).select(range(9)))["eval_loss"]
        assert later == pytest.approx(at_first, abs=1e-6)
        found.append(later)
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_tokenizer_that_pads_on_the_left(tmp_path):
    """Rows are padded behind their ends all the same: on the left, padding would predict first tokens."""
    words = make_tokenizer(decoder=True)
    words.padding_side = "left"
    ours, theirs = (trained(home, tmp_path, TEXTS, EVALUATES, "gpt2", words=words) for home in (Ours, trl))
    assert ours[0].acceleration.path == "packed"
    assert words.padding_side == "left"
    for key in LOGGED:
        assert ours[1][key] == pytest.approx(theirs[1][key], abs=1e-4), key


def test_a_checkpoint_in_half_precision_is_trained_in_full(tmp_path):
    model = tiny("llama", "causal-lm", pad_token_id=0, max_position_embeddings=256)[1]
    model.bfloat16().save_pretrained(tmp_path / "model")
    ours, theirs = (trained(home, tmp_path, TEXTS, {}, model=str(tmp_path / "model")) for home in (Ours, trl))
    assert ours[0].model.dtype == theirs[0].model.dtype == torch.float32
    assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], abs=1e-4)
    options = {"model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 1}
    assert trained(Ours, tmp_path, TEXTS, options, model=str(tmp_path / "model"))[0].model.dtype == torch.bfloat16


def test_arguments_of_trls_own_config(tmp_path):
    class Mixed:
        SFTTrainer, SFTConfig = SFTTrainer, trl.SFTConfig

    for eos in (None, "good"):
        options = {**PACKS, "eos_token": eos, "max_steps": 1}
        trainer = trained(Mixed, tmp_path, TEXTS, options)[0]
        assert (trainer.args.packing, trainer.args.max_length, trainer.args.eos_token) == (True, 32, eos)


def mixture():
    transformers.set_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=len(make_tokenizer(decoder=True)), num_hidden_layers=2, num_local_experts=4,
            router_aux_loss_coef=0.05, pad_token_id=0, **sizes,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, **EVALUATES},
        {"router_aux_loss_coef": 0.2},
        {"router_aux_loss_coef": 0.0},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    ],
)
def test_the_loss_of_a_router(options, tmp_path):
    (mine, ours), (stock, theirs) = (trained(home, tmp_path, TEXTS, options, model=mixture()) for home in (Ours, trl))
    enabled = options.get("router_aux_loss_coef") != 0.0
    assert mine.aux_loss_enabled == stock.aux_loss_enabled == enabled
    assert bool(theirs["aux_loss"]) == enabled
    for key in LOGGED:
        assert ours[key] == pytest.approx(theirs[key], abs=1e-4), key


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"torch_empty_cache_steps": 100, "prediction_loss_only": True},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lines_of_trainers_own_steps(options, family, tmp_path):
    found = [trained(home, tmp_path, PAIRS, {**EVALUATES, **options}, family=family) for home in (Ours, trl)]
    assert found[0][0].acceleration.path == "stock"
    for key in LOGGED:
        assert found[0][1][key] == pytest.approx(found[1][1][key], abs=1e-4), key
    assert len(found[1][1]["eval_entropy"]) == 2


def test_what_evaluate_gives_back_and_that_predictions_have_no_line(tmp_path):
    values = []
    for home in (Ours, trl):
        trainer = trained(home, tmp_path, TEXTS, {"per_device_eval_batch_size": 2})[0]
        if home is Ours:
            trainer.predict(Dataset.from_list(PAIRS[:4]))
        values.append(trainer.evaluate(Dataset.from_list(TEXTS[:5])))
    names = ["eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens", "eval_loss"]
    assert [values[0][name] for name in names] == pytest.approx([values[1][name] for name in names], abs=1e-4)


def test_a_router_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="LlamaForCausalLM has no loss of a router to weigh"):
        trained(Ours, tmp_path, TEXTS, {"router_aux_loss_coef": 0.1})


def test_documents_of_a_stream_that_knows_no_columns(tmp_path):
    def stream(rows):
        return IterableDataset.from_generator(lambda: iter(rows))

    options = {"padding_free": True, "max_length": None}
    ours, theirs = (trained(home, tmp_path, DOCUMENTS, options, made=stream)[1] for home in (Ours, trl))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
