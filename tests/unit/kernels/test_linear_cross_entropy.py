"""The loss without logits against F.cross_entropy in fp64: loss and gradients, in torch and in Triton's interpreter."""

import math

import pytest
import torch
import torch.nn.functional as F

from automodel.kernels.linear_cross_entropy import (
    IGNORE,
    PLAIN,
    CrossEntropy,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_scores,
)
from automodel.kernels.logits_memory import BUFFER_BYTES, padded_width, rows_at_a_time, saved_bytes, stored_bytes
from automodel.kernels.token_scores import TokenScores, sums_of_logits

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # fp32
FORMS = {
    "plain": PLAIN,
    "smoothed": CrossEntropy(label_smoothing=0.1),
    "z-loss": CrossEntropy(z_loss=1e-2),
    "capped": CrossEntropy(softcap=2.0),
    "scaled": CrossEntropy(logit_scale=0.25),
    "everything": CrossEntropy(logit_scale=1.5, softcap=3.0, z_loss=1e-3, label_smoothing=0.2),
}


def draw(rows=37, width=24, words=97, seed=0, dtype=torch.float32, bias=False):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, words, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = IGNORE
    vector = torch.randn(words, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, labels, vector


def exact(hidden, weight, labels, bias, form, scale):
    """Loss and gradients in fp64, from all logits at once."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy_reference(wide[0], wide[1], labels, scale=scale, bias=wide[2], form=form)
    return loss, torch.autograd.grad(loss, [t for t in wide if t is not None])


def check(hidden, weight, labels, bias=None, form=PLAIN, tolerance=TOLERANCE, upstream=None, **options):
    scale = torch.tensor(1 / 23)
    loss = linear_cross_entropy(hidden, weight, labels, scale=scale, bias=bias, form=form, **options)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    found = torch.autograd.grad(loss, [t for t in (hidden, weight, bias) if t is not None], upstream)
    expected_loss, expected = exact(hidden, weight, labels, bias, form, scale.double())
    torch.testing.assert_close(loss.double(), expected_loss, **tolerance)
    for mine, other, like in zip(found, expected, (hidden, weight, bias)):
        assert mine.dtype == like.dtype
        torch.testing.assert_close(mine.double() / (1.0 if upstream is None else upstream), other, **tolerance)


def test_the_reference_is_torchs_cross_entropy():
    hidden, weight, labels, bias = draw(bias=True)
    loss = linear_cross_entropy_reference(hidden, weight, labels, bias=bias, form=FORMS["smoothed"])
    logits = hidden @ weight.t() + bias
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("words", [97, 128, 700])
def test_loss_and_gradients(path, form, words):
    check(*draw(words=words), form=form)


@pytest.mark.parametrize("form", [FORMS["plain"], FORMS["everything"]], ids=["plain", "everything"])
def test_a_bias_is_added_and_learned(path, form):
    check(*draw(bias=True), form=form)


@pytest.mark.parametrize("chunk_rows", [1, 8, 36, 37, 64])
def test_chunks_of_any_size_give_the_same(path, chunk_rows):
    check(*draw(), form=FORMS["everything"], chunk_rows=chunk_rows)


def test_a_row_longer_than_a_program_is_walked_in_blocks(path):
    check(*draw(rows=3, words=40_001, width=4), form=FORMS["smoothed"])


def test_rows_without_a_label_leave_nothing(path):
    hidden, weight, labels, _ = draw()
    labels[8:24] = IGNORE  # two chunks of eight, whole
    check(hidden, weight, labels, chunk_rows=8)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=8)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert (gradient[labels == IGNORE] == 0).all()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), form=FORMS["everything"])
    loss.backward()
    assert loss == 0.0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_no_rows_at_all():
    hidden, weight, labels, _ = draw(rows=0)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss == 0.0
    assert (weight.grad == 0).all()


def test_an_upstream_gradient_is_multiplied_in(path):
    check(*draw(bias=True), upstream=torch.tensor(65536.0))


def test_a_promised_unit_upstream_needs_no_product(path):
    check(*draw(bias=True), unit_upstream=True)


def test_large_logits_neither_overflow_nor_vanish(path):
    hidden, weight, labels, _ = draw()
    hidden = (hidden.detach() * 40).requires_grad_()
    check(hidden, weight, labels, tolerance={"rtol": 1e-3, "atol": 1e-4})


def test_frozen_sides_get_no_gradient(path):
    hidden, weight, labels, _ = draw()
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None
    assert weight.grad is None
    linear_cross_entropy(hidden.detach(), weight, labels).backward()
    assert weight.grad is not None


def test_a_tied_weight_gets_both_gradients(path):
    _, weight, labels, _ = draw(words=50)
    ids = torch.randint(0, 50, (37,), generator=torch.Generator().manual_seed(3))
    twin = weight.detach().double().requires_grad_()
    linear_cross_entropy(F.embedding(ids, weight).tanh(), weight, labels, chunk_rows=16).backward()
    linear_cross_entropy_reference(F.embedding(ids, twin).tanh(), twin, labels).backward()
    torch.testing.assert_close(weight.grad.double(), twin.grad, **TOLERANCE)


def test_gradients_accumulate_over_calls(path):
    hidden, weight, labels, _ = draw()
    twin = weight.detach().double().requires_grad_()
    for part in (slice(0, 20), slice(20, 37)):
        linear_cross_entropy(hidden[part], weight, labels[part]).backward()
    linear_cross_entropy_reference(hidden.detach().double(), twin, labels).backward()
    torch.testing.assert_close(weight.grad.double(), twin.grad, **TOLERANCE)


@pytest.mark.parametrize("placed", [False, True], ids=["no gradient yet", "gradients at a fixed place"])
def test_gradients_that_go_straight_to_their_place(path, placed):
    """The same sums, in the tensor that was there before, or in none that autograd had to copy."""
    hidden, weight, labels, bias = draw(bias=True)
    if placed:
        weight.grad = torch.ones_like(weight)
    place = weight.grad
    twin = weight.detach().double().requires_grad_()
    parts = [(slice(0, 20), 8), (slice(20, 37), None)]
    for part, chunk_rows in parts:
        options = {"bias": bias, "chunk_rows": chunk_rows, "unit_upstream": True, "into_grad": True}
        loss = linear_cross_entropy(hidden[part], weight, labels[part], **options)
        loss.backward()
    linear_cross_entropy_reference(hidden.detach().double(), twin, labels, bias=bias.detach().double()).backward()
    torch.testing.assert_close(weight.grad.double(), twin.grad + (1.0 if placed else 0.0), **TOLERANCE)
    assert bias.grad is not None
    assert hidden.grad is not None
    assert not placed or weight.grad is place


def test_a_weight_that_is_no_leaf_gets_its_gradient_through_autograd(path):
    hidden, weight, labels, _ = draw()
    linear_cross_entropy(hidden, weight * 1.0, labels, unit_upstream=True, into_grad=True).backward()
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), weight)[0]
    torch.testing.assert_close(weight.grad, expected)


def test_one_backward_pass_is_all_there_is():
    hidden, weight, labels, _ = draw()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_scores_without_gradients(path, form):
    hidden, weight, labels, bias = draw(bias=True)
    hidden = hidden.detach()
    hidden[:5] = weight.detach()[labels[:5].clamp(min=0)] * 3  # some that are right
    found = linear_cross_entropy_scores(hidden, weight, labels, bias=bias, form=form, chunk_rows=16)
    loss, _ = exact(hidden, weight, labels, bias, form, 1.0)
    torch.testing.assert_close(found.loss.double(), loss.detach(), **TOLERANCE)
    logits = F.linear(hidden, weight, bias)
    expected = int(((logits.argmax(1) == labels) & (labels != IGNORE)).sum())
    assert expected > 0
    assert int(found.right) == expected
    with torch.no_grad():
        again = linear_cross_entropy(hidden, weight, labels, bias=bias, form=form)
    torch.testing.assert_close(again, found.loss)


def expected_scores(hidden, weight, labels, bias, form):
    """Mean entropy and accuracy of the rows with a label, in fp64 from torch's own distribution."""
    z = F.linear(*(None if t is None else t.detach().double() for t in (hidden, weight, bias))) * form.logit_scale
    z = z if form.softcap is None else form.softcap * torch.tanh(z / form.softcap)
    kept = labels != IGNORE
    entropy = torch.distributions.Categorical(logits=z[kept]).entropy().mean()
    return float(entropy), float((z[kept].argmax(1) == labels[kept]).double().mean())


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_entropy_and_right_labels_are_counted_on_the_way(path, form, learns):
    hidden, weight, labels, bias = draw(bias=True)
    with torch.no_grad():
        hidden[:5] = weight[labels[:5].clamp(min=0)] * 3  # some that are right
    expected = expected_scores(hidden, weight, labels, bias, form)
    tally, plain = TokenScores("cpu"), linear_cross_entropy(hidden, weight, labels, bias=bias, form=form)
    if learns:
        loss = linear_cross_entropy(
            hidden, weight, labels, bias=bias, form=form, chunk_rows=16, unit_upstream=True, tally=tally
        )
        torch.autograd.grad(loss, hidden)
        torch.testing.assert_close(loss, plain, **TOLERANCE)
    else:
        linear_cross_entropy_scores(hidden.detach(), weight, labels, bias=bias, form=form, chunk_rows=16, tally=tally)
    assert tally.take() == pytest.approx(expected, rel=1e-4)
    assert 0 < expected[1] < 1
    assert tally.take() is None, "they are read once"


def test_entropy_of_words_that_cannot_come_and_of_many_words(path):
    """A logit of -inf has probability 0, which times its logarithm is 0; one word for sure has entropy 0."""
    labels = torch.tensor([1, 0, 2])
    bias = torch.zeros(5000)
    bias[[3, 4999]] = float("-inf")
    weight = torch.zeros(5000, 2)
    weight[2, 1] = 1e3
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    tally = TokenScores("cpu")
    linear_cross_entropy_scores(hidden, weight, labels, bias=bias, tally=tally)
    entropy, right = tally.take()
    assert entropy == pytest.approx(2 / 3 * math.log(4998), rel=1e-5)
    assert right == pytest.approx(2 / 3)


def test_means_of_micro_batches_count_alike_and_one_without_labels_counts_as_nothing():
    tally, logits = TokenScores("cpu"), torch.tensor([[0.0, 0.0], [0.0, 30.0], [0.0, 0.0]])
    tally.add_logits(logits, torch.tensor([0, 1, IGNORE]))
    tally.add_logits(logits[:1], torch.tensor([1]))
    tally.add_logits(logits[:1], torch.tensor([IGNORE]))
    assert tally.take() == pytest.approx(((math.log(2) / 2 + math.log(2) + 0) / 3, (1 + 0 + 0) / 3), rel=1e-6)


def test_logits_are_counted_without_a_value_that_the_host_waits_for():
    """A recorded step counts too, of a head whose logits are made. `meta` tensors have no values."""
    logits, labels = torch.empty((300, 7), device="meta"), torch.empty(300, dtype=torch.int64, device="meta")
    assert sums_of_logits(logits, labels).shape == (3,)


def test_a_word_that_cannot_come_adds_nothing_to_the_entropy_of_logits():
    logits = torch.tensor([[0.0, 0.0, -math.inf], [float("nan")] * 3])
    sums = sums_of_logits(logits, torch.tensor([1, IGNORE]))
    assert sums.tolist() == pytest.approx([math.log(2), 0, 1], rel=1e-6)


def test_of_equal_logits_the_first_is_the_answer(path):
    weight = torch.zeros(20, 4)
    weight[[3, 11], 0] = 1.0
    hidden = torch.ones(3, 4)
    labels = torch.tensor([3, 11, IGNORE])
    assert int(linear_cross_entropy_scores(hidden, weight, labels).right) == 1


def test_a_label_outside_of_the_vocabulary_is_not_trained_on(interpreter):
    hidden, weight, labels, _ = draw()
    labels[4] = 97
    assert linear_cross_entropy(hidden, weight, labels).isnan()


@pytest.mark.slow
def test_eight_chunks_round_bf16_gradients_little_more_than_one(path):
    """Errors of the weight's gradient in norm: one product rounds once, eight in place eight times."""
    hidden, weight, labels, _ = draw(rows=512, words=64, width=16, dtype=torch.bfloat16)
    weight = (weight.detach() / 4).requires_grad_()
    _, (_, expected) = exact(hidden, weight, labels, None, PLAIN, 1.0)
    errors = []
    for chunk_rows in (512, 64):
        (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows), weight)
        errors.append(float((found.double() - expected).norm() / expected.norm()))
    assert errors[0] < 4e-3
    assert errors[1] < 2 * errors[0] + 1e-3


def test_what_does_not_fit_is_refused():
    hidden, weight, labels, _ = draw()
    with pytest.raises(ValueError, match="one dtype"):
        linear_cross_entropy(hidden, weight.double(), labels)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden[:, :5], weight, labels)


@pytest.mark.parametrize(
    ("rows", "words", "chunk"),
    [(1408, 128_256, 1408), (8192, 128_256, 4096), (8400, 128_256, 2816), (32_768, 128_256, 4096), (5, 100, 5)],
)
def test_chunks_are_few_even_and_fit_the_buffer(rows, words, chunk):
    assert rows_at_a_time(rows, words, 2, "cuda") == chunk
    assert chunk * padded_width(words) * 2 <= BUFFER_BYTES["cuda"]


def test_a_vocabulary_too_wide_for_the_buffer_still_gets_rows():
    assert rows_at_a_time(500, 2**31, 2, "cuda") == 128


def test_what_is_saved():
    assert stored_bytes(8192, 128_256, 2) == 8192 * 128_256 * 14
    assert saved_bytes(8192, 128_256, 2, "cuda") == 8192 * 128_256 * 14 - 4096 * 128_256 * 2
