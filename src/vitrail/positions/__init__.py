"""Where a token lies: computed, or learned and resized."""

from vitrail.positions.fixed import sincos_2d, sincos_for, sinusoidal
from vitrail.positions.learned import RESIZE, LearnedPositions, resize_positions

__all__ = ["RESIZE", "LearnedPositions", "resize_positions", "sincos_2d", "sincos_for", "sinusoidal"]
