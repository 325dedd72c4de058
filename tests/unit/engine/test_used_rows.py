"""Only the rows of the word table that occur are trained, and nobody can tell: against the step that trains them all.

Training has none of the chat words of the tiny vocabulary; validation does. All is equal in bits, but for the gradient
norm, which sums fewer zeros in another order; where it clips, the rest follows (fp32 rounding).
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

import tiny_runs as tiny
from architectures.tiny import tiny_model
from automodel.data.store import TokenStore
from automodel.engine import used_rows
from automodel.engine.build import make_evaluator
from automodel.engine.prepare import prepare_run
from automodel.engine.run import finetune
from automodel.engine.steps import make_step, make_step_loader
from automodel.engine.used_rows import AllRows, UsedRows, ids_that_occur, plain_word_table
from automodel.plan.check import load_run_config

SETTINGS = (
    "step_scheduler: {max_steps: 30, log_every_steps: 1, val_every_steps: 7}\n"
    "dataloader: {batch_size: 4}\nlr_scheduler: {name: linear, warmup_steps: 5}\n"
    "optimizer: {lr: 1e-3, weight_decay: 0.01}\n"
)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # fp32, 30 steps


def strange_reviews() -> list[dict]:
    """Sentences of words that training never sees."""
    return [{"text": " ".join([*tiny.CHAT[i : i + 4], "good"]), "label": i % 2} for i in range(8)]


def write_run(folder, *, kind="bert", text=SETTINGS, **model):
    path = tiny.write_run(folder, kind=kind, text=text, **model)
    path.write_text(path.read_text().replace("optimizer: {lr: 1e-3}\n", ""))
    tiny.write_jsonl(folder / "test.jsonl", strange_reviews())
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def prepared(folder):
    return prepare_run(load_run_config([write_run(folder)]))


def all_rows(prepared):
    """The same run without it."""
    return dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, word_rows=0))


class Trainer:
    """A model, its step and its batches."""

    def __init__(self, prepared):
        torch.manual_seed(0)
        self.model, self.step = make_step(prepared)
        self.evaluator = make_evaluator(prepared, prepared.validation, self.model, self.step)
        self.batches = iter(make_step_loader(prepared))
        self.losses, self.norms, self.index = [], [], 0

    def train(self, steps):
        for _ in range(steps):
            result = self.step(self.index, next(self.batches))
            self.losses.append(float(result.loss))
            self.norms.append(float(result.grad_norm))
            self.index += 1

    def take_over(self, other):
        """Everything a checkpoint of `other` holds."""
        self.step.load_weights({n: t.clone() for n, t in other.step.weights().items()}, "test")
        tensors, values = other.step.state()
        self.step.load_state({n: t.clone() for n, t in tensors.items()}, values)
        while self.index < other.index:
            next(self.batches)
            self.index += 1


def assert_same_checkpoint(left, right):
    for one, two in ((left.step.weights(), right.step.weights()), (left.step.state()[0], right.step.state()[0])):
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(one[name], two[name], **CLOSE)
    assert left.step.state()[1] == right.step.state()[1]


def unused_rows(step) -> torch.Tensor:
    return step.rows.order_V[len(step.rows.ids) :]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "padded bert", "llama"])
def test_thirty_steps_are_those_of_the_plain_step(folder, kind):
    padded = "padded" in kind
    text = SETTINGS + ("packed_sequence: {enabled: false}\n" if padded else "")
    prepared = prepare_run(load_run_config([write_run(folder, kind="bert" if padded else kind, text=text)]))
    ours, plain = Trainer(prepared), Trainer(all_rows(prepared))
    assert isinstance(ours.step.rows, UsedRows)
    assert not isinstance(plain.step.rows, UsedRows)
    table = plain_word_table(plain.model)
    assert ours.model.get_input_embeddings().weight.shape[0] == prepared.plan.word_rows < table.num_embeddings
    for steps in (7, 0, 11, 12):
        ours.train(steps)
        plain.train(steps)
        one, two = ours.evaluator(), plain.evaluator()
        assert one.values["loss"] == pytest.approx(two.values["loss"], rel=1e-5)
        assert one.confusion_matrix == two.confusion_matrix
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=1e-5)
    np.testing.assert_allclose(ours.norms, plain.norms, rtol=1e-4)
    assert_same_checkpoint(ours, plain)
    # Rows that are never read are the plain step's bit by bit, and did take their weight decay.
    rows, name = unused_rows(ours.step), ours.step.rows.name
    start = make_step(all_rows(prepared))[1].weights()[name][rows]
    assert torch.equal(ours.step.weights()[name][rows], plain.step.weights()[name][rows])
    assert not torch.equal(start, plain.step.weights()[name][rows])
    ours.step.finish()
    assert ours.model.state_dict().keys() == plain.model.state_dict().keys()
    assert torch.equal(ours.model.state_dict()[name], ours.step.weights()[name])
    assert ours.model.get_input_embeddings().weight.shape == table.weight.shape


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_other_precisions(folder, precision):
    text = SETTINGS + f"training_optimizations: {{precision: {precision}, gradient_clipping: null}}\n"
    prepared = prepare_run(load_run_config([write_run(folder, text=text)]))
    ours, plain = Trainer(prepared), Trainer(all_rows(prepared))
    assert prepared.plan.word_rows
    for trainer in (ours, plain):
        trainer.train(8)
    assert ours.losses == plain.losses  # without clipping the norm changes nothing, and all else is the same arithmetic
    for one, two in ((ours.step.weights(), plain.step.weights()), (ours.step.state()[0], plain.step.state()[0])):
        assert all(torch.equal(one[name], two[name]) for name in two)


def test_without_clipping_every_bit_is_the_same(folder):
    text = SETTINGS + "training_optimizations: {precision: fp32, gradient_clipping: null}\n"
    prepared = prepare_run(load_run_config([write_run(folder, text=text)]))
    ours, plain = Trainer(prepared), Trainer(all_rows(prepared))
    for trainer in (ours, plain):
        trainer.train(12)
    assert ours.losses == plain.losses
    assert ours.evaluator().values == plain.evaluator().values
    for one, two in ((ours.step.weights(), plain.step.weights()), (ours.step.state()[0], plain.step.state()[0])):
        assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_goes_on_in_the_other_way(prepared, ours_first):
    first, second = (prepared, all_rows(prepared)) if ours_first else (all_rows(prepared), prepared)
    begun, whole, resumed = Trainer(first), Trainer(first), Trainer(second)
    begun.train(10)
    whole.train(30)
    resumed.take_over(begun)
    resumed.train(20)
    np.testing.assert_allclose(resumed.losses, whole.losses[10:], rtol=1e-4)
    assert resumed.evaluator().values["loss"] == pytest.approx(whole.evaluator().values["loss"], rel=1e-4)
    assert_same_checkpoint(resumed, whole)


def test_it_does_not_matter_when_a_run_was_stopped(prepared):
    """Bit by bit, also where validation never looked in between: factors are taken one after the other."""
    whole, begun, resumed = Trainer(prepared), Trainer(prepared), Trainer(prepared)
    whole.train(15)
    begun.train(4)
    resumed.take_over(begun)
    resumed.evaluator()
    resumed.train(11)
    assert resumed.losses == whole.losses[4:]
    assert resumed.evaluator().values == whole.evaluator().values
    for one, two in ((resumed.step.weights(), whole.step.weights()), (resumed.step.state()[0], whole.step.state()[0])):
        assert all(torch.equal(one[name], two[name]) for name in two)


def test_rows_that_come_with_moments_are_trained_as_well(prepared):
    """Whoever moved them: they would go on moving in the plain step."""
    ours, plain = Trainer(prepared), Trainer(all_rows(prepared))
    plain.train(5)
    ours.take_over(plain)
    stray = int(unused_rows(ours.step)[1])
    name, trained = ours.step.rows.name, len(ours.step.rows.ids)
    tensors, values = plain.step.state()
    tensors[f"exp_avg/{name}"][stray] = 0.01
    tensors[f"exp_avg_sq/{name}"][stray] = 0.01
    ours.step.load_state({n: t.clone() for n, t in tensors.items()}, values)
    assert len(ours.step.rows.ids) == trained + 1
    ours.train(5)
    plain.train(5)
    assert_same_checkpoint(ours, plain)


def test_a_word_that_was_not_announced_is_an_error_in_training_only(prepared):
    trainer = Trainer(prepared)
    words = trainer.model.get_input_embeddings()
    strange = unused_rows(trainer.step)[:1]
    with pytest.raises(IndexError):
        words(strange)
    with torch.no_grad():
        assert torch.equal(words(strange), trainer.step.weights()[trainer.step.rows.name][strange])


def test_the_padding_row_stays_as_it_is(prepared):
    trainer = Trainer(prepared)
    words = trainer.model.get_input_embeddings()
    assert words.padding_idx == 0
    words(torch.tensor([0, 0, 2])).sum().backward()
    gradient = words.weight.grad
    places = trainer.step.rows.place_V
    assert not gradient[places[0]].any()
    assert gradient[places[2]].all()


def test_the_plan_says_it_and_a_run_follows(folder):
    path = write_run(folder)
    without = folder / "without"
    finetune(load_run_config([path]))
    plan = json.loads((folder / "out" / "run" / "plan.json").read_text())
    line = next(line for line in plan["decisions"] if line["name"] == "word embeddings")
    whole = len(tiny.make_tokenizer())
    assert line["value"] == f"{plan['word_rows']} of {whole} are trained"
    assert 0 < plan["word_rows"] <= whole - len(tiny.CHAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(used_rows, "MOST_TOKENS", 0)  # too many tokens to look through
        finetune(load_run_config([path], [f"checkpoint.checkpoint_dir={without}"]))
    assert '"word_rows": 0' in (without / "run" / "plan.json").read_text()
    for split in ("train", "validation"):
        ours, plain = tiny.losses(folder / "out", split), tiny.losses(without, split)
        assert ours.keys() == plain.keys()
        np.testing.assert_allclose(list(ours.values()), list(plain.values()), rtol=1e-4)
    from safetensors.torch import load_file

    ours, plain = (load_file(place / "model.safetensors") for place in (folder / "out", without))
    assert ours.keys() == plain.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], **CLOSE)


def test_a_model_that_is_not_proven_keeps_its_whole_table(folder):
    """CPM-Ant reads rows of a prompt that stand in no document."""
    path = write_run(folder)
    model = tiny_model("fnet", "text-classification", vocab_size=len(tiny.make_tokenizer()))
    model.save_pretrained(folder / "fnet")
    tiny.make_tokenizer().save_pretrained(folder / "fnet")
    plans = [prepare_run(load_run_config([path], o)).plan for o in ([], [f"model={folder}/fnet"])]
    assert plans[0].word_rows > 0
    assert plans[1].word_rows == 0


class Holder(nn.Module):
    def __init__(self, words, head=None):
        super().__init__()
        self.words, self.head = words, head

    def get_input_embeddings(self):
        return self.words


def test_which_tables_are_plain():
    table = nn.Embedding(8, 4)
    assert plain_word_table(Holder(table)) is table
    head = nn.Linear(4, 8, bias=False)
    assert plain_word_table(Holder(table, head)) is table
    head.weight = table.weight
    assert plain_word_table(Holder(table, head)) is None

    class Scaled(nn.Embedding):
        pass

    hooked = nn.Embedding(8, 4)
    hooked.register_forward_hook(lambda *_: None)
    frozen = nn.Embedding(8, 4).requires_grad_(False)
    for other in (Scaled(8, 4), nn.Embedding(8, 4, sparse=True), nn.Embedding(8, 4, max_norm=1.0), hooked, frozen):
        assert plain_word_table(Holder(other)) is None
    assert plain_word_table(nn.Linear(2, 2)) is None


def store_of(ids) -> TokenStore:
    arrays = {"input_ids": np.asarray(ids, dtype=np.uint16), "offsets": np.array([0, len(ids)]), "rows": np.zeros(1)}
    return TokenStore(arrays, {})


def test_ids_that_occur(monkeypatch):
    monkeypatch.setattr(used_rows, "TOKENS_AT_ONCE", 2)
    store = store_of([5, 5, 7, 3, 5])
    assert ids_that_occur(store, 10, [None, 9]).tolist() == [0, 3, 5, 7, 9]
    assert ids_that_occur(store, 7) is None  # an id that the table does not have is the step's to report
    monkeypatch.setattr(used_rows, "MOST_TOKENS", 4)
    assert ids_that_occur(store, 10) is None


def test_the_plain_case_changes_nothing():
    tensors, rows = {"a": torch.ones(2)}, AllRows()
    rows.stepped()
    rows.restore()
    assert rows.whole_weights(tensors) is tensors is rows.cut_weights(tensors)
