"""Which encoder fits a dataset: the row format, the config's columns and the data's own columns decide.

Everything that can be wrong with columns and labels as a whole is found here, before a single row is tokenised.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from automodel.config.errors import UserError
from automodel.data import columns as known
from automodel.data.chat import PLAIN_TEMPLATE, ChatTemplate
from automodel.data.classify import TextClassifier, TokenClassifier, for_words
from automodel.data.columns import Columns, is_flag, is_list, is_string, item_of
from automodel.data.config import DatasetConfig
from automodel.data.encode import Encoder
from automodel.data.keys import OF_CHATS, OF_INSTRUCTIONS, OF_PLAIN_TEXT, OF_READY_ROWS
from automodel.data.label_kinds import check_listed_once
from automodel.data.labels import LabelMap, columns_in_order, in_known_order, infer_labels, infer_tags
from automodel.data.language import (
    ANSWER_ROLES,
    KNOWN_LAYOUTS,
    Chats,
    Instructions,
    PlainText,
    answer_meant,
    check_prompt,
    places_of,
)
from automodel.data.messages import holds_chats
from automodel.data.not_learned import what_is_not_learned
from automodel.data.own_classes import as_written_here, check_not_shifted, numbered, own_names
from automodel.data.problems import Problems
from automodel.data.ready import ReadyRows, of_language
from automodel.data.row_format import RowFormat
from automodel.data.sequences import SourceTarget, require_language, source_and_target
from automodel.data.special_tokens import has_segments


@dataclass(frozen=True)
class Request:
    """Everything that decides how rows become samples, apart from the rows."""

    cfg: DatasetConfig
    row_format: RowFormat
    tokenizer: Any
    max_length: int
    token_types: bool
    section: str
    """`dataset` or `validation_dataset`, for error messages."""
    num_labels: int | None = None
    problem_type: str | None = None
    labels: LabelMap | None = None
    """The training data's, when this is validation data."""
    known_labels: tuple[str, ...] | None = None
    """The classes that the model has names for already."""


@dataclass(frozen=True)
class Layout:
    """The encoder that was chosen, and what it found out about the data."""

    encoder: Encoder
    description: str
    """What the rows are, in a few words: `text classification of text → label`."""
    learned: str = ""
    """What of them is learned, where that is worth a word in the plan."""
    labels: LabelMap | None = None
    notes: tuple[str, ...] = ()
    """Things a person should know, for the plan."""
    chat_template: str | None = None
    """Template to save with the tokenizer, where it had none."""
    used: Collection[str] | None = None
    """Keys of the section that mean something to such rows; none: all keys of the row format."""
    fault: UserError | None = None
    """What forbids training on the rows, although they could be read: they are still looked at, for more."""


def is_ready(cfg: DatasetConfig, features: Any) -> bool:
    """Rows are tokenised already, and the config does not ask for a text column."""
    asked = (cfg.text_column, cfg.tokens_column, cfg.messages_column, cfg.source_column, cfg.prompt_template)
    return "input_ids" in features and not any(asked)


def choose_layout(rows: Any, request: Request) -> Layout:
    columns = Columns(rows.features, request.section)
    request = replace(request, cfg=_with_roles(request.cfg, request.row_format, request.section))
    if is_ready(request.cfg, rows.features):
        _only_cut(request, "rows that are tokenised already")
        return _ready(rows, columns, request)
    return request.row_format.lay_out(rows, columns, request)


def _check_named(columns: Columns, request: Request, *keys: str) -> None:
    """Every column that the config names with these keys and the data lacks, in one report."""
    problems = Problems()
    for key in keys:
        value = getattr(request.cfg, key) or ()
        names = (value,) if isinstance(value, str) else value.values() if isinstance(value, dict) else value
        for name in names:
            with problems.collecting():
                columns.required(name, key)
    problems.raise_if_any()


def _only_cut(request: Request, what: str) -> None:
    if request.cfg.on_long == "split":
        raise UserError(
            f"{request.section}.on_long: only plain text can be split into several samples; {what} are cut at "
            "max_length. Remove on_long, or raise max_length."
        )


def _with_roles(cfg: DatasetConfig, row_format: RowFormat, section: str) -> DatasetConfig:
    """`column_mapping` of the formats that have keys of their own for each column."""
    roles = row_format.roles
    if not roles or not cfg.column_mapping:
        return cfg
    for role, column in cfg.column_mapping.items():
        if role not in roles:
            raise UserError(
                f"{section}.column_mapping: '{role}' is no column of {row_format.task}; its columns are "
                f"{', '.join(roles)}." + known.did_you_mean(role, roles)
            )
        if (other := getattr(cfg, roles[role])) not in (None, column):
            raise UserError(
                f"{section}.column_mapping says that the {role} is in '{column}', and {section}.{roles[role]} that it "
                f"is in '{other}'. Remove one of the two."
            )
    return replace(cfg, **{roles[role]: column for role, column in cfg.column_mapping.items()})


def _label_map(rows: Any, columns: Columns, request: Request, label: str | tuple[str, ...]) -> LabelMap:
    check_listed_once(request.cfg.labels or (), f"{columns.section}.labels")
    if request.labels is not None:
        known_here = as_written_here(rows, columns, label, request.labels)
        check_not_shifted(rows, columns, label, known_here, request.cfg)
        return known_here
    cfg = request.cfg
    if request.row_format.labels == "token":
        assert isinstance(label, str)
        found = infer_tags(rows, columns, label, cfg, request.num_labels)
    else:
        found = infer_labels(rows, columns, label, cfg, request.num_labels, request.problem_type)
    return found if cfg.labels else in_known_order(found, request.known_labels)


def _label_columns(columns: Columns, cfg: DatasetConfig, known_names: tuple[str, ...]) -> str | tuple[str, ...]:
    if cfg.label_columns:
        return tuple(columns.required(name, "label_columns") for name in cfg.label_columns)
    if cfg.label_column:
        return columns.required(cfg.label_column, "label_column")
    return columns.first_of(known_names, "label_column", "the label")


def labelled_texts(rows: Any, columns: Columns, request: Request) -> Layout:
    """Texts, or pairs of texts, with their classes or numbers."""
    _check_named(columns, request, "text_column", "text_pair_column", "label_column", "label_columns")
    _only_cut(request, "texts to classify")
    label = columns_in_order(_label_columns(columns, request.cfg, known.LABEL), request.labels, request.known_labels)
    labels_in = (label,) if isinstance(label, str) else label
    text, pair = _text_and_pair(columns, request.cfg, labels_in)
    if text in labels_in or pair in labels_in:
        asked = "reads what it has to find out. Name another column as text_column, or as label_column."
        raise UserError(f"{columns.section}: the model {asked} Columns: {columns.listed()}.")
    columns.not_all_empty(rows, text, "text_column")
    labels = _label_map(rows, columns, request, label)
    types = request.token_types and (pair is not None or has_segments(request.tokenizer))
    encoder = TextClassifier(
        request.tokenizer,
        text,
        pair,
        label,
        labels,
        request.max_length,
        types,
        own_names(columns, label, labels, request.cfg),
    )
    shown = label if isinstance(label, str) else f"{len(label)} label columns"
    notes = numbered(columns, label, request.labels, labels, request.cfg)
    return Layout(encoder, f"{text}{' + ' + pair if pair else ''} → {shown}", labels=labels, notes=notes)


def _text_and_pair(columns: Columns, cfg: DatasetConfig, labels: tuple[str, ...]) -> tuple[str, str | None]:
    if cfg.text_column is None and cfg.text_pair_column is None:
        for first, second in known.TEXT_PAIRS:
            if all(n in columns and is_string(columns.features[n]) and n not in labels for n in (first, second)):
                return first, second
    pair = cfg.text_pair_column
    if pair is not None:
        columns.of_strings(columns.required(pair, "text_pair_column"), "text_pair_column")
    besides = (*labels, *([pair] if pair else ()))
    return columns.text(cfg.text_column, "text_column", known.TEXT, "the text", besides), pair


def tagged_words(rows: Any, columns: Columns, request: Request) -> Layout:
    """Lists of words with a tag for each."""
    cfg = request.cfg
    _check_named(columns, request, "tokens_column", "label_column")
    _only_cut(request, "tagged sentences")
    tokens = cfg.tokens_column and columns.required(cfg.tokens_column, "tokens_column")
    tokens = tokens or columns.first_of(known.TOKENS, "tokens_column", "lists of words")
    if not (is_list(columns.features[tokens]) and is_string(item_of(columns.features[tokens]))):
        raise UserError(
            f"{columns.section}.tokens_column: column '{tokens}' holds {known.kind_of(columns.features[tokens])}, but "
            "token classification needs lists of words (one tag for each word). Split the text into words first."
        )
    tags = _label_columns(columns, cfg, known.TAGS)
    if not isinstance(tags, str) or not is_list(columns.features[tags]):
        raise UserError(
            f"{columns.section}.label_column: column '{tags}' does not hold lists of tags, one for each word. "
            f"Name the column that does. Columns: {columns.listed()}."
        )
    labels = _label_map(rows, columns, request, tags)
    encoder = TokenClassifier(
        for_words(request.tokenizer), tokens, tags, labels, request.max_length,
        request.token_types and has_segments(request.tokenizer),
        own_names(columns, tags, labels, request.cfg),
    )  # fmt: skip
    notes = numbered(columns, tags, request.labels, labels, request.cfg)
    return Layout(encoder, f"{tokens} → {tags}", labels=labels, notes=notes)


def language(rows: Any, columns: Columns, request: Request) -> Layout:
    """Plain text, chats, or prompts with answers."""
    cfg, tokenizer = request.cfg, request.tokenizer
    text_column = () if cfg.column_mapping else ("text_column",)
    _check_named(columns, request, "messages_column", "column_mapping", *text_column)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"The tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token, so a language model cannot "
            "learn where an answer ends. Use a tokenizer of a causal language model."
        )
    chats = (n for n in known.MESSAGES if n in columns and holds_chats(rows, n, columns.features[n]))
    pair = known.PROMPT_MESSAGES
    both = all(n in columns and holds_chats(rows, n, columns.features[n]) for n in pair)
    ask = next(chats, pair[0] if both else None)
    ask = None if cfg.text_column or cfg.prompt_template else ask  # what is named comes before what is found
    messages = columns.required(m, "messages_column") if (m := cfg.messages_column) else ask
    if messages and not cfg.column_mapping:
        _only_cut(request, "conversations")
        chosen = _chats(columns, request, messages, pair[1] if both and messages == pair[0] else None)
        unheard = what_is_not_learned(rows, columns, cfg, f"messages_column: {messages}")
        return replace(chosen, fault=unheard or chosen.fault)
    mapping = _instruction_columns(columns, cfg)
    if mapping is not None:
        _only_cut(request, "prompts with answers")
        named = ", ".join(f"{role}: {column}" for role, column in {**mapping[0], "answer": mapping[1]}.items())
        unheard = what_is_not_learned(rows, columns, cfg, f"column_mapping: {{{named}}}", history=True)
        return replace(_instructions(columns, request, *mapping), fault=unheard)
    if (unheard := what_is_not_learned(rows, columns, cfg)) is not None:
        raise unheard
    what, ways = "plain text, chat messages, or prompts and answers", columns.section + known.LANGUAGE_COLUMNS
    text = columns.text(cfg.text_column, "text_column", known.TEXT, what, ways=f"Name the right one: {ways}")
    split = cfg.on_long != "cut"
    how = f"plain text in '{text}', {'split into pieces' if split else 'cut'} where it is long"
    return Layout(PlainText(tokenizer, text, request.max_length, split), how, used=OF_PLAIN_TEXT)


def _chats(columns: Columns, request: Request, messages: str, completion: str | None = None) -> Layout:
    tokenizer, notes, template, fault = request.tokenizer, [], request.cfg.chat_template, None
    if not template and not tokenizer.chat_template:
        template = PLAIN_TEMPLATE  # the rows are still looked at
        fault = UserError(
            f"{request.section}: the tokenizer has no chat template, so the conversations in '{messages}' cannot be "
            "written. Set dataset.chat_template to a Jinja template's file, or to `plain` for turns as '### User:' and "
            "'### Assistant:'; or start from the chat variant of the model, which has one."
        )
    if template and tokenizer.chat_template and template != tokenizer.chat_template:
        notes.append("dataset.chat_template takes the place of the tokenizer's own chat template")
    chat = ChatTemplate(tokenizer, template)
    tools = next((name for name in known.TOOLS if name in columns), None)
    if tools and not chat.takes_tools:
        notes.append(f"the column '{tools}' is not used: the chat template has no place for tools")
        tools = None
    system = "system" if "system" in columns and not is_flag(columns.features["system"]) else None
    own = (chat, tools, system, completion)
    encoder = Chats(tokenizer, messages, request.max_length, request.cfg.answers_only, *own)
    where = f"'{messages}'" + (f" and '{completion}', of which the latter is learned" if completion else "")
    how, learned = f"chat messages in {where}", "each answer up to the token that ends it"
    if not request.cfg.answers_only:
        learned = "learned whole"
    elif chat.marks_answers:
        learned = "learned where the template marks it"
    return Layout(
        encoder, how, learned, notes=tuple(notes), chat_template=template, used=OF_CHATS, fault=fault,
    )  # fmt: skip


def _instruction_columns(columns: Columns, cfg: DatasetConfig) -> tuple[dict[str, str], str] | None:
    """Prompt columns by role, and the answer's column; None where the data is not of that kind."""
    if cfg.column_mapping:
        for column in cfg.column_mapping.values():
            columns.required(column, "column_mapping")
        answers = [role for role in cfg.column_mapping if role in ANSWER_ROLES]
        if len(answers) != 1:
            raise UserError(
                f"{columns.section}.column_mapping must name one column to learn, as {' or '.join(ANSWER_ROLES)}; "
                f"got {', '.join(cfg.column_mapping)}.{'' if answers else answer_meant(cfg.column_mapping)}"
            )
        prompt = {role: column for role, column in cfg.column_mapping.items() if role not in answers}
        if not prompt and cfg.prompt_template is None:
            raise UserError(f"{columns.section}.column_mapping names an answer but no prompt, e.g. question: <column>.")
        return prompt, cfg.column_mapping[answers[0]]
    if cfg.prompt_template is not None:
        return _template_columns(columns, cfg)
    if cfg.text_column is not None:
        return None
    for prompt, answers in KNOWN_LAYOUTS:
        answer = next((name for name in answers if name in columns), None)
        if answer and all(name in columns for name in prompt):
            system = {"system": "system"} if "system" in columns else {}
            return {**system, **{name: name for name in prompt}}, answer
    return None


def _template_columns(columns: Columns, cfg: DatasetConfig) -> tuple[dict[str, str], str]:
    places = places_of(cfg.prompt_template or "", f"{columns.section}.")
    columns.all_required(places, "prompt_template")
    answers = [name for name in (cfg.target_column, *ANSWER_ROLES) if name and name in columns and name not in places]
    if not answers:
        raise UserError(
            f"{columns.section}.prompt_template needs an answer to learn: name its column as {columns.section}."
            f"column_mapping: {{answer: <column>}}. Columns: {columns.listed()}."
        )
    return {name: name for name in places}, answers[0]


def _instructions(columns: Columns, request: Request, prompt: dict[str, str], answer: str) -> Layout:
    cfg, tokenizer, notes = request.cfg, request.tokenizer, ()
    if cfg.prompt_template is not None:
        places = places_of(cfg.prompt_template, f"{columns.section}.")
        further = [name for name in places if name not in prompt and name not in prompt.values()]
        columns.all_required(further, "prompt_template")
        prompt = {**prompt, **{name: name for name in further}}
        unused = {role: column for role, column in prompt.items() if not {role, column} & {*places}}
        prompt = {role: column for role, column in prompt.items() if role not in unused}
        what = f"{columns.section}.column_mapping: not used, since prompt_template has no place for it"
        notes = tuple(f"{what}: {{{role}}} ('{column}')" for role, column in unused.items())
    check_prompt(columns.section, cfg.prompt_template, prompt.values(), answer)
    template = cfg.chat_template if cfg.prompt_template is None else None
    has_one = template or tokenizer.chat_template
    chat = ChatTemplate(tokenizer, template) if has_one and cfg.prompt_template is None else None
    encoder = Instructions(tokenizer, prompt, answer, request.max_length, cfg.answers_only, cfg.prompt_template, chat)
    how = "chat template" if chat else "plain prompt"
    unread = {"chat_template"} if cfg.prompt_template is not None else set()
    used = OF_INSTRUCTIONS - unread | ({"target_column"} if answer == cfg.target_column else set())
    description = f"{' + '.join(prompt.values())} → {answer} ({how})"
    return Layout(encoder, description, notes=notes, chat_template=template, used=used)


def sources_and_targets(rows: Any, columns: Columns, request: Request) -> Layout:
    """Source texts with their target texts."""
    if "translation" not in columns:
        _check_named(columns, request, "source_column", "target_column")
    _only_cut(request, "sources and targets")
    source, target, both = source_and_target(columns, request.cfg)
    require_language(request.tokenizer)
    encoder = SourceTarget(
        request.tokenizer, source, target, both, request.cfg.prefix, request.max_length,
        request.cfg.target_length,
    )  # fmt: skip
    return Layout(encoder, f"{source} → {target}")


def _ready(rows: Any, columns: Columns, request: Request) -> Layout:
    place, cfg = request.row_format.labels, request.cfg
    label: str | None = None
    labels: LabelMap | None = None
    if place == "document":
        found = _label_columns(columns, replace(cfg, label_columns=None), ("labels", *known.LABEL))
        assert isinstance(found, str)
        label, labels = found, _label_map(rows, columns, request, found)
    elif place == "token":
        found = _label_columns(columns, replace(cfg, label_columns=None), ("labels", *known.TAGS))
        assert isinstance(found, str)
        label, labels = found, _label_map(rows, columns, request, found)
    elif "labels" in columns:
        label = "labels"
    elif place == "target":
        columns.first_of(("labels",), "target_column", "the tokenised target ('labels')")
    encoder = ReadyRows(
        place=place,
        vocabulary=len(request.tokenizer),
        max_length=request.max_length,
        max_target_length=cfg.target_length,
        token_types=request.token_types and "token_type_ids" in columns,
        label=label,
        labels=labels,
        mask="attention_mask" in columns,
        class_names=own_names(columns, label, labels, request.cfg) if label and labels else None,
        **(of_language(columns) if place == "next_token" else {}),
    )
    used = OF_READY_ROWS | ({"column_mapping"} if request.row_format.roles else set())
    notes = numbered(columns, label, request.labels, labels, request.cfg) if label else ()
    return Layout(encoder, "already tokenised rows", labels=labels, notes=notes, used=used)
