"""Anything as tokens."""

from vitrail.tokens.patches import ConvolutionalStem, Grid, Patches, Tokens

__all__ = ["ConvolutionalStem", "Grid", "Patches", "Tokens"]
