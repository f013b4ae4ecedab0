"""The mechanism: attention by dot products and by alignment, with many heads, and with a memory."""

from vitrail.attention.alignment import (
    AdditiveScore,
    AlignmentAttention,
    BilinearScore,
    Context,
    align,
)
from vitrail.attention.cache import KeyValueCache
from vitrail.attention.core import BACKENDS, attend, attention_weights, backend, weigh
from vitrail.attention.multihead import MultiHeadAttention

__all__ = [
    "BACKENDS",
    "AdditiveScore",
    "AlignmentAttention",
    "BilinearScore",
    "Context",
    "KeyValueCache",
    "MultiHeadAttention",
    "align",
    "attend",
    "attention_weights",
    "backend",
    "weigh",
]
