"""One rank of a small exercise; `python one_rank.py talk|fail`, under torchrun."""

from __future__ import annotations

import dataclasses
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from automodel.distributed import overlapped
from automodel.distributed.fully_sharded import clip_by_global_norm
from automodel.distributed.shards import fill, piece_of, whole_of
from automodel.distributed.world import joined
from automodel.kernels.linear_cross_entropy import (
    IGNORE,
    CrossEntropy,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_scores,
)
from automodel.kernels.vocabulary_parallel import VocabularyPart
from automodel.models.gathered_attention import Gathers, spans_of
from automodel.models.packed_attention import packed_attention


def talk() -> None:
    """Everything ranks can ask each other."""
    with joined() as ranks:
        rank, size = ranks.rank, ranks.size
        everyone = list(range(size))
        assert ranks.total([1, rank, 0.5]) == [size, sum(everyone), size / 2]
        assert ranks.highest(10 * rank) == 10 * (size - 1)
        assert ranks.told(lambda: {"from": rank, "value": float("inf")}) == {"from": 0, "value": float("inf")}
        assert [int(t) for t in ranks.gathered(torch.tensor([rank]))] == everyone
        start = torch.full((3, 2), float(rank)).t()  # not contiguous
        ranks.same_start([start])
        assert (start == 0).all()
        go_ahead(ranks)
        shapes = [(3, 2), (4,), (2, 2), (5,)]
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        parameters[0].grad = torch.full(shapes[0], 1.0 + rank)
        if rank == 0:
            parameters[1].grad = torch.arange(4.0)  # only this rank has one
        parameters[3].grad = torch.full(shapes[3], float(rank))
        loss = ranks.sum_gradients(parameters, torch.tensor(1.0 + rank))
        expected = float(sum(everyone) + size)
        assert float(loss) == expected
        assert (parameters[0].grad == expected).all()
        assert parameters[1].grad.tolist() == [0, 1, 2, 3]
        assert parameters[2].grad is None  # nobody had one
        assert (parameters[3].grad == sum(everyone)).all()
        half = nn.Parameter(torch.zeros(2))
        half.grad = torch.tensor([1.0, 2**-10])  # which bf16 has not beside 1
        ranks.sum_gradients([half], torch.tensor(1.0), torch.bfloat16)
        assert half.grad.tolist() == [size, size * 2**-10]
        flat = torch.tensor([1.0 + 2**-10, 1.0])
        ranks.add_up([flat[1:]], torch.bfloat16)
        assert flat.tolist() == [1.0 + 2**-10, size]
        ranks.add_up([flat[:1]])
        assert flat[0] == size * (1.0 + 2**-10)
        overlap(ranks)
        share_a_vocabulary(rank)
        trade_heads(rank, size)
        hold_pieces(rank, size)
        print("talked", flush=True)


def go_ahead(ranks) -> None:
    """As on two machines, the second of which has ranks 1 and 2: one after the other, and nobody waits for ever."""
    world = ranks.world
    ranks.world = dataclasses.replace(world, local_rank=[0, 0, 1][world.rank])
    with ranks.ahead():
        begun = time.time()
        time.sleep(0.05)
    ranks.world = world
    times = [float(each) for each in ranks.gathered(torch.tensor(begun, dtype=torch.float64))]
    assert times[0] + 0.05 <= times[1] <= times[2] - 0.05, times


def overlap(ranks) -> None:
    """Steps in which other parameters learn, some ranks have nothing, and buckets of two leave in the backward pass."""
    overlapped.BUCKET_BYTES = 2 * 4 * 3
    rank, size = ranks.rank, ranks.size
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(7)]
    everyone, sent = range(size), []
    plain = dist.all_reduce
    for used, idle in [
        ((0, 1, 2, 3, 4), -1),
        ((0, 1, 2, 3, 4), 0),
        ((0, 1, 4), -1),
        ((0, 1, 2, 3, 4, 6), 1),
        ((5,), -1),
    ]:
        if rank != idle:
            for last in (False, True):
                if last:
                    ranks.last_micro_batch(parameters)
                    dist.all_reduce = lambda *args, used=used, **kw: sent.append(used) or plain(*args, **kw)
                sum(((number + 1) * (rank + 1) * parameters[number]).sum() for number in used).backward()
                dist.all_reduce = plain
        loss = ranks.sum_gradients(parameters, torch.tensor(1.0))
        assert float(loss) == size
        learned = sum(2.0 * (other + 1) for other in everyone if other != idle)
        for number, parameter in enumerate(parameters):
            if number in used:
                assert torch.equal(parameter.grad, torch.full((3,), learned * (number + 1))), (used, number)
            else:
                assert parameter.grad is None, (used, number)
            parameter.grad = None
    # Nothing leaves early in the first step, whose order is not known; later all buckets whose parameters learn do.
    assert sent.count((0, 1, 2, 3, 4)) == (0 if rank == 0 else 3)
    assert sent.count((0, 1, 2, 3, 4, 6)) == (0 if rank == 1 else 3)


def share_a_vocabulary(rank: int) -> None:
    """Cross-entropy over words that lie on three ranks, against all of them on one; ten words: 4, 4 and 2."""
    for form in (CrossEntropy(), CrossEntropy(0.5, 3.0, 0.1, 0.2)):
        torch.manual_seed(0)
        whole = [torch.randn(7, 6), torch.randn(10, 6), torch.randn(10)]
        labels = torch.tensor([3, IGNORE, 9, 0, 4, 7, IGNORE])
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in whole)
        wanted = linear_cross_entropy_reference(hidden, weight, labels, scale=0.25, bias=bias, form=form)
        wanted.backward()
        mine = slice(4 * rank, min(4 * rank + 4, 10))
        own = whole[0].clone().requires_grad_(), whole[1][mine].requires_grad_(), whole[2][mine].requires_grad_()
        part = VocabularyPart(dist.group.WORLD, 4 * rank, 10)
        loss = linear_cross_entropy(own[0], own[1], labels, words=part, scale=0.25, bias=own[2], form=form)
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        for got, expected in zip(own, (hidden.grad, weight.grad[mine], bias.grad[mine]), strict=True):
            torch.testing.assert_close(got.grad, expected)
        scores = linear_cross_entropy_scores(own[0], own[1], labels, words=part, bias=own[2], form=form)
        expected = linear_cross_entropy_scores(hidden.detach(), weight.detach(), labels, bias=bias.detach(), form=form)
        torch.testing.assert_close(scores.loss, expected.loss)
        assert int(scores.right) == int(expected.right)


def trade_heads(rank: int, size: int) -> None:
    """Attention over a third of the tokens on each rank, against all on one: three query heads and one key head are
    traded, four query heads cannot be, and keys are gathered."""
    for heads, key_heads, causal, window in [(3, 1, True, None), (4, 2, True, None), (4, 2, True, 3), (4, 4, False, 2)]:
        torch.manual_seed(0)
        boundaries = torch.tensor([0, 5, 6, 12, 12], dtype=torch.int32)
        whole = [torch.randn(1, number, 12, 4) for number in (heads, key_heads, key_heads)]
        upstream = torch.randn(1, 12, heads, 4)
        how = {"cu_seq_lens_q": boundaries, "max_length_q": 6, "is_causal": causal, "sliding_window": window}

        def attend(tensors, upstream, how=how, **more):
            inputs = [tensor.clone().requires_grad_() for tensor in tensors]
            out = packed_attention(nn.Module(), *inputs, None, **how, **more)[0]
            out.backward(upstream)
            return [out.detach(), *(tensor.grad for tensor in inputs)]

        out, *gradients = attend(whole, upstream)
        mine = slice(rank * 12 // size, (rank + 1) * 12 // size)
        group = dist.group.WORLD
        if heads % size:
            group = Gathers(group, mine.start, spans_of(boundaries.tolist(), mine.start, mine.stop, causal))
        own, *parts = attend([tensor[:, :, mine] for tensor in whole], upstream[:, mine], context_group=group)
        torch.testing.assert_close(own, out[:, mine])
        for got, expected in zip(parts, gradients, strict=True):
            torch.testing.assert_close(got, expected[:, :, mine])


def hold_pieces(rank: int, size: int) -> None:
    """Four rows on three ranks: two, two and none. Replicas are written once."""
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(12.0).reshape(4, 3)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    piece = piece_of(cut)
    assert piece.slices[0] == [slice(0, 2), slice(2, 4), slice(4, 4)][rank]
    assert piece.writes
    assert torch.equal(whole_of(cut), whole)
    assert piece_of(distribute_tensor(whole, mesh, [Replicate()])).writes == (rank == 0)
    fill(cut, lambda slices: (whole + 1)[slices])
    assert torch.equal(whole_of(cut), whole + 1)
    parameter = nn.Parameter(cut)
    parameter.grad = distribute_tensor(torch.full((4, 3), 2.0), mesh, [Shard(0)])
    norm = clip_by_global_norm([parameter], 1.0)
    torch.testing.assert_close(norm, torch.tensor(48.0).sqrt())
    torch.testing.assert_close(whole_of(parameter.grad), torch.full((4, 3), 2.0 / 48**0.5))


def fail() -> None:
    """The same mistake on every rank."""
    with joined():
        raise KeyError("boom")


if __name__ == "__main__":
    {"talk": talk, "fail": fail}[sys.argv[1]]()
