"""NeMo AutoModel's recipes as configs: what is carried over, what is written down because it is their default, and what
stands in the way."""

from __future__ import annotations

import pytest
import yaml

from automodel.config.errors import ConfigError, UserError
from automodel.migrate.verb import read_source, write_config
from automodel.plan.check import load_run_config

DATASETS = "nemo_automodel.components.datasets.llm"
MAPPED = "column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
LANGUAGE = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 16, local_batch_size: 2, num_epochs: 1, ckpt_every_steps: 50, val_every_steps: 25}
dist_env: {backend: nccl, timeout_minutes: 5}
rng: {_target_: nemo_automodel.components.training.rng.StatefulRNG, seed: 7, ranked: true}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: some/model
checkpoint: {enabled: true, checkpoint_dir: out/, model_save_format: safetensors, save_consolidated: true}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1, ep_size: null}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 16, use_triton: true}
dataset:
  _target_: MAPPED
  path_or_dataset_id: rows/train.jsonl
  split: train
  column_mapping: {question: prompt, answer: completion}
  answer_only_loss_mask: false
  seq_length: 832
  padding: do_not_pad
validation_dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: validation
  limit_dataset_samples: 64
packed_sequence: {packed_sequence_size: 832, split_across_pack: false}
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
  shuffle: false
optimizer: {_target_: torch.optim.Adam, lr: 1e-5, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0}
clip_grad_norm: {max_norm: 0.5}
ci: {time: "00:30:00"}
""".replace("MAPPED", f"{DATASETS}.{MAPPED}")
CLASSIFIER = """
step_scheduler: {global_batch_size: 32, local_batch_size: 32, num_epochs: 3, max_steps: None}
model:
  _target_: nemo_automodel.NeMoAutoModelForSequenceClassification.from_pretrained
  pretrained_model_name_or_path: some/encoder
  num_labels: 2
distributed: {dp_size: none, tp_size: 1}
distributed_config: {_target_: nemo_automodel.components.distributed.config.FSDP2Config, sequence_parallel: false}
dataset: {_target_: nemo_automodel.components.datasets.llm.seq_cls.GLUE_MRPC, split: train}
optimizer: {_target_: torch.optim.AdamW, lr: 2.0e-5}
lr_scheduler: {lr_decay_style: cosine}
"""


@pytest.fixture
def migrated(tmp_path):
    """The config that a recipe becomes, and the document with its notes."""

    def run(text: str, **changes):
        recipe = yaml.safe_load(text)
        for path, value in changes.items():
            *sections, key = path.split("__")
            at = recipe
            for section in sections:
                at = at.setdefault(section, {})
            at[key] = value
        source = tmp_path / "recipe.yaml"
        source.write_text(yaml.safe_dump(recipe))
        document = read_source(source)
        write_config(document, tmp_path / "run.yaml", overwrite=True)
        return load_run_config([tmp_path / "run.yaml"]), document

    return run


def test_a_language_models_recipe(migrated, tmp_path):
    (tmp_path / "recipe.yaml").write_text(LANGUAGE)
    document = read_source(tmp_path / "recipe.yaml")
    write_config(document, tmp_path / "run.yaml")
    cfg = load_run_config([tmp_path / "run.yaml"])
    assert (cfg.task, cfg.seed, cfg.training_optimizations.gradient_clipping) == ("causal-lm", 7, 0.5)
    assert (cfg.step_scheduler.global_batch_size, cfg.step_scheduler.local_batch_size) == (16, 2)
    assert (cfg.dataset.path, cfg.dataset.split, cfg.dataset.max_length) == ("rows/train.jsonl", None, 832)
    assert cfg.dataset.column_mapping == {"question": "prompt", "answer": "completion"}
    assert cfg.dataset.answer_only_loss is False
    assert cfg.validation_dataset.target == "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"
    assert (cfg.validation_dataset.split, cfg.validation_dataset.num_samples_limit) == ("validation", 64)
    assert (cfg.optimizer.lr, cfg.optimizer.eps) == (1e-5, 1e-8)  # text to YAML 1.1
    assert cfg.lr_scheduler.name == "constant"  # not our default
    assert (cfg.distributed.strategy, cfg.distributed.tp_size, cfg.distributed.dp_size) == ("fsdp2", 2, None)
    assert (cfg.peft.dim, cfg.packed_sequence.packed_sequence_size, cfg.dataloader.shuffle) == (16, 832, False)
    assert (cfg.checkpoint.checkpoint_dir, cfg.checkpoint.keep_best) == ("out/", False)
    left_out = {str(note).split(": ")[1] for note in document.left_out}
    assert left_out == {
        "dist_env", "ci", "checkpoint.model_save_format", "checkpoint.save_consolidated", "dataloader.collate_fn",
        "peft.use_triton", "rng.ranked", "dataset.padding",
    }  # fmt: skip
    assert "line 4: dist_env: processes find each other by themselves" in map(str, document.left_out)


def test_a_classifiers_recipe(migrated):
    cfg, document = migrated(CLASSIFIER)
    assert (cfg.task, cfg.model.num_labels) == ("text-classification", 2)
    assert (cfg.dataset.path, cfg.dataset.name, cfg.dataset.split) == ("nyu-mll/glue", "mrpc", "train")
    assert (cfg.step_scheduler.num_epochs, cfg.step_scheduler.max_steps) == (3, None)
    assert cfg.distributed.strategy == "fsdp2"
    assert migrated(CLASSIFIER, distributed__dp_size=1)[0].distributed.dp_size == 1  # not as many as there are GPUs
    rate = cfg.lr_scheduler
    assert (rate.name, rate.warmup_ratio, rate.min_lr_ratio) == ("cosine", 0.1, 0.01)  # NeMo's defaults
    assert any("the warm-up begins at 0 here" in str(note) for note in document.differs)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lr_decay_style": "constant", "lr_warmup_steps": 0}, ("constant", None, None)),
        ({"lr_decay_style": "constant", "lr_warmup_steps": 5}, ("constant_with_warmup", 5, None)),
        ({"lr_decay_style": "linear", "lr_warmup_steps": 5, "min_lr": 1e-6}, ("linear", 5, 1e-6)),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 5, "min_lr": 0}, ("inverse_sqrt", 5, 0)),
    ],
)
def test_rates(migrated, given, expected):
    rate = migrated(CLASSIFIER, lr_scheduler=given)[0].lr_scheduler
    assert (rate.name, rate.warmup_steps, rate.min_lr) == expected


def test_a_name_alone_is_enough_for_some_sections(migrated):
    """They were a traceback."""
    assert migrated(LANGUAGE, tokenizer="other/words")[0].model.tokenizer == "other/words"
    for strategy in ("ddp", "fsdp2"):
        assert migrated(LANGUAGE, distributed=strategy)[0].distributed.strategy == strategy
    # What is null, in every spelling of it, is not there.
    cfg, _ = migrated(LANGUAGE, peft=None, tokenizer="None", packed_sequence="none", validation_dataset="null")
    assert (cfg.peft, cfg.model.tokenizer, cfg.validation_dataset) == (None, None, None)


def test_a_shape_that_is_null_is_the_default(migrated):
    rate = migrated(CLASSIFIER, lr_scheduler={"lr_decay_style": None, "lr_warmup_steps": 5})[0].lr_scheduler
    assert (rate.name, rate.warmup_steps, rate.min_lr_ratio) == ("cosine", 5, 0.01)


@pytest.mark.parametrize("beside", [{"target_modules": "*.q_proj"}, {"exclude_modules": ["*.q_proj"]}])
def test_all_linear_layers_come_before_names_of_some(migrated, beside):
    """As in NeMo's ModuleMatcher: "matching by layer type takes absolute precedence"."""
    cfg, document = migrated(LANGUAGE, peft={"match_all_linear": True, "dim": 8, **beside})
    assert (cfg.peft.target_modules, cfg.peft.exclude_modules) == ("all-linear", ())
    (key,) = beside
    assert any(f"peft.{key}: match_all_linear comes before it" in str(note) for note in document.left_out)
    cfg, _ = migrated(LANGUAGE, peft={"match_all_linear": False, "dim": 8, "target_modules": "*.q_proj"})
    assert cfg.peft.target_modules == "*.q_proj"


def test_a_recipe_is_known_by_its_full_name_too(migrated):
    name = "nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction"
    target = "transformers.AutoModelForCausalLM.from_pretrained"
    assert migrated(LANGUAGE, recipe=name, model___target_=target)[0].task == "causal-lm"


def test_several_files_of_one_folder(migrated):
    files = ["rows/a.jsonl", "rows/b.jsonl"]
    cfg, _ = migrated(LANGUAGE, dataset__path_or_dataset_id=files)
    assert (cfg.dataset.path, cfg.dataset.data_files) == ("rows", ("a.jsonl", "b.jsonl"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "KnowledgeDistillationRecipe"}, "recipe: KnowledgeDistillationRecipe is not fine-tuning"),
        ({"dataset___target_": f"{DATASETS}.hellaswag.HellaSwag"}, "makes its rows by code of its own"),
        ({"dataset__chat_template": "{{ x }}"}, "dataset.chat_template: write the template to a file"),
        ({"dataset__path_or_dataset_id": ["a/x.jsonl", "b/x.jsonl"]}, "files of several folders"),
        ({"distributed__pp_size": 2}, "distributed.pp_size: 2: a model is not cut into stages here"),
        ({"packed_sequence__split_across_pack": True}, "documents are never cut at the border of a bin"),
        ({"lr_scheduler": {"lr_decay_steps": 5}}, "lr_scheduler.lr_decay_steps: the decay ends with the last step"),
        ({"step_scheduler": {"global_batch_size": 8}}, "step_scheduler: max_steps or num_epochs is needed"),
        ({"model__backend": {"attn": "te"}}, "model.backend: {'attn': 'te'}: this key is not known here"),
        ({"moe_metrics": {"enabled": True}}, "moe_metrics: this is not known here"),
        ({"moe_metrics": 5}, "moe_metrics: this is not known here"),
        ({"validation_dataset": "foo"}, "validation_dataset: 'foo': only a section with keys of its own"),
        ({"rng": 5}, "rng: 5: only a section with keys of its own"),
        ({"tokenizer": ["a"]}, "tokenizer: ['a']: only a section with keys of its own"),
        ({"distributed": "megatron_fsdp"}, "distributed: 'megatron_fsdp': only a section with keys of its own"),
        ({"distributed_config": "ddp"}, "distributed_config: 'ddp': only a section with keys of its own"),
        ({"step_scheduler": 100}, "step_scheduler: 100: only a section with keys of its own"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler: 'cosine': only a section with keys of its own"),
        ({"packed_sequence": 832}, "packed_sequence: 832: only a section with keys of its own"),
        ({"model": "some/model"}, "model: 'some/model': only a section with keys of its own"),
    ],
)
def test_what_cannot_be_carried_over_is_said_with_its_line(migrated, tmp_path, change, message):
    with pytest.raises(UserError) as error:
        migrated(LANGUAGE, **change)
    line = next(line for line in str(error.value).split("\n") if message in line)
    assert line.startswith("  line ")
    assert "cannot be turned into a config; nothing was written" in str(error.value)
    assert not (tmp_path / "run.yaml").exists()


def test_a_recipe_that_is_run_unchanged_is_sent_to_migrate(tmp_path):
    (tmp_path / "recipe.yaml").write_text(LANGUAGE)
    with pytest.raises(ConfigError, match=r"dist_env: .*NeMo AutoModel's; `automodel migrate` makes a config"):
        load_run_config([tmp_path / "recipe.yaml"])


def test_numbers_without_a_point_are_numbers_in_every_tools_file(tmp_path):
    source = tmp_path / "axolotl.yml"
    source.write_text(
        "base_model: some/model\nmicro_batch_size: 2\nlearning_rate: 2e-5\nlr_scheduler: cosine\nsequence_len: 512\n"
        "num_epochs: 1\nbf16: true\ndatasets:\n  - {path: x.jsonl, type: completion}\n"
    )
    write_config(read_source(source), tmp_path / "run.yaml")
    assert load_run_config([tmp_path / "run.yaml"]).optimizer.lr == 2e-5


def test_a_typo_is_told_from_a_key_that_nobody_knows(migrated):
    with pytest.raises(UserError, match=r"step_scheduler\.max_step: 4: .* not known here; did you mean max_steps\?"):
        migrated(LANGUAGE, step_scheduler__max_step=4)
    with pytest.raises(UserError, match=r"dataset\.column_maping: .* did you mean column_mapping\?"):
        migrated(LANGUAGE, dataset__column_maping={"question": "q"})


def test_settings_of_a_tokenizer_section_are_listed_as_left_out(migrated):
    _, document = migrated(LANGUAGE, tokenizer={"pretrained_model_name_or_path": "a/b", "trust_remote_code": True})
    assert any("tokenizer.trust_remote_code: the tokenizer's own settings" in str(note) for note in document.left_out)


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("- a\n", "holds no settings")])
def test_a_file_without_settings(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_source(tmp_path / "recipe.yaml")
