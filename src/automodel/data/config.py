"""The `dataset:` and `dataloader:` sections (and their `validation_` twins)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from automodel.config.section import Batch, Count, Fits, PathText, Processes, Section
from automodel.data.prompt_template import fault_of

OnLong = Literal["cut", "split"]
Template = Annotated[str, Fits(fault_of)]
"""A prompt's text with places for columns."""
MOST_TOKENS = 10**8  # of one sample, or of one micro-batch
SHORTEST = 4  # a sample needs room for special tokens and at least one real one
SHORTEST_TARGET = 2
WHERE_NOBODY_SAYS: dict[str, Any] = {"answer_only_loss": True, "source_prefix": "", "max_target_length": 128}
"""What holds for keys that validation data take from `dataset`, where neither says anything."""
BUILT_IN_TARGETS = ("TextClassificationDataset", "make_squad_dataset", "load_dataset", "load_from_disk")
"""Datasets by whose names the loading here is meant."""
BUILDERS = {"csv", "json", "parquet", "arrow", "text"}
"""Names under which `datasets` reads files."""
PATTERN = "*?["
"""Signs that make a path a pattern of files."""


@dataclass(frozen=True, kw_only=True)
class MixtureEntry(Section):
    """One dataset of a mixture. Keys that are left out are those of `dataset`; the rest says what differs here."""

    SHORTHAND: ClassVar[str | None] = "path"
    ALIASES: ClassVar[dict[str, str]] = {"dataset_name": "path", "path_or_dataset": "path", "subset": "name"}

    path: PathText
    """A hub name, a file or a folder, as in `dataset`."""
    weight: Annotated[float, Gt(0), Le(10**6)] = 1.0
    """Share of the samples of an epoch, relative to the other weights."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split with an optional slice."""
    data_files: str | tuple[str, ...] | None = None
    """Files inside `path`."""
    column_names: tuple[str, ...] | None = None
    """Names of all columns of a CSV or TSV file that has no header."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    num_samples_limit: Count | None = None
    """Use only the first N rows."""
    text_column: str | None = None
    """Column of the text."""
    text_pair_column: str | None = None
    """Column of the second text of a pair."""
    label_column: str | None = None
    """Column of the label."""
    tokens_column: str | None = None
    """Column of word lists."""
    column_mapping: dict[str, str] | None = None
    """Role to column (instruction data)."""
    messages_column: str | None = None
    """Column of chat messages."""
    chat_template: PathText | None = None
    """How messages are written."""
    prompt_template: Template | None = None
    """Text put before the answer."""
    answer_only_loss: bool | None = None
    """Train on the answer's tokens only."""
    source_column: str | None = None
    """Input column of seq2seq data."""
    target_column: str | None = None
    """Output column of seq2seq data."""
    source_prefix: str | None = None
    """Text put before every source."""
    on_long: OnLong | None = None
    """What to do with documents longer than `max_length`."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(Section):
    """`dataset:` what to train on. A bare name is `path`."""

    SLOT: ClassVar[str | None] = "dataset"
    SHORTHAND: ClassVar[str | None] = "path"
    ALIASES: ClassVar[dict[str, str]] = {
        "dataset_name": "path",
        "path_or_dataset": "path",
        "limit_dataset_samples": "num_samples_limit",
        "subset": "name",
        "dataset_path": "path",
    }

    path: PathText | None = None
    """A hub name, a file (CSV, TSV, JSON, JSONL, Parquet, Arrow, text; also as .gz, .bz2, .xz, .zst or .zip), a folder
    of them, or a `save_to_disk` folder."""
    mixture: tuple[MixtureEntry, ...] | None = None
    """Several datasets with weights instead of one `path`; see `docs/data.md` for what an epoch then is."""
    target: str | None = None
    """A dataset class or function, e.g. `automodel.TextClassificationDataset`; rarely needed."""
    name: str | None = None
    """Configuration of a hub dataset (`glue` has `mrpc`, …)."""
    split: str | None = None
    """Split with an optional slice: `train`, `train[:1000]`, `test[10%:20%]`."""
    data_files: str | tuple[str, ...] | None = None
    """Files inside `path`, when not all of them are meant; or files and addresses beside the name of their format
    (`path: csv`). Addresses need `--allow-remote-data` on the command line."""
    column_names: tuple[str, ...] | None = None
    """Names of all columns of a CSV or TSV file that has no header."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    text_column: str | None = None
    """Column of the text; found by name where it is left out (`text`, `sentence`, `review`, …)."""
    text_pair_column: str | None = None
    """Column of the second text of a pair (NLI, similarity)."""
    label_column: str | None = None
    """Column of the label; for multi-label data a column of lists, or several columns: `label_columns`."""
    label_columns: tuple[str, ...] | None = None
    """Several columns: 0/1, one for each class (multi-label), or a number each (regression)."""
    labels: tuple[str, ...] | None = None
    """Class names in the order of their ids; numbers in the data are ids, or names where they are all listed here."""
    tokens_column: str | None = None
    """Column of word lists (token classification)."""
    column_mapping: dict[str, str] | None = None
    """Instruction data: role to column, e.g. `{context: context, question: question, answer: answers}`."""
    messages_column: str | None = None
    """Column of chat messages; found by name where it is left out (`messages`, `conversations`)."""
    chat_template: PathText | None = None
    """How messages are written: a Jinja template's file, or `plain` (turns as `### User:`, `### Assistant:`). Default:
    the tokenizer's own; where it has none, one has to be named here. It is saved with the model."""
    prompt_template: Template | None = None
    """Text put before the answer, with `{column}` places; default depends on the columns."""
    answer_only_loss: bool | None = None
    """Train on the answer's tokens only (instruction and chat data); default true, for validation data as `dataset`."""
    source_column: str | None = None
    """Input column of seq2seq data (summarisation, translation)."""
    target_column: str | None = None
    """Output column of seq2seq data."""
    source_prefix: str | None = None
    """Text put before every source, e.g. `summarize: ` for T5; for validation data as `dataset`, `""` is none."""
    source_lang: str | None = None
    """Language of the sources, by the code that a multilingual tokenizer has for it (`en_XX` for mBART, `eng_Latn` for
    NLLB); default: the tokenizer's own."""
    target_lang: str | None = None
    """Language of the targets; such models need it. It is kept with the model, which then generates in it."""
    max_length: Annotated[int, Ge(SHORTEST), Le(MOST_TOKENS)] | None = None
    """Longest sample in tokens; longer ones are cut. Default: the model's limit, at most 512 (classification) or
    2048 (language models)."""
    max_target_length: Annotated[int, Ge(SHORTEST_TARGET), Le(MOST_TOKENS)] | None = None
    """Longest target in tokens (seq2seq); default 128, for validation data as `dataset`."""
    on_long: OnLong | None = None
    """Documents longer than `max_length`: `cut` leaves the rest out, `split` continues them in further samples, so that
    every token is learned once (plain text only). Default: `split` for plain text, `cut` for everything else."""
    streaming: bool = False
    """Accepted for large data: nothing has to fit into memory here anyway. Rows are read and tokenised in pieces, once,
    into memory-mapped files."""
    num_samples_limit: Count | None = None
    """Use only the first N rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with empty texts, missing labels and the like; `skip` counts them in the report."""
    num_proc: Processes | None = None
    """Processes for tokenising; default: all cores."""
    cache_dir: PathText | None = None
    """Where tokenised data is kept; default `~/.cache/automodel/tokens`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Arguments of a custom `_target_`."""

    @property
    def answers_only(self) -> bool:
        return bool(self._holds("answer_only_loss"))

    @property
    def prefix(self) -> str:
        return str(self._holds("source_prefix"))

    @property
    def target_length(self) -> int:
        return int(self._holds("max_target_length"))

    @property
    def has_maker(self) -> bool:
        """Whether `_target_` is a class or function of the user's, which may take any key."""
        return self.target is not None and self.target.split(".")[-1] not in BUILT_IN_TARGETS

    def _holds(self, key: str) -> Any:
        said = getattr(self, key)
        return WHERE_NOBODY_SAYS[key] if said is None else said

    def with_defaults(self) -> DatasetConfig:
        """With what holds where nobody says anything."""
        return replace(self, **{key: self._holds(key) for key in WHERE_NOBODY_SAYS})


@dataclass(frozen=True, kw_only=True)
class DataloaderConfig(Section):
    """`dataloader:` how batches are made and fed."""

    SLOT: ClassVar[str | None] = "dataloader"
    ALIASES: ClassVar[dict[str, str]] = {"dataloader_pin_memory": "pin_memory"}

    target: str | None = None
    """`torchdata.stateful_dataloader.StatefulDataLoader` (which is what is used) or nothing."""
    batch_size: Batch | None = None
    """Examples for each micro-batch and rank; default 8. With `packed_sequence_size`: bins, each a micro-batch."""
    shuffle: bool | None = None
    """Shuffle every epoch; default true for training, false for validation."""
    num_workers: Annotated[int, Ge(0), Le(1024)] | None = None
    """Worker processes that collate; default 0 on the CPU and for captured steps. Results do not depend on it."""
    pin_memory: bool | None = None
    """Page-locked memory for copies to the GPU; default true there, unless the step is captured: that has its own."""
    persistent_workers: bool | None = None
    """Keep workers between epochs; default true where there are workers."""
    prefetch_factor: Annotated[int, Ge(1), Le(1000)] | None = None
    """Batches each worker makes ahead; default 4."""
    drop_last: bool = False
    """Drop the last, smaller batch of an epoch."""
    group_by_length: bool | None = None
    """Padded path: batches of similar lengths; default true there. The packed path has no padding to save."""


@dataclass(frozen=True, kw_only=True)
class PackedSequenceConfig(Section):
    """`packed_sequence:` how documents share a micro-batch."""

    enabled: bool | None = None
    """True demands the packed path, false the padded one; default: packed wherever the model allows it."""
    packed_sequence_size: Annotated[int, Ge(0), Le(MOST_TOKENS)] = 0
    """Fill each micro-batch up to this many tokens (best fit, no document is cut) instead of counting examples;
    `batch_size` (default 1) and `grad_acc_steps` then count such bins. 0 keeps `batch_size` examples."""
    bucket_tokens: Annotated[int, Ge(1), Le(MOST_TOKENS)] | None = None
    """Token counts are rounded up to a multiple of this, so that shapes repeat; default: by the lengths of the samples
    and of the run (the plan says which, and what it costs)."""
