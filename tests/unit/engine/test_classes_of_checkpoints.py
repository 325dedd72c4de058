"""Which class is number 1: a checkpoint's head, `model.id2label`, `dataset.labels` and the data must mean the same."""

import json

import pytest

import tiny_runs as tiny
from automodel.config.errors import UserError
from automodel.engine.prepare import prepare_run
from automodel.engine.read_data import read_data
from automodel.plan.check import load_run_config

NLI = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}  # in no order of the alphabet, as in many NLI checkpoints


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """The config of a run on `rows`, from a model folder made with `model`."""
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))

    def make(rows, text="", settings=(), task="text-classification", **model):
        tiny.make_model_folder(tmp_path / "model", **model)
        tiny.write_jsonl(tmp_path / "train.jsonl", rows)
        (tmp_path / "run.yaml").write_text(
            f"task: {task}\nmodel: {{pretrained_model_name_or_path: {tmp_path}/model}}\n"
            f"dataset: {{path: {tmp_path}/train.jsonl}}\n{text}"
        )
        return load_run_config([tmp_path / "run.yaml"], list(settings))

    return make


def labelled(*labels, count=12):
    return [{**row, "label": labels[i % len(labels)]} for i, row in enumerate(tiny.reviews(count))]


def of_head(names):
    return {"classifier": True, "id2label": names, "label2id": {name: i for i, name in names.items()}}


def test_a_trained_head_keeps_the_order_of_its_classes(config_of):
    """Sorted, `entailment` would be class 1, which the head has learned to call neutral."""
    data = read_data(config_of(labelled("entailment", "neutral", "contradiction"), **of_head(NLI)))
    assert data.train.label_names == ["contradiction", "neutral", "entailment"]
    assert data.train.store.labels[:3].tolist() == [2, 1, 0]


def test_other_classes_are_sorted_and_said_to_be_other_ones(config_of):
    prepared = prepare_run(config_of(labelled("a", "b", "c"), **of_head(NLI)))
    assert prepared.train.label_names == ["a", "b", "c"]
    said = [note for note in prepared.plan.decisions if note.name == "note"]
    assert any("CONTRADICTION, NEUTRAL, ENTAILMENT" in note.reason and "a, b, c" in note.reason for note in said)


def test_a_head_that_does_not_fit_starts_anew_and_is_said_to(config_of):
    prepared = prepare_run(config_of(labelled(0, 1), **of_head(NLI)))
    said = " ".join(decision.reason for decision in prepared.plan.decisions if decision.name == "note")
    assert "the checkpoint's head has 3 classes (CONTRADICTION, NEUTRAL, ENTAILMENT) and the data 2" in said
    assert prepared.hf_config.num_labels == 2
    fresh = prepare_run(config_of(labelled(0, 1)))  # a base model: a new head is what everybody expects
    assert not [decision for decision in fresh.plan.decisions if decision.name == "note"]


def test_tags_keep_the_order_of_a_trained_tagger(config_of, tmp_path):
    rows = [{"tokens": ["good", "film"], "ner_tags": ["B-PER", "O"]}, {"tokens": ["bad"], "ner_tags": ["I-PER"]}]
    cfg = config_of(rows, task="token-classification", **of_head({0: "O", 1: "B-PER", 2: "I-PER"}))
    described = tmp_path / "model" / "config.json"
    values = json.loads(described.read_text()) | {"architectures": ["BertForTokenClassification"]}
    described.write_text(json.dumps(values))
    assert read_data(cfg).train.label_names == ["O", "B-PER", "I-PER"]


def test_names_in_the_model_section_are_the_order(config_of):
    cfg = config_of(labelled("neg", "pos"), settings=["model.id2label={0: pos, 1: neg}"])
    prepared = prepare_run(cfg)
    assert prepared.train.label_names == ["pos", "neg"]
    assert prepared.hf_config.id2label == {0: "pos", 1: "neg"}
    with pytest.raises(UserError, match=r"model\.id2label.*good, bad.*neg, pos"):
        prepare_run(config_of(labelled("neg", "pos"), settings=["model.id2label={0: good, 1: bad}"]))
    three = "model.id2label={0: neg, 1: pos, 2: both}"
    with pytest.raises(UserError, match="3 classes, but the data has 2"):
        prepare_run(config_of(labelled(0, 1), settings=[three]))
    numbered = prepare_run(config_of(labelled(0, 1), settings=[three, "model.num_labels=3"]))
    assert numbered.hf_config.id2label == {0: "neg", 1: "pos", 2: "both"}
    with pytest.raises(UserError, match="from 0 on"):
        prepare_run(config_of(labelled(0, 1), settings=["model.id2label={1: neg, 2: pos}"]))


def test_numbers_listed_as_labels_are_names(config_of):
    """`labels: ["1", "0"]` makes the label 1 class 0; taken as ids, every label would be the other one."""
    data = read_data(config_of(labelled(1, 0), settings=['dataset.labels=["1", "0"]']))
    assert data.train.store.labels[:2].tolist() == [0, 1]
    stars = read_data(config_of(labelled(5, 1), settings=['dataset.labels=["1", "2", "3", "4", "5"]']))
    assert stars.train.store.labels[:2].tolist() == [4, 0]
    signs = read_data(config_of(labelled(-1, 1), settings=['dataset.labels=["-1", "1"]']))
    assert signs.train.store.labels[:2].tolist() == [0, 1]
    answers = read_data(config_of(labelled(True, False), settings=['dataset.labels=["true", "false"]']))
    assert answers.train.store.labels[:2].tolist() == [0, 1]
    several = read_data(config_of(labelled([2], [1, 2]), settings=['dataset.labels=["2", "1"]']))
    assert several.train.store.labels[:2].tolist() == [[1, 0], [1, 1]]
    named = read_data(config_of(labelled(1, 0), settings=["dataset.labels=[neg, pos]"]))
    assert named.train.store.labels[:2].tolist() == [1, 0]


def test_whole_decimals_are_classes_where_the_model_has_several(config_of):
    """A label column that some tool stored as decimals, and the reference's `num_labels: 2`."""
    data = read_data(config_of(labelled(1.0, 0.0), settings=["model.num_labels=2"]))
    assert data.train.problem_type == "single_label_classification"
    assert data.train.store.labels[:2].tolist() == [1, 0]
    assert read_data(config_of(labelled(1.0, 0.0))).train.problem_type == "regression"
    for asked in ([], ["model.problem_type=regression"]):
        with pytest.raises(UserError, match=r"model\.num_labels is 2.*'label'.*one number") as error:
            read_data(config_of(labelled(1.5, 0.0), settings=["model.num_labels=2", *asked]))
        assert "row 0" not in str(error.value)


def test_minus_one_says_how_to_mean_it(config_of):
    with pytest.raises(UserError, match=r"dataset\.labels"):
        read_data(config_of(labelled(-1, 1)))


def test_a_class_without_rows_is_said(config_of):
    prepared = prepare_run(config_of(labelled(0, 2), settings=["model.num_labels=3"]))
    said = " ".join(decision.reason for decision in prepared.plan.decisions if decision.name == "note")
    assert "no row has the label 1" in said


def test_an_empty_label_is_missing_and_no_class(config_of):
    with pytest.raises(UserError, match="row 2: the label is empty"):
        read_data(config_of(labelled("neg", "pos", " ", "pos")))
    skipped = read_data(config_of(labelled("neg", "pos", ""), settings=["dataset.on_bad_row=skip"]))
    assert skipped.train.label_names == ["neg", "pos"]
    with pytest.raises(UserError, match="every label in column 'label' is missing"):
        read_data(config_of(labelled("", " ")))
    with pytest.raises(UserError, match="no row has a label in column 'label'"):
        read_data(config_of(labelled([])))


def test_names_that_differ_only_in_writing_are_said(config_of):
    prepared = prepare_run(config_of(labelled("pos", "neg", "Pos ")))
    said = " ".join(decision.reason for decision in prepared.plan.decisions if decision.name == "note")
    assert "'Pos ' and 'pos'" in said


def test_decimals_are_classes_where_the_model_says_so(config_of):
    """The plan tells whoever has decimals as classes to set `model.problem_type`; then it must do."""
    single = "model.problem_type=single_label_classification"
    data = read_data(config_of(labelled(0.5, 10.0, 0.0), settings=[single]))
    assert data.train.label_names == ["0", "0.5", "10"]
    assert data.train.store.labels[:3].tolist() == [1, 2, 0]


def test_label_columns_follow_a_trained_head(config_of):
    """Each column is the class of its name, in whatever order the config lists them; so it is in held-out data."""
    rows = [{"text": row["text"], "sad": 1, "funny": i % 2} for i, row in enumerate(tiny.reviews(12))]
    settings = ["dataset.label_columns=[sad, funny]", "validation_dataset.split=train[:2]"]
    data = read_data(config_of(rows, settings=settings, **of_head({0: "funny", 1: "sad"})))
    assert data.train.label_names == ["funny", "sad"]
    assert data.train.store.labels[:2].tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert data.validation.store.labels.tolist() == [[0.0, 1.0], [1.0, 1.0]]


def test_a_head_with_other_meanings_is_said_to_have_them(config_of):
    head = of_head({0: "bad", 1: "good"})
    prepared = prepare_run(config_of(labelled("good", "bad"), settings=["dataset.labels=[good, bad]"], **head))
    said = " ".join(decision.reason for decision in prepared.plan.decisions if decision.name == "note")
    assert "its classes bad, good are now called good, bad" in said
    cfg = config_of(labelled("good", "bad"), classifier=True, num_labels=2, problem_type="regression")
    said = " ".join(decision.reason for decision in prepare_run(cfg).plan.decisions if decision.name == "note")
    assert "was trained for regression and not for single_label_classification" in said


def test_the_plan_says_whose_weights_are_whose(config_of):
    prepared = prepare_run(config_of(labelled("rare", "common"), "loss_fn: {class_weights: [0.5, 8]}\n"))
    assert any("2 classes: common × 0.5, rare × 8" in decision.reason for decision in prepared.plan.decisions)
