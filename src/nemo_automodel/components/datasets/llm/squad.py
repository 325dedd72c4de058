"""Alias of `automodel.tasks.squad_dataset`."""

from automodel.tasks.squad_dataset import make_squad_dataset

__all__ = ["make_squad_dataset"]
