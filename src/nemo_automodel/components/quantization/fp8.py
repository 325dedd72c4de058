"""Alias of `automodel.models.config.Fp8Config`."""

from automodel.models.config import Fp8Config as FP8Config

__all__ = ["FP8Config"]
