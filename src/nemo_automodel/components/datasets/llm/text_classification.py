"""Alias of `automodel.data.text_classification`."""

from automodel.data.text_classification import TextClassificationDataset

__all__ = ["TextClassificationDataset"]
