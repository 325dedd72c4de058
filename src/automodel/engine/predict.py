"""`Predictor`: ask a fine-tuned model.

    predictor = Predictor("./checkpoints")
    predictor.classify(["A wonderful film.", "Two hours of my life."])[0].prediction   # 'positive'
    predictor.generate(["What is the capital of France?"])[0].prediction

Texts are encoded by the encoders that made the training samples (with labels that are never read), under the run's own
settings, so a text becomes the same tokens here as there. Classifiers run over packed batches, longest texts first;
results come back in the order of the texts. Nothing about a text depends on its neighbours: asked alone or among a
thousand others, it gets the same answer, which is also the one that stock transformers gives for the saved folder, to
within the rounding of the precision (`answering.py`).

Texts that cannot be used (empty ones, conversations without a question) are an error that names all of them, or, with
`on_bad_row="skip"`, are answered with None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from automodel.config.errors import UserError
from automodel.data.batch import IGNORE, Batch, PackedBatch
from automodel.data.classify import TextClassifier, TokenClassifier, for_words
from automodel.data.collate import PackedCollator, PaddedCollator
from automodel.data.encode import ROWS_PER_CHUNK, Encoder
from automodel.data.labels import MULTI, SINGLE, LabelMap
from automodel.data.loader import EvalLoader
from automodel.data.prepare import choose_max_length
from automodel.data.samples import SampleWriter
from automodel.data.sequences import SourceTarget
from automodel.data.store import TokenStore
from automodel.engine.answering import Precision, forward_for_answers, load_for_answers
from automodel.engine.evaluate import document_of_each_label
from automodel.engine.generate import Sampling, generate_batch, prompts_together, reads_padding
from automodel.engine.known_tokens import check_tokens
from automodel.engine.prompts import BadPrompt, Prompt, prompt_writer
from automodel.engine.saved import SavedModel, open_saved
from automodel.engine.words import word_places
from automodel.models.families import packing_support
from automodel.models.load import model_limits
from automodel.tasks.answers import Classification, Generation, Tagging, grouped_entities
from automodel.tasks.task import Verb

ANY_LABEL = LabelMap(SINGLE, num_labels=2**31)  # the training encoders want labels; here they only mark positions
SHOWN_BAD_ROWS = 10
MOST_PADS = 32  # that a model is tried with
THRESHOLD = 0.5  # of a multi-label class, as in the metrics


class Predictor:
    """A saved model and everything needed to ask it. Weights are loaded by the first question."""

    def __init__(
        self,
        folder: str | Path,
        *,
        batch_size: int = 32,
        on_bad_row: Literal["error", "skip"] = "error",
        device: str | None = None,
        precision: Precision = "auto",
        trust: Sequence[str] = (),
        on_progress: Callable[[int, int], None] | None = None,
        saved: SavedModel | None = None,
    ):
        """`precision`: of the products; `auto` takes the run's own, or the fastest. `on_progress` is called with texts
        done and texts in all, after every batch. `saved`: the folder, where it was opened already, with settings of its
        own."""
        if batch_size < 1:
            raise UserError(f"the batch size must be at least 1; got {batch_size}.")
        self.saved = saved or open_saved(folder, trust=trust)
        self.task, self.tokenizer = self.saved.task, self.saved.tokenizer
        self.batch_size, self.on_bad_row, self.on_progress = batch_size, on_bad_row, on_progress
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.precision: Precision = precision
        self.limits = model_limits(self.saved.hf_config, self.task.head)
        positions = self.limits.max_positions
        section = self.saved.as_long(self.saved.dataset, positions)
        self.max_length, _ = choose_max_length(section, self.task.rows, positions)
        self.notes: list[str] = []
        """What a person should know about the last answers."""

    @cached_property
    def model(self) -> Any:
        return load_for_answers(self.saved, self.device, self.precision, packed=self.packed)

    @cached_property
    def forward(self) -> Callable[[Batch], Tensor]:
        return forward_for_answers(self.model, self.task.head, packed=self.packed)

    @cached_property
    def packed(self) -> bool:
        unwanted = self.saved.run is not None and self.saved.run.packed_sequence.enabled is False
        return packing_support(self.saved.hf_config, self.task.head).packed and not unwanted

    # -- text classification --------------------------------------------------------------------------------------

    def classify(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, threshold: float | None = None
    ) -> list[Classification | None]:
        """The class of each text (or pair of texts), with the probability of every class; numbers for regression. A
        multi-label model answers with the classes above the threshold, 0.5 by default."""
        self._require("classify")
        problem = self.saved.problem_type
        if threshold is not None and problem != MULTI:
            raise UserError(f"--threshold is for models of several classes at once ({MULTI}), not {problem}.")
        rows: dict[str, Sequence[Any]] = {"text": texts, "label": [0] * len(texts)}
        if pairs is not None:
            if len(pairs) != len(texts):
                raise UserError(f"there are {len(texts)} texts but {len(pairs)} second texts; give one for each.")
            rows["second text"] = pairs
        elif self.saved.reads_pairs:
            raise UserError(
                "this model was trained on pairs of texts. Give both: --pair on the command line, --pair-column with "
                "--input, or `pairs=`."
            )
        token_types = self.limits.type_vocab_size > 1
        encoder = TextClassifier(
            self.tokenizer, "text", "second text" if pairs is not None else None, "label", ANY_LABEL, self.max_length,
            token_types,
        )  # fmt: skip
        store = self._encoded(encoder, rows, len(texts))
        answers: list[Classification | None] = [None] * len(texts)
        for batch, logits_NC in self._classified(store):
            for index, logits_C in zip(batch.indices, logits_NC.cpu()):
                answers[int(store.rows[index])] = self._classification(logits_C, threshold)
        return answers

    def _classification(self, logits_C: Tensor, threshold: float | None) -> Classification:
        names, problem = self.saved.label_names, self.saved.problem_type
        if problem == "regression":
            numbers = logits_C.tolist()
            return Classification(numbers[0] if len(numbers) == 1 else numbers)
        if problem == MULTI:
            scores, least = dict(zip(names, logits_C.sigmoid().tolist())), THRESHOLD if threshold is None else threshold
            return Classification([name for name, score in scores.items() if score > least], None, scores)
        probabilities = logits_C.softmax(-1).tolist()
        best = int(logits_C.argmax())
        return Classification(names[best], probabilities[best], dict(zip(names, probabilities)))

    # -- token classification -------------------------------------------------------------------------------------

    def tag(self, texts: Sequence[str | Sequence[str]]) -> list[Tagging | None]:
        """A tag for each word, and the entities they make up. Texts are split into words and punctuation marks; lists
        of words are taken as they are."""
        self._require("tag")
        places = [word_places(text) if isinstance(text, str) else None for text in texts]
        words = [
            [str(text)[a:b] for a, b in spans] if spans is not None else text for text, spans in zip(texts, places)
        ]
        # A word's tag is its own number: wherever the training encoder puts it, that word is to be read.
        rows = {"words": words, "numbers": [list(range(len(w))) if w is not None else None for w in words]}
        token_types = self.limits.type_vocab_size > 1
        encoder = TokenClassifier(
            for_words(self.tokenizer), "words", "numbers", ANY_LABEL, self.max_length, token_types
        )
        store = self._encoded(encoder, rows, len(words))
        answers: list[Tagging | None] = [None] * len(words)
        for batch, logits in self._classified(store):
            documents, numbers, logits_NC = _labelled(batch, logits)
            scores, classes = logits_NC.softmax(-1).max(-1)
            for slot, index in enumerate(batch.indices):
                row, here = int(store.rows[index]), documents == slot
                answers[row] = self._tagging(
                    list(words[row]), numbers[here].tolist(), classes[here].tolist(), scores[here].tolist(),
                    texts[row], places[row],
                )  # fmt: skip
        return answers

    def _tagging(self, words, numbers, classes, scores, text, places) -> Tagging:
        names = self.saved.label_names
        tags: list[str | None] = [None] * len(words)
        word_scores: list[float | None] = [None] * len(words)
        for number, label, score in zip(numbers, classes, scores):
            tags[number], word_scores[number] = names[label], score
        entities = grouped_entities(words, tags, word_scores, names, text, places)
        return Tagging(words, tags, word_scores, entities)

    # -- generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        num_beams: int = 1,
        seed: int = 42,
        system: str | None = None,
        raw: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Generation | None]:
        """An answer to each prompt: a text, chat messages, or a row of the run's prompt columns. Greedy unless a
        temperature is given; `raw` leaves the prompt as it is, without template. `on_text` is given the answer to a
        single prompt in pieces, while it is written."""
        self._require("generate")
        sampling = Sampling(max_new_tokens or self._usual_length(), temperature, top_p, num_beams, seed)
        sampling.check()
        if on_text is not None and (len(prompts) > 1 or num_beams > 1):
            raise UserError("an answer can be watched while it is written only for one prompt, and without beams.")
        self.notes = []
        if self.task.head.encoder_decoder:
            if system is not None:
                raise UserError("--system belongs to chat models; this one reads a source text.")
            room = self.limits.max_positions
            if room is not None and sampling.max_new_tokens >= room:
                raise UserError(f"--max-new-tokens is {sampling.max_new_tokens}, but the model has {room} positions.")
            store, stops, strips = self._sources(prompts, raw), self._model_stops(), True
        else:
            store, stops, strips = self._prompts(prompts, system, raw)
        collate = PaddedCollator(
            store,
            self.task.rows.labels,
            self.tokenizer.pad_token_id or 0,
            "right" if self.task.head.encoder_decoder else "left",
            False,
        )
        answers: list[Generation | None] = [None] * len(prompts)
        room, cut = self.limits.max_positions if self.task.head.next_token else None, 0
        with torch.random.fork_rng(enabled=temperature > 0):
            torch.manual_seed(seed) if temperature > 0 else None
            together = self._together(store, sampling.max_new_tokens, room)
            for batch in self._counted(store, collate, together):
                outputs = generate_batch(
                    self.model,
                    self.tokenizer,
                    batch,
                    sampling,
                    stops,
                    self.limits.max_positions,
                    self.task.head,
                    on_text,
                )
                if room is not None and batch.input_ids_BS.shape[1] + sampling.max_new_tokens > room:
                    cut += sum(not stopped for _, stopped in outputs)
                for index, (text, stopped) in zip(batch.indices, outputs, strict=True):
                    answers[int(store.rows[index])] = Generation(
                        text.strip() if strips else text, "stop" if stopped else "length"
                    )
        if cut:
            them = f"{cut:,} of {len(prompts):,} answers"
            self.notes.append(f"{them} ended early: the model has only {room:,} positions")
        return answers

    def _together(self, store: TokenStore, new_tokens: int, room: int | None) -> list[list[int]]:
        """Which prompts share a batch. Families that can be packed read each row alone; others are tried."""
        how = (store.lengths.tolist(), self.batch_size, new_tokens, room)
        together = prompts_together(*how)
        pads = max((int(np.ptp(store.lengths[batch])) for batch in together), default=0)
        known = packing_support(self.saved.hf_config, self.task.head).packed
        if not self.task.head.next_token or known or not pads:
            return together
        ids = store.input_ids[store.place(int(store.lengths.argmin()))[1]]
        shortest = torch.as_tensor(ids.astype(np.int64), device=self.device)
        if reads_padding(self.model, shortest, self.tokenizer.pad_token_id or 0, min(pads, MOST_PADS)):
            return prompts_together(*how, pad=False)
        return together

    def _usual_length(self) -> int:
        """As long as the targets of the training; an answer where nobody said."""
        if not self.task.head.encoder_decoder:
            return 256
        longest, room = self._as_asked("target_length"), self.limits.max_positions
        return longest if room is None else min(longest, room - 1)

    def _as_asked(self, name: str) -> Any:
        """What the run's config says of sources and targets; an exported model has a note of it."""
        noted = {} if self.saved.run else self.saved.layout or {}
        return noted.get(name, getattr(self.saved.dataset, name))

    def _sources(self, prompts: Sequence[Prompt], raw: bool) -> TokenStore:
        """Source texts of an encoder-decoder, with the run's prefix before them."""
        prefix = "" if raw else self._as_asked("prefix")
        encoder = SourceTarget(self.tokenizer, "text", "target", None, prefix, self.max_length, max_target_length=8)
        return self._encoded(encoder, {"text": prompts, "target": ["x"] * len(prompts)}, len(prompts))

    def _prompts(self, prompts, system, raw) -> tuple[TokenStore, list[int], bool]:
        writer = prompt_writer(self.saved, raw=raw, system=system)
        self.notes += writer.notes
        room, out, own = self.limits.max_positions, SampleWriter(), 0
        for row, prompt in enumerate(prompts):
            try:
                ids = writer.tokens(prompt)
            except BadPrompt as error:
                out.reject(row, str(error))
                continue
            if room is not None and len(ids) >= room:
                out.reject(row, f"the prompt has {len(ids):,} tokens and the model only {room:,} positions")
                continue
            if max(ids) >= getattr(self.saved.hf_config, "vocab_size", max(ids) + 1):
                unknown = self.tokenizer.convert_ids_to_tokens(max(ids))
                out.reject(row, f"the prompt has the token {unknown!r}, for which the model has no embedding")
                continue
            own += bool(system) and writer.has_own_system(prompt)
            out.add(row, ids)
        if own:
            them = f"{own:,} of {len(prompts):,} prompts have a system message of their own"
            self.notes.append(f"{them}: --system is for those without one")
        store = self._stored(out, len(prompts))  # bad prompts are told before the weights are loaded
        return store, list(dict.fromkeys([*writer.stops(), *self._model_stops()])), not writer.continues

    def _model_stops(self) -> list[int]:
        stops = self.model.generation_config.eos_token_id if self.model.can_generate() else None
        if stops is None:
            stops = self.tokenizer.eos_token_id
        return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)

    # -- shared ---------------------------------------------------------------------------------------------------

    def _require(self, verb: Verb) -> None:
        if self.task.verb != verb:
            raise UserError(f"'{self.saved.folder}' holds a {self.task} model: use `{self.task.verb}`, not `{verb}`.")

    def _encoded(self, encoder: Encoder, rows: Mapping[str, Sequence[Any]], count: int) -> TokenStore:
        """All rows as tokens, or an error that names the bad ones."""
        self.notes = []
        out = SampleWriter()
        for start in range(0, count, ROWS_PER_CHUNK):
            chunk = {name: list(column[start : start + ROWS_PER_CHUNK]) for name, column in rows.items()}
            encoder.encode(chunk, start, out)
        if out.truncated:
            cut = f"{out.truncated:,} of {count:,} texts were cut at max_length {self.max_length:,}"
            self.notes.append(f"{cut}; the longest has {out.longest:,} tokens")
        store = self._stored(out, count)
        check_tokens(store, self.tokenizer, self.saved.hf_config, "the texts")
        return store

    def _stored(self, out: SampleWriter, count: int) -> TokenStore:
        if out.bad and self.on_bad_row == "error":
            bad = sorted(out.bad, key=lambda b: b.row)
            lines = [f"  row {b.row}: {b.reason}" for b in bad[:SHOWN_BAD_ROWS]]
            if len(bad) > SHOWN_BAD_ROWS:
                lines.append(f"  … and {len(bad) - SHOWN_BAD_ROWS:,} more")
            them = "it" if len(bad) == 1 else "them"
            raise UserError(
                f"{len(bad):,} of {count:,} rows cannot be used (rows are counted from 0):\n"
                + "\n".join(lines)
                + f"\nPut {them} right, or leave {them} unanswered with --on-bad-row skip."
            )
        if out.bad:
            self.notes.append(f"{len(out.bad):,} of {count:,} rows cannot be used and have no prediction")
        return TokenStore.in_memory(out.finish())

    def _classified(self, store: TokenStore) -> Iterator[tuple[Batch, Tensor]]:
        """Batches with their logits."""
        reads_words = self.task.verb == "tag"
        if not len(store):
            return
        if self.packed:
            pool = packing_support(self.saved.hf_config, self.task.head).pooling or "first"
            collate: Any = PackedCollator(
                store, self.task.rows.labels, pool, micro_batch_size=self.batch_size, with_labels=reads_words
            )
        else:
            collate = PaddedCollator(
                store, self.task.rows.labels, self.tokenizer.pad_token_id or 0, with_labels=reads_words
            )
        for batch in self._counted(store, collate):
            with torch.inference_mode():
                logits = self.forward(batch).float()
            yield batch, logits

    def _counted(self, store: TokenStore, collate: Any, together: Any = None) -> Iterator[Any]:
        """Batches on the device, longest texts first. `together`: the samples of each, where that is decided."""
        if not len(store):
            return
        done = 0
        loader = EvalLoader(collate, lengths=store.lengths, batch_size=self.batch_size)
        if together is not None:
            loader.batches = [np.asarray(samples) for samples in together]
        for batch in loader:
            yield batch.to(self.device)
            done += batch.num_documents
            if self.on_progress is not None:
                self.on_progress(done, len(store))


def _labelled(batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Document slot, label and logits of every position that carries a label."""
    if isinstance(batch, PackedBatch):
        documents, labels = document_of_each_label(batch), batch.labels_R
        assert documents is not None
    else:
        labels = batch.labels
        documents = torch.arange(len(labels), device=labels.device).unsqueeze(1).expand_as(labels).reshape(-1)
        labels, logits = labels.reshape(-1), logits.reshape(-1, logits.shape[-1])
    kept = labels != IGNORE
    return documents[kept].cpu(), labels[kept].cpu(), logits[kept].cpu()
