"""Alias of `automodel.adapters.config`."""

from automodel.adapters.config import PeftConfig

__all__ = ["PeftConfig"]
