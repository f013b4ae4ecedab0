"""Multi-head attention: self, cross, masked, causal or cached, according to how it is called."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.attention.cache import KeyValueCache
from vitrail.attention.core import attend


class MultiHeadAttention(nn.Module):
    """Queries of width `width` look, with several heads at once, at keys and values.

    keys_width, values_width: widths of what is looked at, where it is not the queries' own stream.
    head_width, value_head_width: widths of one head, width / heads unless given.
    qk_norm: layer norm over each head's queries and keys before they are compared.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        keys_width: int | None = None,
        values_width: int | None = None,
        head_width: int | None = None,
        value_head_width: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if head_width is None and width % heads:
            raise ValueError(
                f"width {width} does not divide into {heads} heads; "
                "choose a number of heads that divides it, or give head_width"
            )
        head_width = head_width or width // heads
        value_head_width = value_head_width or head_width
        keys_width = keys_width or width
        values_width = values_width or keys_width
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, heads * head_width, bias=qkv_bias)
        self.key = nn.Linear(keys_width, heads * head_width, bias=qkv_bias)
        self.value = nn.Linear(values_width, heads * value_head_width, bias=qkv_bias)
        self.query_norm = nn.LayerNorm(head_width, norm_eps) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head_width, norm_eps) if qk_norm else nn.Identity()
        self.output = nn.Linear(heads * value_head_width, width)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x (batch, queries, width) → the same shape. Without keys it looks at itself.

        mask: True where a query may look; (queries, keys), (batch, queries, keys) or with heads second.
        padding (batch, keys): True for real tokens. bias: added to the scores, (heads, queries, keys).
        cache: remembers keys and values from call to call; those of a cross-attention are made once.
        """
        q = self.query_norm(self._split(self.query(x)))  # (batch, heads, queries, head width)
        if cache is not None and keys is not None and cache.length:
            k, v = cache.kept
        else:
            keys = x if keys is None else keys
            values = keys if values is None else values
            k = self.key_norm(self._split(self.key(keys)))  # (batch, heads, keys, head width)
            v = self._split(self.value(values))  # (batch, heads, keys, value head width)
            if cache is not None:
                k, v = cache.extend(k, v)
        if mask is not None and mask.ndim == 3:
            mask = mask[:, None]
        if padding is not None:
            real = padding[:, None, None, :]
            mask = real if mask is None else mask & real
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, mask=mask, bias=bias, causal=causal, dropout=dropout)
        return self.output(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads · width) → (batch, heads, tokens, width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
