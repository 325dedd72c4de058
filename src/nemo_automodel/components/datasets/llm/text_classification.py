"""Alias of `automodel.tasks.text_classification_dataset`."""

from automodel.tasks.text_classification_dataset import TextClassificationDataset

__all__ = ["TextClassificationDataset"]
