"""Batches against the plainest possible reconstruction of them, one document at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from automodel.data.batch import IGNORE
from automodel.data.collate import PackedCollator, PaddedCollator
from automodel.data.samples import SampleWriter
from automodel.data.store import TokenStore
from automodel.tasks.registry import task_named


def document(store, index: int) -> np.ndarray:
    return store.input_ids[store.offsets[index] : store.offsets[index + 1]]


def token_labels(store, index: int) -> list[int]:
    return store.token_labels[store.offsets[index] : store.offsets[index + 1]].tolist()


CHOSEN = [3, 0, 7, 5]


@pytest.mark.parametrize("bucket", [1, 8, 64])
def test_packed_stream_holds_the_documents_end_to_end(store_of, bucket):
    store = store_of("text-classification", pairs=True)
    batch = PackedCollator(store, "document", bucket_tokens=bucket, micro_batch_size=4)(CHOSEN)
    starts = batch.cu_seqlens_D.tolist()
    for slot, index in enumerate(CHOSEN):
        words = document(store, index)
        part = slice(starts[slot], starts[slot + 1])
        assert batch.input_ids_T[part].tolist() == words.tolist()
        assert batch.position_ids_T[part].tolist() == list(range(len(words)))
        assert batch.token_type_ids_T[part].tolist() == [int(i >= len(words) // 2) for i in range(len(words))]
    assert batch.num_tokens == sum(len(document(store, i)) for i in CHOSEN)
    assert batch.num_documents == batch.num_labels == 4
    assert batch.indices == tuple(CHOSEN)


def test_packed_tail_is_made_of_short_dummy_documents(store_of):
    store = store_of("text-classification", longest=5)
    collate = PackedCollator(store, "document", bucket_tokens=64, max_seqlen=5, micro_batch_size=4)
    batch = collate([1, 2])
    assert batch.input_ids_T.shape == (64,)
    lengths = torch.diff(batch.cu_seqlens_D)
    assert lengths.max() <= 5
    assert lengths.sum() == 64
    assert batch.cu_seqlens_D.dtype == torch.int32
    assert batch.position_ids_T.max() < 5


def test_packed_shapes_depend_on_the_bucket_only(store_of):
    store = store_of("causal-lm", count=40)
    collate = PackedCollator(store, "next_token", bucket_tokens=64, bucket_reads=32, micro_batch_size=4)
    shapes = set()
    for start in range(0, 40, 4):
        for size in (4, 3, 1):
            batch = collate(range(start, start + size))
            shapes.add(tuple(getattr(batch, n).shape for n in ("input_ids_T", "cu_seqlens_D", "read_positions_R")))
    assert {shape[1] for shape in shapes} == {(4 + 4 + 1,)}  # 63 tail tokens make at most four documents of 17
    assert all(shape[0][0] % 64 == 0 and shape[2][0] % 32 == 0 for shape in shapes)


def test_no_tail_without_buckets(store_of):
    store = store_of("text-classification")
    batch = PackedCollator(store, "document", micro_batch_size=8)([1, 2])
    assert batch.input_ids_T.numel() == batch.num_tokens == int(store.lengths[[1, 2]].sum())
    assert batch.cu_seqlens_D.tolist()[3:] == [batch.num_tokens] * 6
    assert batch.labels_R.shape == (2,)


@pytest.mark.parametrize("pool", ["first", "last"])
def test_classifier_reads_its_pooled_token(store_of, pool):
    store = store_of("text-classification")
    batch = PackedCollator(store, "document", pool=pool, bucket_tokens=32, micro_batch_size=6)(CHOSEN)
    read = batch.input_ids_T[batch.read_positions_R].tolist()[:4]
    assert read == [int(document(store, i)[0 if pool == "first" else -1]) for i in CHOSEN]
    assert batch.labels_R.tolist() == [*store.labels[CHOSEN].tolist(), IGNORE, IGNORE]
    assert batch.read_positions_R.tolist()[4:] == [0, 0]


def test_float_labels_are_padded_with_nan(store_of):
    store = store_of("multi-label")
    batch = PackedCollator(store, "document", bucket_tokens=32, micro_batch_size=6)(CHOSEN)
    assert batch.labels_R.dtype == torch.float32
    assert torch.equal(batch.labels_R[:4], torch.from_numpy(np.array(store.labels[CHOSEN])))
    assert batch.labels_R[4:].isnan().all()
    assert batch.num_labels == 4


@pytest.mark.parametrize("bucket", [1, 16])
def test_causal_lm_reads_every_position_whose_next_token_has_a_label(store_of, bucket):
    store = store_of("causal-lm")
    batch = PackedCollator(store, "next_token", bucket_tokens=bucket, micro_batch_size=4)(CHOSEN)
    expected, start = [], 0
    for index in CHOSEN:
        labels = token_labels(store, index)
        expected += [(start + i - 1, labels[i]) for i in range(1, len(labels)) if labels[i] != IGNORE]
        start += len(labels)
    got = list(zip(batch.read_positions_R.tolist(), batch.labels_R.tolist()))
    assert got[: len(expected)] == expected
    assert all(pair == (0, IGNORE) for pair in got[len(expected) :])
    assert batch.num_labels == len(expected)


def test_token_classification_reads_every_labelled_token(store_of):
    store = store_of("token-classification")
    batch = PackedCollator(store, "token", micro_batch_size=4)(CHOSEN)
    expected, start = [], 0
    for index in CHOSEN:
        labels = token_labels(store, index)
        expected += [(start + i, label) for i, label in enumerate(labels) if label != IGNORE]
        start += len(labels)
    assert list(zip(batch.read_positions_R.tolist(), batch.labels_R.tolist())) == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rectangle(store_of, side):
    store = store_of("text-classification", pairs=True)
    batch = PaddedCollator(store, "document", pad_token_id=99, padding_side=side)(CHOSEN)
    width = max(len(document(store, i)) for i in CHOSEN)
    assert batch.input_ids_BS.shape == batch.attention_mask_BS.shape == batch.token_type_ids_BS.shape == (4, width)
    for row, index in enumerate(CHOSEN):
        words = document(store, index)
        part = slice(0, len(words)) if side == "right" else slice(width - len(words), width)
        assert batch.input_ids_BS[row, part].tolist() == words.tolist()
        assert batch.attention_mask_BS[row].sum() == len(words)
        assert batch.attention_mask_BS[row, part].all()
        assert (batch.input_ids_BS[row][batch.attention_mask_BS[row] == 0] == 99).all()
    assert batch.labels.tolist() == store.labels[CHOSEN].tolist()


def test_padded_causal_lm_labels_are_shifted(store_of):
    store = store_of("causal-lm")
    batch = PaddedCollator(store, "next_token", pad_token_id=0)(CHOSEN)
    for row, index in enumerate(CHOSEN):
        labels = token_labels(store, index)
        shifted = [*labels[1:], IGNORE]
        assert batch.labels[row, : len(labels)].tolist() == shifted
        assert (batch.labels[row, len(labels) :] == IGNORE).all()
    assert batch.num_labels == int((batch.labels != IGNORE).sum())


def test_seq2seq_targets_are_padded_with_ignore(store_of):
    store = store_of("seq2seq")
    batch = PaddedCollator(store, "target", pad_token_id=0)(CHOSEN)
    for row, index in enumerate(CHOSEN):
        target = store.target_ids[store.target_offsets[index] : store.target_offsets[index + 1]].tolist()
        assert batch.labels[row, : len(target)].tolist() == target
        assert (batch.labels[row, len(target) :] == IGNORE).all()
    assert batch.num_labels == int((batch.labels != IGNORE).sum())


def test_packed_and_padded_count_the_same(store_of):
    for task in ("text-classification", "causal-lm", "token-classification"):
        store = store_of(task)
        packed = PackedCollator(store, task_named(task).rows.labels, bucket_tokens=32, micro_batch_size=4)(CHOSEN)
        padded = PaddedCollator(store, task_named(task).rows.labels, pad_token_id=0)(CHOSEN)
        assert (packed.num_labels, packed.num_tokens) == (padded.num_labels, padded.num_tokens)


def test_too_many_documents_for_the_micro_batch(store_of):
    collate = PackedCollator(store_of("text-classification"), "document", micro_batch_size=2)
    with pytest.raises(ValueError, match="3 documents for a micro-batch of 2"):
        collate([0, 1, 2])


def test_max_seqlen_is_never_below_the_longest_document(store_of):
    store = store_of("text-classification")
    assert PackedCollator(store, "document", max_seqlen=3).max_seqlen == store.lengths.max()
    assert PackedCollator(store, "document", max_seqlen=512).max_seqlen == 512


def test_documents_of_one_length_leave_no_slot_for_a_tail():
    """A full batch of them is a rectangle; one that does not fill its bucket, or a shorter document, has a tail."""

    def slots(lengths: list[int], bucket: int) -> int:
        writer = SampleWriter()
        for row, length in enumerate(lengths):
            writer.add(row, list(range(length)), token_labels=list(range(length)))
        collate = PackedCollator(
            TokenStore.in_memory(writer.finish()), place="next_token", bucket_tokens=bucket, max_seqlen=8,
            micro_batch_size=2,
        )  # fmt: skip
        batch = collate([0, 1])
        assert len(batch.cu_seqlens_D) == collate.document_slots + 1
        assert collate([1]).cu_seqlens_D[-1] % bucket == 0
        return collate.document_slots

    assert slots([8, 8], 4) == 2
    assert slots([8, 8], 5) == 3
    assert slots([8, 7], 4) == 3
