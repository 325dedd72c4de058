"""Words of a training script: which calls, methods and keywords `script.py` looks for, and what they stand for."""

from __future__ import annotations

from automodel.tasks.registry import CAUSAL_LM, SEQ2SEQ, TEXT_CLASSIFICATION, TOKEN_CLASSIFICATION

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
TASKS = {
    "SequenceClassification": TEXT_CLASSIFICATION.name,
    "TokenClassification": TOKEN_CLASSIFICATION.name,
    "CausalLM": CAUSAL_LM.name,
    "Seq2SeqLM": SEQ2SEQ.name,
    "ConditionalGeneration": SEQ2SEQ.name,
}
HARMLESS_METHODS = ("__init__", "log", "save_model", "evaluate", "predict", "prediction_step", "evaluation_loop")
PADDING_COLLATORS = (
    "DataCollatorWithPadding", "DataCollatorForTokenClassification", "DataCollatorForSeq2Seq", "default_data_collator",
    "DefaultDataCollator", "DataCollatorForLanguageModeling",
)  # fmt: skip
WRAPPERS = ("get_peft_model", "prepare_model_for_kbit_training", "to", "cuda", "compile", "float", "train")
NOT_OF_THE_MODEL = ("device_map", "ignore_mismatched_sizes", "low_cpu_mem_usage", "use_cache")
"""Placement, and what is always so here: a head that does not fit starts anew."""
CLASS_NAMES = ("id2label", "label2id")
"""Read by `class_names.py`: the data has no names for them where its labels are numbers."""
OF_THE_DOWNLOAD = (
    "token", "use_auth_token", "force_download", "local_files_only", "proxies", "variant", "use_safetensors", "mirror",
    "max_memory", "offload_folder", "offload_state_dict", "tp_plan", "weights_only", "key_mapping", "resume_download",
)  # fmt: skip
PACKAGES = ("transformers", "trl", "automodel", "nemo_automodel")
TRAINER_ORDER = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
NOT_NEEDED = ("output_dir", "run_name", "logging_dir", "report_to", "hub_model_id", "hub_token", "logging_steps")
