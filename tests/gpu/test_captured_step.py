"""The captured, fused step against the plain one, on a real GPU."""

import numpy as np
import pytest
import torch

from automodel.models.task_head import POOLED
from automodel.tasks.registry import TEXT_CLASSIFICATION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from automodel.data.batch import StepBatch
    from automodel.data.collate import PackedCollator
    from automodel.data.samples import SampleWriter
    from automodel.data.store import TokenStore
    from automodel.engine import captured as engine_captured
    from automodel.engine import recording
    from automodel.engine.captured import CapturedStep, Uncaptured
    from automodel.engine.static_batch import shape_of
    from automodel.engine.step import TrainStep
    from automodel.kernels.flat_adamw import FlatAdamW
    from automodel.kernels.late_update import LateUpdates, late_parameters
    from automodel.kernels.side_stream import SideStream
    from automodel.models.forward import make_forward, make_loss_forward
    from automodel.models.fuse import layers_of
    from automodel.models.fused_encoder import fuse_encoder
    from automodel.optim.build import build_optimizer, parameter_groups
    from automodel.optim.config import LRSchedulerConfig, OptimizerConfig
    from automodel.optim.schedule import Schedule
    from automodel.tasks.loss_config import LossConfig

KINDS = ["distilbert", "bert", "roberta", "electra", "modernbert", "modernbert-mean"]
LR = 1e-4


def make_model(kind: str, dropout: float, seed: int = 0):
    import transformers as t

    torch.manual_seed(seed)
    p = dropout
    if kind == "distilbert":
        config = t.DistilBertConfig(
            dim=256, n_layers=3, n_heads=4, hidden_dim=512, vocab_size=512, dropout=p, attention_dropout=p,
            seq_classif_dropout=p,
        )  # fmt: skip
        return t.DistilBertForSequenceClassification(config)
    if kind.startswith("modernbert"):
        config = t.ModernBertConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384, vocab_size=512,
            local_attention=32, pad_token_id=0, attention_dropout=p, embedding_dropout=p,
            classifier_pooling="mean" if kind.endswith("mean") else "cls",
        )  # fmt: skip
        return t.ModernBertForSequenceClassification(config)
    size = {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512,
        "vocab_size": 512, "hidden_dropout_prob": p, "attention_probs_dropout_prob": p, "max_position_embeddings": 514,
    }  # fmt: skip
    if kind == "electra":
        return t.ElectraForSequenceClassification(t.ElectraConfig(embedding_size=256, **size))
    if kind == "roberta":
        return t.RobertaForSequenceClassification(t.RobertaConfig(type_vocab_size=1, **size))
    return t.BertForSequenceClassification(t.BertConfig(**size))


def make_store(count: int = 64) -> "TokenStore":
    rng = np.random.default_rng(0)
    writer = SampleWriter()
    for row in range(count):
        label = row % 2
        ids = rng.integers(10, 500, rng.integers(5, 200)).tolist()
        ids[1:4] = [100 + label] * 3
        writer.add(row, ids, label=label)
    return TokenStore.in_memory(writer.finish())


def steps_of(store, batch: int, accumulation: int, count: int, sort_tokens: bool = False):
    collate = PackedCollator(
        store,
        place="document",
        bucket_tokens=256,
        max_seqlen=256,
        micro_batch_size=batch,
        sort_tokens=sort_tokens,
    )
    order = np.arange(len(store))
    for step in range(count):
        rows = np.take(order, range(step * batch * accumulation, (step + 1) * batch * accumulation), mode="wrap")
        yield StepBatch(tuple(collate(part) for part in np.split(rows, accumulation)), 0, step)


def captured(model, accumulation: int, precision=torch.bfloat16, total=100, lazy=False, late=False):
    model.cuda().train()
    groups = parameter_groups(model, OptimizerConfig(lr=LR, weight_decay=0.01))
    schedule = Schedule(LRSchedulerConfig(), total)
    factors = torch.tensor([schedule.lr_at(s, 1.0) for s in range(total)], dtype=torch.float64)
    layers = layers_of(model) if late else []
    optimizer = FlatAdamW(
        groups, lr=LR, max_norm=1.0, copy_dtype=precision, flat_gradients=accumulation > 1, lr_factors=factors,
        lazy=model.get_input_embeddings().weight if lazy else None, late=late_parameters(layers),
    )  # fmt: skip
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = SideStream() if accumulation == 1 else None
    fused = fuse_encoder(model, seed, side) if precision is not None else 0
    forward = make_loss_forward(model, POOLED, "packed", swapped=bool(fused))
    loss = TEXT_CLASSIFICATION.loss(LossConfig(), None, 2)
    step = CapturedStep(
        model,
        forward,
        loss,
        optimizer,
        schedule,
        peak_lr=LR,
        seed=seed,
        accumulates=accumulation > 1,
        device="cuda",
        side=side,
        late=LateUpdates(optimizer, layers, side.stream) if late else None,
    )
    return step, fused


def plain(model, precision: str = "fp32", total=100):
    model.cuda().train()
    cfg = OptimizerConfig(lr=LR, weight_decay=0.01)
    return TrainStep(
        model, make_forward(model, POOLED, "packed"),
        TEXT_CLASSIFICATION.loss(LossConfig(), None, 2), build_optimizer(model, cfg),
        Schedule(LRSchedulerConfig(), total), peak_lr=LR, max_norm=1.0, precision=precision, device="cuda",
    )  # fmt: skip


def run(step, batches):
    results = [step(i, b) for i, b in enumerate(batches)]
    return torch.stack([r.loss for r in results]).tolist()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_the_plain_step(kind, accumulation):
    """Dropout off: bf16 captured and fused against fp32 plain, over 30 steps that revisit their shapes."""
    store = make_store()
    reference = run(plain(make_model(kind, 0.0)), steps_of(store, 8, accumulation, 30))
    step, fused = captured(make_model(kind, 0.0), accumulation)
    assert fused == (4 if kind.startswith("modernbert") else 3)
    ours = run(step, steps_of(store, 8, accumulation, 30))
    assert len(step.graphs) > 1
    assert ours == pytest.approx(reference, rel=0.03, abs=0.02)
    assert ours[-1] < 0.9 * ours[0]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fp32_capture_is_exact(accumulation):
    store = make_store()
    reference = run(plain(make_model("bert", 0.0)), steps_of(store, 8, accumulation, 20))
    step, fused = captured(make_model("bert", 0.0), accumulation, precision=None)
    assert fused == 0
    ours = run(step, steps_of(store, 8, accumulation, 20))
    assert ours == pytest.approx(reference, rel=1e-3, abs=1e-4)


def gradients(model, forward, batch, join=lambda: None):
    loss = TEXT_CLASSIFICATION.loss(LossConfig(), None, 2)
    loss.scaled_sum(forward(batch), batch, torch.ones((), device="cuda")).backward()
    join()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("documents", [8, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_gradients_equal_stock(kind, documents):
    """One backward pass of the fused bf16 model against the stock model in fp32, parameter by parameter. The measure is
    the error that the stock model makes when it computes in bf16: where gradients of documents cancel, noise weighs
    more for both. Five documents for eight slots: unused slots must not leak into anything."""
    store = make_store()
    collate = PackedCollator(
        store, place="document", bucket_tokens=256, max_seqlen=256, micro_batch_size=8, sort_tokens=True
    )
    batch = collate(range(documents)).to("cuda")
    stock, rounded = make_model(kind, 0.0).cuda().train(), make_model(kind, 0.0).cuda().bfloat16().train()
    exact = gradients(stock, make_forward(stock, POOLED, "packed"), batch)
    coarse = gradients(rounded, make_forward(rounded, POOLED, "packed"), batch)
    step, _ = captured(make_model(kind, 0.0), 1)
    ours = gradients(step.model, step.forward, batch, step.side.join)
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        error = (ours[name] - expected).norm()
        allowed = 2.0 * (coarse[name] - expected).norm() + 0.02 * expected.norm() + 5e-3
        assert error < allowed, (kind, name, float(error), float(allowed))


def test_dropout_draws_anew_on_every_replay_and_keeps_the_mean():
    """The same batch again and again with lr 0: losses differ, and their mean is near that of the plain step."""
    store = make_store()
    batch = next(steps_of(store, 8, 1, 1))
    step, _ = captured(make_model("bert", 0.1), 1)
    step.optimizer.device_state.lr_factors.zero_()
    ours = run(step, [batch] * 200)
    assert len(set(ours)) > 150
    reference = plain(make_model("bert", 0.1))
    reference.peak_lr = 0.0
    theirs = run(reference, [batch] * 200)
    spread = (np.var(ours) / 200 + np.var(theirs) / 200) ** 0.5
    assert abs(np.mean(ours) - np.mean(theirs)) < 5 * spread + 2e-3
    assert 0.5 < np.std(ours) / np.std(theirs) < 2.0


def test_state_round_trip_continues_exactly():
    store = make_store()
    step, _ = captured(make_model("distilbert", 0.0), 1)
    batches = list(steps_of(store, 8, 1, 12))
    run(step, batches[:6])
    weights = {k: t.clone().cpu() for k, t in step.weights().items()}
    tensors, values = step.state()
    tensors = {k: t.clone().cpu() for k, t in tensors.items()}
    expected = run(step, batches[6:])
    again, _ = captured(make_model("distilbert", 0.0, seed=1), 1)
    again.load_weights(weights, "test")
    again.load_state(tensors, values)
    assert run(again, batches[6:]) == pytest.approx(expected, rel=1e-3)
    again.finish()
    assert all(p.dtype == torch.float32 for p in again.model.parameters())


@pytest.mark.parametrize("kind", ["distilbert", "modernbert"])
def test_embedding_rows_that_wait_end_where_all_rows_end(kind):
    """Same batches, same kernels; only the word table is updated when its rows are read. 40 steps, settled once in the
    middle, as an evaluation does.

    The norm adds up in another order, so the last bits differ, and bf16 training lets them grow. How far is shown by a
    third run, like the first but for a nudge of one part in 10⁷ at its start: waiting must not do more than that."""
    store = make_store()
    found = {}
    for name in ("all", "nudged", "waiting"):
        step, _ = captured(make_model(kind, 0.0), 1, lazy=name == "waiting")
        if name == "nudged":
            step.load_weights({n: t * (1 + 1e-7) for n, t in step.weights().items()}, "test")
        batches = list(steps_of(store, 2, 1, 40, sort_tokens=True))
        losses = run(step, batches[:25])
        lazy = step.optimizer.lazy_rows
        assert lazy is None or int(lazy.last_V.min()) < 25, "no row waited: the test shows nothing"
        with step.compute():
            pass
        losses += [step(25 + i, b).loss.item() for i, b in enumerate(batches[25:])]
        tensors, _ = step.state()
        found[name] = (np.array(losses), {n: t.clone() for n, t in {**tensors, **step.weights()}.items()})
    (truth, table), (nudged, drifted), (waiting, ours) = (found[n] for n in ("all", "nudged", "waiting"))
    assert np.abs(waiting[:4] - truth[:4]).max() < 1e-3
    assert np.abs(waiting - truth).max() < 4 * np.abs(nudged - truth).max() + 1e-3
    names = [n for n in table if "word_embeddings" in n or "tok_embeddings" in n]
    assert len(names) == 3, names
    for name in names:
        own, by_nudge = ((t[name] - table[name]).float().square().mean().sqrt() for t in (ours, drifted))
        assert own < 4 * by_nudge + 1e-7, name


@pytest.mark.parametrize("kind", ["distilbert", "roberta", "modernbert"])
def test_layers_updated_under_the_next_step_end_where_all_end(kind):
    """Same batches, same kernels; the layers' updates only come later. Settled once in the middle, as an evaluation
    does; without dropout every kernel adds up in a fixed order, so the weights agree to the last bits."""
    store = make_store()
    finals, losses = [], []
    for late in (False, True):
        step, _ = captured(make_model(kind, 0.0), 1, late=late)
        assert not late or sum(len(p.places) for p in step.optimizer.flat.late_parts) >= 12
        batches = list(steps_of(store, 4, 1, 30, sort_tokens=True))
        found = run(step, batches[:17])
        with step.compute():
            pass
        losses.append(found + [step(17 + i, b).loss.item() for i, b in enumerate(batches[17:])])
        tensors, _ = step.state()
        finals.append({**tensors, **step.weights()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    for name in finals[0]:
        torch.testing.assert_close(finals[1][name], finals[0][name], rtol=1e-3, atol=1e-6, msg=name)


def spoil_the_second_recording(step) -> list[str]:
    """The second shape asks for a number in the middle of its backward pass. Returns what is said about it."""
    said: list[str] = []
    step.warn = said.append

    def asks(gradient):
        if len(step.graphs) == 1 and not said and torch.cuda.is_current_stream_capturing():
            gradient.sum().item()

    def enters(_layer, args, kwargs):
        value = args[0] if args else kwargs["hidden_states"]
        value = getattr(value, "branch_TN", value)
        if value.requires_grad:  # not where the model is evaluated
            value.register_hook(asks)

    layers_of(step.model)[1].register_forward_pre_hook(enters, with_kwargs=True)
    return said


def test_a_step_that_cannot_be_recorded_leaves_nothing_behind():
    """It runs eagerly, the others as graphs, and the losses are those of a run whose steps were all recorded."""
    store = make_store()
    batches = list(steps_of(store, 8, 1, 12, sort_tokens=True))
    wanted = run(captured(make_model("bert", 0.0), 1, late=True)[0], batches)
    step, _ = captured(make_model("bert", 0.0), 1, late=True)
    said = spoil_the_second_recording(step)
    main = torch.cuda.current_stream()
    found = run(step, batches)
    assert len(said) == 1
    assert "could not be captured" in said[0]
    assert torch.cuda.current_stream() == main
    assert not step.side.pieces
    assert len(step.graphs) > 2, "some were recorded after it"
    assert sum(isinstance(graph, Uncaptured) for graph in step.graphs.values()) == 1
    with step.compute(), torch.no_grad():
        step.model.eval()
        step.forward(batches[0].micro_batches[0].to("cuda"))
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_random_numbers_go_on_after_a_recording_that_failed():
    """Masks of torch's own generator. The first shape was recorded before the failure and comes again after it; its
    graph then draws from a state that the failure has spoiled, unless it is recorded again."""
    store = make_store()
    one, other = (next(steps_of(store, batch, 1, 1)) for batch in (4, 16))
    step, fused = captured(make_model("bert", 0.1), 1, precision=None)
    assert fused == 0
    step.optimizer.device_state.lr_factors.zero_()
    said = spoil_the_second_recording(step)
    losses = run(step, [one, one, other, one, one, one, other])
    assert len(said) == 1
    assert len(set(losses)) == len(losses), "the same mask twice"
    assert torch.rand(4, device="cuda").unique().numel() > 1


def test_masks_are_the_same_again():
    """Steps are under way while the next shape is recorded, and torch 2.11 prepares its seeds for that where the graphs
    of those steps read them."""
    store = make_store()
    batches = list(steps_of(store, 8, 1, 16))
    found = [run(captured(make_model("bert", 0.3), 1, precision=None)[0], batches) for _ in range(3)]
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-3, abs=1e-4)


def test_a_recording_that_finds_no_memory_gets_what_others_hold(monkeypatch):
    """All memory that the process may have, but a few MiB, lies in torch's cache when a larger shape comes. While it is
    recorded nobody can hand that back, so it is recorded again; the losses are those of a GPU with room."""
    store = make_store()
    batches = [next(steps_of(store, 1, 1, 1)), *steps_of(store, 32, 1, 4)]
    wanted = run(captured(make_model("bert", 0.0), 1)[0], batches)
    torch.cuda.empty_cache()
    step, _ = captured(make_model("bert", 0.0), 1)
    said: list[str] = []
    step.warn = said.append
    handed_back: list[int] = []

    def hand_back():
        handed_back.append(len(step.graphs))
        recording.hand_back_unused()

    monkeypatch.setattr(engine_captured, "make_room", lambda: None)
    monkeypatch.setattr(engine_captured, "hand_back_unused", hand_back)
    found = run(step, batches[:1])
    torch.cuda.synchronize()
    room = 1 << 30
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / torch.cuda.mem_get_info()[1])
    try:
        unused = torch.empty(room - (8 << 20), dtype=torch.uint8, device="cuda")
        del unused
        found += run(step, batches[1:])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert handed_back == [0, 0], "after the rehearsal, and for the second shape"
    assert [words.partition(":")[0] for words in said] == ["GPU memory is short"]
    assert step.graphs.keys() == {shape_of(b.micro_batches[0]) for b in batches[1:]}
    assert not any(isinstance(graph, Uncaptured) for graph in step.graphs.values())
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)
