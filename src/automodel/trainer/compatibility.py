"""docs/compatibility.md, made from code: what becomes of every field of TrainingArguments, of the names that were
removed, and of every block of the reference documents.

    python -m automodel.trainer.compatibility > docs/compatibility.md
"""

from __future__ import annotations

from automodel.trainer.fields import old_names_table, table

SETTINGS = "read by `-c settings.json`, alone or layered; tests/unit/config/test_flat_settings.py"
SCRIPTS = "tests/cli/test_reference_scripts.py"
DOCUMENTS = "tests/cli/test_reference_documents.py"

BLOCKS: tuple[tuple[str, int, str, str], ...] = (
    ("gpu-usage-in-classification", 18, "runs", f"under `automodel run` (`AdamW`, `evaluation_strategy`); {SCRIPTS}"),
    ("gpu-usage-in-classification", 59, "runs", f"under `automodel run`; Apex stands aside; {SCRIPTS}"),
    ("gpu-usage-in-classification", 99, "plain torch", "`dataloader.num_workers` and `pin_memory` are its counterpart"),
    *(("performance-guide", line, "runs", SETTINGS) for line in (16, 35, 63)),
    ("performance-guide", 71, "formula", "`plan` prints micro-batch × accumulation"),
    ("performance-guide", 87, "not needed", "attention kernels of our own"),
    ("performance-guide", 103, "runs", SETTINGS),
    ("performance-guide", 122, "formula", "`plan` estimates the memory of a run"),
    *(("performance-guide", line, "runs", SETTINGS) for line in (132, 145, 155, 167)),
    ("performance-guide", 179, "plain Python", "an environment variable"),
    ("performance-guide", 187, "plain shell", "an environment variable"),
    ("performance-guide", 193, "runs", SETTINGS),
    ("performance-guide", 207, "plain datasets", "a folder of `save_to_disk` is a `dataset.path`"),
    *(("performance-guide", line, "runs", SETTINGS) for line in (227, 239, 262, 272, 280, 297, 309)),
    *(("performance-guide", line, "runs", SETTINGS) for line in (320, 335, 353, 370)),
    ("performance-guide", 399, "plain Python", "a loop that prints"),
    ("performance-guide", 473, "plain Python", "a list"),
    ("performance-guide", 489, "runs", SETTINGS),
    ("performance-guide", 499, "plain torch", "`compile.mode: max-autotune`; compiled models take Trainer's own steps"),
    ("performance-guide", 511, "another tool", "`automodel finetune … --nproc-per-node 2`"),
    ("speedup-tutorial", 62, "runs", DOCUMENTS),
    ("speedup-tutorial", 78, "runs", "`automodel examples` copies the file"),
    ("speedup-tutorial", 85, "runs", DOCUMENTS),
    ("speedup-tutorial", 112, "runs", DOCUMENTS),
    ("speedup-tutorial", 122, "output", "our own lines have step, loss, rate, memory and speed"),
    ("speedup-tutorial", 141, "runs", DOCUMENTS),
    ("speedup-tutorial", 201, "runs", "`--nproc-per-node`, or `distributed.dp_size`; docs/ranks.md"),
    ("speedup-tutorial", 225, "runs", f"with the model and dataset that it assumes; {SCRIPTS}"),
    ("text-classification-example", 34, "runs", f"as written under `automodel run`; `migrate` reads it; {SCRIPTS}"),
    ("text-classification-example", 103, "runs", DOCUMENTS),
    (
        "text-classification-example", 179, "runs",
        (
            "under `automodel run`: GPUtil is stood in for, memory read after a process is the most it needed; "
            f"on a GPU, since it divides by that memory; {SCRIPTS}"
        ),
    ),
    ("text-classification-example", 382, "runs", f"as `automodel run performance_comparison.py`; {SCRIPTS}"),
    ("text-classification-example", 403, "runs", "the import of the drop-in; tests/unit/trainer"),
    ("text-classification-example", 412, "runs", "`automodel migrate` writes this; tests/unit/migrate"),
    ("text-classification-example", 433, "runs", DOCUMENTS),
    ("text-classification-example", 443, "runs", DOCUMENTS),
    ("text-classification-example", 477, "container", "`automodel finetune llm -c config.yaml` is the command in it"),
    ("text-classification-example", 486, "runs", "`automodel benchmark --speedup-threshold 2.0` is the check"),
    ("text-classification-example", 498, "runs", DOCUMENTS),
)  # fmt: skip
"""Document, line of the block's fence, its state, and how."""


NAMES = (
    "`nemo_automodel` has the import names of the reference documents; each is a name of `automodel`. Importing it",
    "prints nothing.",
    "",
    "`nemo_automodel.components._transformers.auto_model.HAS_LIGER_KERNEL` does not say here whether the package",
    "liger-kernel is installed, which is not needed. It is True wherever automodel has fused steps for this machine:",
    "Triton kernels on GPUs from Ampere on, whole layers on processors. Where it is False (an older GPU, no Triton, no",
    "C compiler), `automodel doctor` says why, and training works all the same with stock blocks. Which steps a model",
    "gets is in `automodel plan`.",
)


def page() -> str:
    blocks = ["| document | line | state | how |", "|---|---|---|---|"]
    blocks += [f"| {document} | {line} | {state} | {how} |" for document, line, state, how in BLOCKS]
    return "\n".join([
        "# Compatibility",
        "",
        "Made from code by `python -m automodel.trainer.compatibility`; a test checks that it is current.",
        "",
        "## TrainingArguments",
        "",
        "*honoured*: in the engine's own steps too. *with Trainer's own steps*: asking for it makes transformers'",
        "steps run, over a model whose forward takes padding out; stderr says so when training starts. *left to",
        "transformers*: read by its code alone, which is unchanged here. Each honoured field has a test that shows its",
        "effect (`tests/unit/trainer/test_fields.py`, `test_field_effects.py`); one without fails a test.",
        "",
        table(),
        "",
        "## Names that transformers removed",
        "",
        "In Python, and under `automodel run` as flags of an `HfArgumentParser` (`--x v`, `--x=v`, `-` for `_`) and in",
        "its files, where the script has no such flag of its own (`tests/unit/trainer/test_old_flags.py`).",
        "",
        old_names_table(),
        "",
        "## Names",
        "",
        *NAMES,
        "",
        "## The reference documents, block by block",
        "",
        *blocks,
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")
