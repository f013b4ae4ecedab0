"""Scaled dot-product attention: the one place where softmax(q kᵀ / √d + bias) v happens.

Shapes are (…, queries, width) for q, (…, keys, width) for k and (…, keys, value width) for v, with any
leading dimensions that broadcast; the models use (batch, heads, tokens, width). Masks are boolean and
True means "may look". A query that may look nowhere gets zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function_variadic


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Each query's average of the values, weighted by its likeness to the keys: (…, queries, value width).

    mask (…, queries, keys): boolean, True where a query may look. bias (…, queries, keys): added to the
    scores. causal: queries are the last of the keys, and see no later one. scale: 1/√width unless given.
    """
    # Lets vitrail.record see the call; tensors and modes of torch use the same door.
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(
            attend, (q, k, v), q, k, v,
            mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout,
        )  # fmt: skip
    _refuse_types(mask, bias)
    return BACKENDS[_chosen](q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The weights that `attend` gives to each key: (…, queries, keys), rows summing to 1 (or to 0).

    Half-precision inputs give float32 weights, as the fused kernels compute them inside.
    """
    _refuse_types(mask, bias)
    with without_autocast(q.device):
        dtype = torch.promote_types(q.dtype, torch.float32)
        bias = None if bias is None else _cast(bias, q.dtype)
        return _weights(q.to(dtype), k.to(dtype), mask=mask, bias=bias, causal=causal, scale=scale)


def _weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """softmax(q kᵀ / √d + bias) in the precision of q and k."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    visible = _visible(q, k, mask, causal)
    return scores.softmax(-1) if visible is bias is None else weigh(scores, mask=visible)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Computing in the types that are given, on devices that know autocast and on those that do not."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def weigh(scores: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Softmax of scores (…, queries, keys) over the keys that may be seen; a row with none gives zeros."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _refuse_types(mask: Tensor | None, bias: Tensor | None) -> None:
    """A mask is boolean, a bias is not: one in the place of the other would be wrong in silence."""
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"mask has dtype {mask.dtype}; it must be boolean, True where a query may look. "
            "Numbers to be added to the scores go in as bias=…"
        )
    if bias is not None and bias.dtype == torch.bool:
        raise TypeError(
            "bias is boolean; it must be numbers, to be added to the scores. Where a query may look goes in "
            "as mask=…"
        )


def _visible(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """The mask (…, queries, keys) together with the causal one; None when everything may be seen."""
    queries, keys = q.shape[-2], k.shape[-2]
    if not causal or queries == 1:  # the last query sees all keys
        return mask
    lower = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return lower if mask is None else mask & lower


def _cast(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias as kernels take it; what is finite stays so in a smaller type."""
    if bias.dtype == dtype:
        return bias
    bias = bias.to(torch.promote_types(bias.dtype, dtype))
    finite = torch.finfo(dtype)
    return torch.where(bias.isinf(), bias, bias.clamp(finite.min, finite.max)).to(dtype)


def _kernel_type(q: Tensor) -> torch.dtype:
    """What a fused kernel computes in: autocast's type where it is on, which leaves float64 alone."""
    kind = q.device.type
    if q.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return q.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """One fused kernel, which torch picks."""
    # Without two leading dimensions, the same ones of q, k and v, torch writes down the whole matrix.
    given = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, mask, bias) if x is not None))
    leading = (1,) * (2 - len(given)) + given
    q, k, v = (x.expand(*leading, *x.shape[-2:]).flatten(0, -4) for x in (q, k, v))
    triangle = causal and mask is None and bias is None and q.shape[-2] == k.shape[-2]
    visible = None if triangle else _visible(q, k, mask, causal)
    # No kernel agrees with another on rows of -inf: let blind queries look everywhere, then forget it.
    blind, added = None, None
    if bias is not None:
        bias = bias if visible is None else torch.where(visible, bias, -torch.inf)
        blind = (bias == -torch.inf).all(-1, keepdim=True)
        added = _cast(bias, _kernel_type(q)).masked_fill(blind, 0.0)
    elif visible is not None:
        blind = ~visible.any(-1, keepdim=True)
        added = visible | blind
    if added is not None:
        if added.shape[-1] < k.shape[-2]:  # the same for all keys, which not all kernels spread
            added = added.expand(*added.shape[:-1], k.shape[-2]).contiguous()
        added = added[(None,) * (len(leading) + 2 - added.ndim)]
        added = added.expand(*leading[:-1], *added.shape[-3:]).flatten(0, -4)
    y = F.scaled_dot_product_attention(q, k, v, added, dropout, is_causal=triangle, scale=scale)
    y = y.reshape(*given, *y.shape[-2:])
    return y if blind is None else y.masked_fill(blind, 0.0)


def _by(kernel: SDPBackend | list[SDPBackend], q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The fused kernel of this name, or the fastest of several that fits."""
    with sdpa_kernel(kernel):
        return _fused(q, k, v, **how)


def _fastest(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The fastest fused kernel that can be relied on."""
    kernels = _reliable() if q.is_cuda else []
    return _by(kernels, q, k, v, **how) if kernels else _fused(q, k, v, **how)


def _reliable() -> list[SDPBackend]:
    """The kernels to keep to on CUDA: of those below the ones that nobody has switched off."""
    return [kernel for kernel, is_on in RELIABLE if is_on()]


# Not cuDNN's, which torch prefers on Hopper chips: training in bfloat16 its gradients became NaN, always
# at the same step, where those of flash and of the formula stayed sound (torch 2.11, H200).
# The switches are those of torch.backends.cuda, in the form that torch.compile can read.
RELIABLE: tuple[tuple[SDPBackend, Callable[[], bool]], ...] = (
    (SDPBackend.FLASH_ATTENTION, torch._C._get_flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch._C._get_mem_efficient_sdp_enabled),
    (SDPBackend.MATH, torch._C._get_math_sdp_enabled),
)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """The formula as it is written, with the whole matrix of weights in memory."""
    weights = attention_weights(q, k, mask=mask, bias=bias, causal=causal, scale=scale)
    return F.dropout(weights, dropout).to(v.dtype) @ v


def _matmul(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """The same without float32 between: scores and weights are rounded to the type of q.

    On a CPU that multiplies bfloat16 in hardware it takes a half to a fifth of the fused kernel's time, as
    long as the rows are short; long ones are left to that kernel.
    """
    if k.shape[-2] > SHORT:
        return _fastest(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout)
    if bias is not None:  # in float32, for the sum may be too great for half precision
        bias = _cast(bias, q.dtype).to(torch.promote_types(q.dtype, torch.float32))
    weights = _weights(q, k, mask=mask, bias=bias, causal=causal, scale=scale)
    return F.dropout(weights, dropout).to(v.dtype) @ v


SHORT = 768  # keys; the weights of many more take long, and much memory, to write and read

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "fused": _fastest,
    "flash": partial(_by, SDPBackend.FLASH_ATTENTION),
    "efficient": partial(_by, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": partial(_by, SDPBackend.CUDNN_ATTENTION),
    "math": partial(_by, SDPBackend.MATH),
    "explicit": _explicit,
    "matmul": _matmul,
}
_chosen = "fused"
_entered: list[tuple[object, str]] = [(object(), _chosen)]  # the latest, which is chosen, last
_switching = threading.Lock()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute all attention of the process by the named entry of BACKENDS while the context lasts.

    Of several threads the last to enter decides, until it leaves. It is not a choice of one thread,
    for autograd runs checkpointed layers again, and DataParallel its copies, in threads of their own.
    """
    global _chosen
    if name not in BACKENDS:
        raise ValueError(f"no attention backend is called {name!r}; choose from {', '.join(BACKENDS)}")
    mine = object(), name  # equal to no other entry of that name
    with _switching:
        _entered.append(mine)
        _chosen = name
    try:
        yield
    finally:
        with _switching:
            _entered.remove(mine)
            _chosen = _entered[-1][1]
