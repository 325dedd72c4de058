"""Every field of `TrainingArguments`, and what becomes of it in the drop-in Trainer: the table behind
docs/compatibility.md.

    engine      honoured in the engine's own steps too
    trainer     honoured; asking for it makes Trainer's own steps run (over the model's fast forward), and that is said
    inherited   left to transformers' code, which is ours unchanged (the hub, several processes, trackers)
    mapped      something that gives the same result takes its place
    script      not read by Trainer at all: for the script

Nothing is ignored: a new field of a newer transformers that is missing here fails a test, and so does one that is
called honoured while no test shows its effect (`tests/unit/trainer/test_field_effects.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldState:
    """What becomes of one field."""

    state: str
    words: str = ""


def _all(state: str, names: str, words: str = "") -> dict[str, FieldState]:
    return {name: FieldState(state, words) for name in names.split()}


FIELDS: dict[str, FieldState] = {
    **_all(
        "engine",
        "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 "
        "logging_strategy logging_steps logging_first_step logging_nan_inf_filter disable_tqdm report_to run_name "
        "eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
        "eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model "
        "save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model greater_is_better "
        "ignore_data_skip restore_callback_states_from_checkpoint seed data_seed use_cpu dataloader_drop_last "
        "dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context remove_unused_columns label_names train_sampling_strategy "
        "log_level full_determinism skip_memory_metrics use_cache",
    ),
    "optim": FieldState("engine", "AdamW in captured steps; any other on the CPU, or in Trainer's own steps"),
    "gradient_accumulation_steps": FieldState(
        "engine", "not of taggers, and of classifiers only where batches are equal: Trainer averages batch by batch"
    ),
    "fp16": FieldState("engine", "on a GPU, with loss scaling on the device"),
    "tf32": FieldState("engine", "torch's own switch, which TrainingArguments set"),
    "dataloader_pin_memory": FieldState("engine", "captured steps have page-locked buffers of their own"),
    "dataloader_in_order": FieldState("engine", "batches come in order"),
    "bf16_full_eval": FieldState("engine", "outside of training, as in Trainer"),
    "fp16_full_eval": FieldState("engine", "outside of training, as in Trainer"),
    **_all(
        "trainer",
        "label_smoothing_factor neftune_noise_alpha gradient_checkpointing gradient_checkpointing_kwargs "
        "torch_empty_cache_steps auto_find_batch_size include_num_input_tokens_seen use_liger_kernel "
        "liger_kernel_config optim_target_modules debug length_column_name",
    ),
    "optim_args": FieldState("engine", "on the CPU; on a GPU Trainer's own steps run"),
    "accelerator_config": FieldState("engine", "with `sync_each_batch` Trainer's own steps run"),
    **_all("mapped", "torch_compile torch_compile_mode torch_compile_backend",
           "captured steps on a GPU are not compiled, and faster; on the CPU Trainer's own steps are"),
    **_all(
        "inherited",
        "log_on_each_node log_level_replica project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "eval_use_gather_object save_on_each_node enable_jit_checkpoint push_to_hub hub_token hub_private_repo "
        "hub_model_id hub_strategy hub_always_push hub_revision ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank average_tokens_across_devices",
    ),
    **_all("inherited", "parallelism_config fsdp fsdp_config deepspeed", "Trainer's own steps run"),
    **_all("script", "do_train do_eval do_predict"),
    "resume_from_checkpoint": FieldState("script", "`train(resume_from_checkpoint=…)` is what counts"),
}  # fmt: skip

SAID = {
    "engine": "honoured",
    "trainer": "honoured, with Trainer's own steps",
    "inherited": "left to transformers",
    "mapped": "mapped",
    "script": "for the script",
}


def table() -> str:
    """The fields as a Markdown table."""
    lines = ["| field | state | in words |", "|---|---|---|"]
    lines += [f"| `{name}` | {SAID[field.state]} | {field.words} |" for name, field in sorted(FIELDS.items())]
    return "\n".join(lines)


def old_names_table() -> str:
    """Names that transformers removed, as a Markdown table."""
    from automodel.migrate.old_names import OLD_NAMES, REFUSED, RENAMED, WITHOUT_EFFECT

    lines = ["| old name | state | in words |", "|---|---|---|"]
    for name in sorted(OLD_NAMES):
        if name in RENAMED:
            said = ("mapped", f"`{RENAMED[name]}`")
        elif name in WITHOUT_EFFECT:
            said = ("left out", WITHOUT_EFFECT[name])
        elif name in REFUSED:
            said = ("refused", REFUSED[name])
        else:
            said = ("mapped", "see `migrate/old_names.py`")
        lines.append(f"| `{name}` | {said[0]} | {said[1]} |")
    return "\n".join(lines)
