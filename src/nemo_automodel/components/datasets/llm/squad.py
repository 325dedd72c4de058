"""Alias of `automodel.data.squad`."""

from automodel.data.squad import make_squad_dataset

__all__ = ["make_squad_dataset"]
