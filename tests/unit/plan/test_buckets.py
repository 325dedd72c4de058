"""Which shapes a run will have, and how far their token counts are rounded up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from automodel.data.collate import PackedCollator
from automodel.data.config import DataloaderConfig, DatasetConfig, PackedSequenceConfig
from automodel.data.samples import SampleWriter
from automodel.data.sizes import MOST_SAMPLES, Sizes, sizes_of
from automodel.data.store import TokenStore
from automodel.models.config import ModelConfig
from automodel.plan.buckets import MOST_SHAPES, _tried
from automodel.plan.config import RunConfig, StepSchedulerConfig
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import ModelShape

H200 = Hardware("cuda", "NVIDIA H200", 1, 140.0, True, True, 16)
CPU = Hardware("cpu", "Test CPU", 0, 24.0, False, False, 2)
SHAPE = ModelShape(16, 2048, 2048, 512, 32, 8192, 128_256, tied=True, rms=True, gated=True)
LLAMA_1B = ModelFacts(
    "llama", "llama", 1_236_000_000, True, "", can_fuse=True, decoder=True, head_words=128_256, shape=SHAPE
)
RNG = np.random.default_rng(0)
SQUAD = np.clip(RNG.lognormal(5.1, 0.35, 4000).astype(np.int64), 16, 512)
"""Lengths of the benchmark's documents."""
EVERY = Sizes(SQUAD, SQUAD - 1)
"""Every token is learned."""
ANSWERS = Sizes(SQUAD, (SQUAD * RNG.uniform(0.2, 0.8, len(SQUAD))).astype(np.int64))
"""Answers of all lengths."""


def plan_of(sizes: Sizes | None = EVERY, batch=8, steps=200, hardware=H200, model=LLAMA_1B, **packing):
    data = DataFacts(
        rows=4000, tokens=int(SQUAD.sum()), longest=512, max_length=512, has_validation=False, lengths=SQUAD,
        sizes=sizes,
    )  # fmt: skip
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="llama"), dataset=DatasetConfig(path="data.jsonl"),
        dataloader=DataloaderConfig(batch_size=batch), step_scheduler=StepSchedulerConfig(max_steps=steps),
        packed_sequence=PackedSequenceConfig(**packing),
    )  # fmt: skip
    return make_plan(cfg, "causal-lm", hardware, model, data)


def test_longer_runs_have_finer_buckets():
    chosen = [plan_of(steps=steps).bucket_tokens for steps in (50, 200, 1000, 10_000, 1_000_000)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_large_steps_hide_their_recordings_and_so_have_fine_buckets():
    """93 documents spread over 16 % of their mean, and a step takes longer than recording one: 30 steps of 16k tokens
    had buckets of 2,048 before, and 5 % of dummy tokens."""
    plan = plan_of(batch=93, steps=30)
    assert plan.bucket_tokens <= 256
    reason = next(d.reason for d in plan.decisions if d.name == "buckets")
    assert float(reason.split("about ")[1].split("%")[0]) < 1.0


def test_read_positions_that_vary_by_themselves_are_rounded_further():
    every, answers = plan_of(steps=10_000), plan_of(ANSWERS, steps=10_000)
    assert every.bucket_reads == every.bucket_tokens  # fully learned batches read as many positions as they have
    assert answers.bucket_reads > answers.bucket_tokens
    assert answers.bucket_reads % answers.bucket_tokens == 0
    told = next(d.reason for d in answers.decisions if d.name == "buckets")
    assert f"read positions to {answers.bucket_reads}" in told


def test_few_answers_are_not_rounded_up_to_every_token():
    """A recording less would cost a head of ten times the rows in every step."""
    few = Sizes(SQUAD, np.maximum(2, SQUAD // 10))
    for steps in (30, 100, 1000):
        assert plan_of(few, steps=steps).bucket_reads <= 256


@pytest.mark.parametrize("sizes", [EVERY, ANSWERS], ids=["every token", "answers"])
@pytest.mark.parametrize("batch", [8, 93])
def test_what_is_expected_is_what_the_collator_makes(sizes, batch):
    """Shapes and dummy tokens of as many real batches as were tried out."""
    writer = SampleWriter()
    for row, (tokens, reads) in enumerate(zip(sizes.tokens, sizes.reads)):
        labels = np.full(tokens, -100)
        labels[tokens - reads :] = 7
        writer.add(row, np.ones(tokens, dtype=np.int64), token_labels=labels)
    store = TokenStore.in_memory(writer.finish())
    found = sizes_of(store, "causal-lm")
    assert np.array_equal(np.sort(found.reads), np.sort(sizes.reads))
    plan = plan_of(sizes, batch=batch, steps=300)
    collate = PackedCollator(
        store, "causal-lm", bucket_tokens=plan.bucket_tokens, bucket_reads=plan.bucket_reads, max_seqlen=512,
        micro_batch_size=batch,
    )  # fmt: skip
    order = np.random.default_rng(1).integers(0, len(store), (300, batch))
    batches = [collate(chosen) for chosen in order]
    shapes = {(len(b.input_ids_T), len(b.read_positions_R)) for b in batches}
    dummies = sum(len(b.input_ids_T) for b in batches) / sum(b.num_tokens for b in batches) - 1
    data = dataclasses.replace(DataFacts(4000, 1, 512, 512, False), sizes=found)
    tried = {(t.rounding.tokens, t.rounding.reads): t for t in _tried(LLAMA_1B, data, batch, 300, None)}
    expected = tried[plan.bucket_tokens, plan.bucket_reads]
    assert len(shapes) == pytest.approx(expected.shapes, rel=0.3, abs=2)
    assert dummies == pytest.approx(expected.dummy, rel=0.3)


def test_shapes_never_get_out_of_hand():
    for sizes in (EVERY, ANSWERS):
        for batch in (1, 8, 93):
            plan = plan_of(sizes, batch=batch, steps=1_000_000)
            data = dataclasses.replace(DataFacts(4000, 1, 512, 512, False), sizes=sizes)
            tried = {(t.rounding.tokens, t.rounding.reads): t for t in _tried(LLAMA_1B, data, batch, 1024, None)}
            assert tried[plan.bucket_tokens, plan.bucket_reads].shapes <= MOST_SHAPES


def test_documents_of_one_length_have_one_shape_and_no_dummies():
    sizes = Sizes(np.full(100, 512), np.full(100, 511))
    plan = plan_of(sizes, steps=30)
    assert (8 * 512) % plan.bucket_tokens == 0
    assert "0.0% dummy tokens" in next(d.reason for d in plan.decisions if d.name == "buckets")


def test_a_bucket_that_was_asked_for_is_taken_and_its_reads_fit_it():
    plan = plan_of(ANSWERS, steps=1000, bucket_tokens=96)
    assert plan.bucket_tokens == 96
    assert plan.bucket_reads % 96 == 0
    assert plan_of(hardware=CPU, bucket_tokens=96).bucket_tokens == 96


def test_bins_have_one_size_and_a_sixteenth_of_it_for_reads():
    plan = plan_of(packed_sequence_size=2048, batch=1)
    assert (plan.bucket_tokens, plan.bucket_reads) == (2048, 128)
    cpu = plan_of(packed_sequence_size=2048, batch=1, hardware=CPU)
    assert (cpu.bucket_tokens, cpu.bucket_reads) == (1, 0)


def test_lengths_that_nobody_counted_are_guessed():
    plan = plan_of(None)
    assert 32 <= plan.bucket_tokens <= 512
    data = DataFacts(rows=1000, tokens=241_000, longest=512, max_length=512, has_validation=True)
    tried = list(_tried(LLAMA_1B, data, 8, 100, None))
    assert 0.0 < tried[-1].dummy < tried[0].dummy < 0.25


def test_large_stores_are_looked_at_in_part():
    writer = SampleWriter()
    for row in range(MOST_SAMPLES + 500):
        writer.add(row, np.ones(3, dtype=np.int64), token_labels=np.array([5, -100, 5]))
    store = TokenStore.in_memory(writer.finish())
    assert len(sizes_of(store, "causal-lm").tokens) == MOST_SAMPLES
    assert set(sizes_of(store, "causal-lm").reads) == {1}  # the first token is predicted by nothing
    assert set(sizes_of(store, "token-classification").reads) == {2}
