"""The block that every Transformer here is made of: x + mix(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": _gelu_tanh,
    "gelu-quick": _gelu_quick,
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """Two linear layers with an activation between: (…, width) → (…, width).

    "swiglu" makes the first twice as wide: one half, through silu, gates the other.
    """

    def __init__(self, width: int, hidden: int, *, activation: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.gated = activation == "swiglu"
        self.activation = ACTIVATIONS["silu" if self.gated else activation]
        self.up = nn.Linear(width, hidden * 2 if self.gated else hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            x = self.activation(gate) * x
        else:
            x = self.activation(x)
        return self.dropout(self.down(self.dropout(x)))


class LayerScale(nn.Module):
    """A learned gain for each channel, small at first (Touvron et al. 2021)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class DropPath(nn.Module):
    """Skips a branch for some samples of the batch while training (stochastic depth)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(1.0 - self.rate)
        return x * keep / (1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"{self.rate:g}"


class Block(nn.Module):
    """x + mix(norm(x)), x + mlp(norm(x)); families differ in what they hand to it.

    attention: any mixer of tokens; what else the block is called with goes on to it. layer_scale: the
    gain that both branches start with. drop_path: how often a sample skips a branch in training.
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)

        self.attention_norm = nn.LayerNorm(width, norm_eps)
        self.attention = attention
        self.attention_scale = scale()
        self.mlp_norm = nn.LayerNorm(width, norm_eps)
        self.mlp = mlp
        self.mlp_scale = scale()
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, **attention: Any) -> Tensor:
        """(batch, tokens, width) → the same."""
        mixed = self.dropout(self.attention(self.attention_norm(x), **attention))
        x = x + self.drop_path(self.attention_scale(mixed))
        return x + self.drop_path(self.mlp_scale(self.mlp(self.mlp_norm(x))))
