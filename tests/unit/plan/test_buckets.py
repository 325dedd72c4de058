"""Which shapes a run will have, and how far their token counts are rounded up."""

from __future__ import annotations

import numpy as np
import pytest

from automodel.data.collate import PackedCollator
from automodel.data.config import DataloaderConfig, DatasetConfig, PackedSequenceConfig
from automodel.data.mixture import Mixture
from automodel.data.samples import SampleWriter
from automodel.data.sizes import MOST_SAMPLES, Sizes, sizes_of
from automodel.data.store import TokenStore
from automodel.distributed.layout import ONE, Layout
from automodel.models.config import ModelConfig
from automodel.plan.buckets import MOST_SHAPES, _tried
from automodel.plan.config import RunConfig, StepSchedulerConfig, TrainingOptimizations
from automodel.plan.decide import make_plan
from automodel.plan.facts import DataFacts, ModelFacts
from automodel.plan.hardware import Hardware
from automodel.plan.memory import ModelShape
from automodel.tasks.registry import CAUSAL_LM

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


def facts_of(sizes: Sizes | None) -> DataFacts:
    return DataFacts(
        rows=4000, tokens=int(SQUAD.sum()), longest=512, max_length=512, has_validation=False, lengths=SQUAD,
        sizes=None if sizes is None else lambda: sizes,
    )  # fmt: skip


def plan_of(
    sizes: Sizes | None = EVERY, batch=8, steps=200, hardware=H200, model=LLAMA_1B, layout=ONE, capture=None, **packing
):
    cfg = RunConfig(
        model=ModelConfig(pretrained_model_name_or_path="llama"), dataset=DatasetConfig(path="data.jsonl"),
        dataloader=DataloaderConfig(batch_size=batch), step_scheduler=StepSchedulerConfig(max_steps=steps),
        packed_sequence=PackedSequenceConfig(**packing),
        training_optimizations=TrainingOptimizations(capture=capture),
    )  # fmt: skip
    return make_plan(cfg, CAUSAL_LM, hardware, model, facts_of(sizes), layout=layout)


def tried_for(plan, sizes: Sizes, batch: int, count: int = 1024):
    """What the chosen buckets were expected to come to."""
    found = _tried(LLAMA_1B, facts_of(sizes), batch, count)
    key = (plan.bucket_tokens, plan.bucket_reads)
    return next(t for t in found if (t.rounding.tokens, t.rounding.reads) == key)


def told(plan, name="buckets") -> str:
    return next((d.reason for d in plan.decisions if d.name == name), "")


def store_of(tokens, reads) -> TokenStore:
    writer = SampleWriter()
    for row, (length, learned) in enumerate(zip(tokens, reads)):
        labels = np.full(length, -100)
        labels[length - learned :] = 7
        writer.add(row, np.ones(length, dtype=np.int64), token_labels=labels)
    return TokenStore.in_memory(writer.finish())


def test_longer_runs_have_finer_buckets():
    chosen = [plan_of(steps=steps).bucket_tokens for steps in (50, 200, 1000, 10_000, 1_000_000)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_large_steps_hide_their_recordings_and_so_have_fine_buckets():
    """93 documents spread over 16 % of their mean, and a step takes longer than recording one: 30 steps of 16k tokens
    had buckets of 2,048 before, and 5 % of dummy tokens."""
    plan = plan_of(batch=93, steps=30)
    assert plan.bucket_tokens <= 256
    assert float(told(plan).split("about ")[1].split("%")[0]) < 1.0


def test_read_positions_that_vary_by_themselves_are_rounded_further():
    every, answers = plan_of(steps=10_000), plan_of(ANSWERS, steps=10_000)
    assert every.bucket_reads == every.bucket_tokens  # fully learned batches read as many positions as they have
    assert answers.bucket_reads > answers.bucket_tokens
    assert answers.bucket_reads % answers.bucket_tokens == 0
    assert f"read positions to {answers.bucket_reads}" in told(answers)


def test_few_answers_are_not_rounded_up_to_every_token():
    """A recording less would cost a head of ten times the rows in every step."""
    few = Sizes(SQUAD, np.maximum(2, SQUAD // 10))
    for steps in (30, 100, 1000):
        assert plan_of(few, steps=steps).bucket_reads <= 256


@pytest.mark.parametrize("sizes", [EVERY, ANSWERS], ids=["every token", "answers"])
@pytest.mark.parametrize("batch", [8, 93])
def test_what_is_expected_is_what_the_collator_makes(sizes, batch):
    """Shapes and dummy tokens of as many real batches as were tried out."""
    store = store_of(sizes.tokens, sizes.reads)
    found = sizes_of(store, "next_token")
    assert np.array_equal(np.sort(found.reads), np.sort(sizes.reads))
    plan = plan_of(sizes, batch=batch, steps=300)
    collate = PackedCollator(
        store, "next_token", bucket_tokens=plan.bucket_tokens, bucket_reads=plan.bucket_reads, max_seqlen=512,
        micro_batch_size=batch,
    )  # fmt: skip
    order = np.random.default_rng(1).integers(0, len(store), (300, batch))
    batches = [collate(chosen) for chosen in order]
    shapes = {(len(b.input_ids_T), len(b.read_positions_R)) for b in batches}
    dummies = sum(len(b.input_ids_T) for b in batches) / sum(b.num_tokens for b in batches) - 1
    expected = tried_for(plan, found, batch, 300)
    assert len(shapes) == pytest.approx(expected.shapes, rel=0.3, abs=2)
    assert dummies == pytest.approx(expected.dummy, rel=0.3)


def test_shapes_never_get_out_of_hand():
    for sizes in (EVERY, ANSWERS):
        for batch in (1, 8, 93):
            plan = plan_of(sizes, batch=batch, steps=1_000_000)
            assert tried_for(plan, sizes, batch).shapes <= MOST_SHAPES


def test_documents_of_one_length_have_one_shape_and_no_dummies():
    sizes = Sizes(np.full(100, 512), np.full(100, 511))
    plan = plan_of(sizes, steps=30)
    assert (8 * 512) % plan.bucket_tokens == 0
    assert "0.0% dummy tokens" in told(plan)


def test_a_bucket_that_was_asked_for_is_taken_and_its_reads_fit_it():
    plan = plan_of(ANSWERS, steps=1000, bucket_tokens=96)
    assert plan.bucket_tokens == 96
    assert plan.bucket_reads % 96 == 0
    assert told(plan).endswith(f"read positions to {plan.bucket_reads}")
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
    tried = list(_tried(LLAMA_1B, data, 8, 100))
    assert 0.0 < tried[-1].dummy < tried[0].dummy < 0.25


def test_large_stores_are_looked_at_in_part():
    writer = SampleWriter()
    for row in range(MOST_SAMPLES + 500):
        writer.add(row, np.ones(3, dtype=np.int64), token_labels=np.array([5, -100, 5]))
    store = TokenStore.in_memory(writer.finish())
    assert len(sizes_of(store, "next_token").tokens) == MOST_SAMPLES
    assert set(sizes_of(store, "next_token").reads) == {1}  # the first token is predicted by nothing
    assert set(sizes_of(store, "token").reads) == {2}


def test_where_all_have_too_many_shapes_the_fewest_are_taken():
    """Documents of 100 to 65k tokens, answers of all lengths: the coarsest tokens with the finest reads were taken."""
    long = np.exp(RNG.uniform(np.log(100), np.log(65_000), 4000)).astype(np.int64)
    wild = Sizes(long, (long * RNG.uniform(0.1, 0.9, len(long))).astype(np.int64))
    found = list(_tried(LLAMA_1B, facts_of(wild), 2, 1000))
    assert min(t.shapes for t in found) > MOST_SHAPES
    plan = plan_of(wild, batch=2, steps=1000)
    assert tried_for(plan, wild, 2, 1000).shapes == min(t.shapes for t in found)


@pytest.mark.parametrize(
    "settings", [{"capture": False}, {"layout": Layout(shards=2, fsdp=True)}, {"hardware": CPU, "bucket_tokens": 96}],
    ids=["not captured", "shards", "CPU"],
)  # fmt: skip
def test_where_nothing_is_recorded_reads_are_filled_up_as_tokens_are(settings):
    plan = plan_of(ANSWERS, steps=100, **settings)
    assert not plan.capture
    assert plan.bucket_reads == plan.bucket_tokens
    assert "captures" not in told(plan)


def test_evaluations_fill_up_no_further_than_tokens():
    plan = plan_of(ANSWERS, steps=10_000)
    assert plan.evaluated_reads == plan.bucket_tokens < plan.bucket_reads
    assert plan_of(packed_sequence_size=2048, batch=1).evaluated_reads == 128


def test_the_head_saves_what_is_told():
    """Half of one document's tokens, and 100 steps: every position is read to spare recordings, so nothing is saved."""
    half = Sizes(SQUAD, SQUAD // 2)
    short, long = plan_of(half, batch=1, steps=100), plan_of(half, batch=8, steps=100_000)
    assert tried_for(short, half, 1).rounding.read == 1.0
    assert not told(short, "last layer")
    share = tried_for(long, half, 8).rounding.read
    assert 0.5 < share < 0.6
    assert f"{1 - share:.0%} of the head's arithmetic" in told(long, "last layer")


def test_mixtures_count_as_often_as_they_are_drawn():
    """A small dataset of long documents that most of an epoch is made of."""
    short, long = np.full(20_000, 20), np.full(1000, 400)
    store = store_of(np.concatenate([short, long]), np.concatenate([short, long]) - 1)
    mixture = Mixture(("short", "long"), (20_000, 1000), (0.02, 0.98))
    for shuffled in (True, False):
        found = sizes_of(store, "next_token", mixture=mixture, shuffled=shuffled)
        assert np.mean(found.tokens == 400) == pytest.approx(0.98, abs=0.01)
    assert np.mean(sizes_of(store, "next_token").tokens == 400) < 0.1


@pytest.mark.parametrize("how", [{"shuffled": False}, {"grouped": True}], ids=["in order", "grouped"])
def test_batches_of_alike_samples_have_many_sizes(how):
    """Sorted by length, as a file may be or a sampler makes it: totals spread as lengths do."""
    store = store_of(np.sort(SQUAD), np.sort(SQUAD) - 1)
    any_order = sizes_of(store, "next_token").batches(500, 32)
    alike = sizes_of(store, "next_token", **how).batches(500, 32)
    assert alike.tokens.std() > 4 * any_order.tokens.std()
    assert alike.tokens.mean() == pytest.approx(any_order.tokens.mean(), rel=0.1)
    few = sizes_of(store_of([5, 6], [4, 5]), "next_token", **how)
    assert set(few.batches(10, 8).tokens) == {44}  # four times around
