"""Attention before the Transformer: e = f_att(s, h), a = softmax(e), c = Σ a h.

Bahdanau et al. 2015 (additive), Luong et al. 2015 (bilinear, there called "general"), Xu et al. 2015
(soft and hard). Any module that scores queries s against keys h can be the alignment function.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from vitrail.attention.core import weigh


class Context(NamedTuple):
    """What an alignment gives: the context, and for hard attention the log-probability of its choice."""

    context: Tensor  # (batch, queries, value width)
    log_probability: Tensor | None = None  # (batch, queries), for REINFORCE


def align(scores: Tensor, values: Tensor, *, mask: Tensor | None = None, hard: bool = False) -> Context:
    """The values as weighed by scores (batch, queries, keys); values are (batch, keys, width).

    soft: their average under the softmax. hard: one of them, drawn with those probabilities; gradients
    reach the scores only through the log-probability. A query that may look nowhere gets zeros.
    """
    if has_torch_function_variadic(scores, values):
        return handle_torch_function(align, (scores, values), scores, values, mask=mask, hard=hard)
    weights = weigh(scores, mask=mask)
    if not hard:
        return Context(weights.to(values.dtype) @ values)
    sighted = weights.sum(-1) > 0  # (batch, queries)
    # Blind queries draw as if all were alike, and what they drew is erased.
    law = torch.distributions.Categorical(
        torch.where(sighted[..., None], weights, torch.ones_like(weights)), validate_args=False
    )
    choice = law.sample()
    drawn = values.gather(-2, choice[..., None].expand(*choice.shape, values.shape[-1]))
    return Context(
        drawn.masked_fill(~sighted[..., None], 0.0), law.log_prob(choice).masked_fill(~sighted, 0.0)
    )


class AdditiveScore(nn.Module):
    """Bahdanau's alignment: vᵀ tanh(W s + U h)."""

    def __init__(self, query_width: int, key_width: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, width, bias=bias)
        self.key = nn.Linear(key_width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries (batch, queries, query width), keys (batch, keys, key width) → (batch, queries, keys)."""
        both = self.query(queries)[:, :, None] + self.key(keys)[:, None]
        return self.score(both.tanh()).squeeze(-1)


class BilinearScore(nn.Module):
    """Luong's "general" alignment: sᵀ W h."""

    def __init__(self, query_width: int, key_width: int) -> None:
        super().__init__()
        self.key = nn.Linear(key_width, query_width, bias=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries (batch, queries, query width), keys (batch, keys, key width) → (batch, queries, keys)."""
        return queries @ self.key(keys).transpose(-2, -1)


class AlignmentAttention(nn.Module):
    """Attention by any alignment function: a module from (queries, keys) to scores."""

    def __init__(self, score: nn.Module, *, hard: bool = False) -> None:
        super().__init__()
        self.score = score
        self.hard = hard

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Context:
        """queries (batch, queries, width), keys (batch, keys, width); values are the keys unless given.

        mask: True where a query may look, broadcast to (batch, queries, keys).
        """
        scores = self.score(queries, keys)
        return align(scores, keys if values is None else values, mask=mask, hard=self.hard)
