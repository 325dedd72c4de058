"""The classes of tags: as many as `model.num_labels` says, or an error that says why not."""

import pytest

from automodel.config.errors import UserError
from automodel.data.columns import Columns
from automodel.data.config import DatasetConfig
from automodel.data.labels import LabelMap, infer_tags


def tags_of(*rows: list, num_labels: int | None = None, labels: tuple[str, ...] | None = None) -> LabelMap:
    import datasets

    data = datasets.Dataset.from_dict({"tags": list(rows)})
    cfg = DatasetConfig(path="x", labels=labels)
    return infer_tags(data, Columns(data.features, "dataset"), "tags", cfg, num_labels)


def test_num_labels_counts_for_named_tags():
    found = tags_of(["B-PER", "O"], ["B-LOC"], num_labels=5)
    assert (found.num_labels, found.names) == (5, ("B-LOC", "B-PER", "O", "LABEL_3", "LABEL_4"))
    assert tags_of([0, 2], labels=("O", "B-A", "I-A"), num_labels=4).names == ("O", "B-A", "I-A", "LABEL_3")
    with pytest.raises(UserError, match="model.num_labels is 2, but the labels of dataset have 3 classes"):
        tags_of(["B-PER", "O"], ["B-LOC"], num_labels=2)


def test_one_tag_alone_is_nothing_to_learn():
    with pytest.raises(UserError, match="the same label 'O'"):
        tags_of(["O", "O"], ["O"])


def test_numbers_of_tags():
    assert tags_of([0.0, 2.0]).num_labels == 3  # a missing value in a file makes them all decimals
    with pytest.raises(UserError, match="'tags' are decimals"):
        tags_of([0.5, 2.0])
