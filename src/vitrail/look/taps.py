"""The weights behind a call of attention, worked out beside it.

While a chosen layer runs, calls of the functions in WEIGHTS_OF are answered as always, and the weights
behind the answer are computed from the same arguments. Our own attention, torch's, and any foreign
model's that calls scaled_dot_product_attention or a softmax are seen by this one door.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.attention import align, attend, attention_weights, weigh
from vitrail.look.seen import Recording
from vitrail.tokens import Grid, Tokens


class Tap(TorchFunctionMode):
    """While on, hands the weights behind every call of a function in WEIGHTS_OF to the recording."""

    def __init__(self, name: str, recording: Recording) -> None:
        super().__init__()
        self.name = name
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A backward that runs checkpointed layers again is no second call of them.
        if func in WEIGHTS_OF and torch._C._current_graph_task_id() == -1:
            with torch.no_grad(), torch._C.DisableTorchFunction():  # no tap is to see this
                weights = WEIGHTS_OF[func](result, *args, **kwargs)
            if weights is not None:
                self.recording.add(self.name, weights)
        return result


@contextmanager
def watched(
    modules: Iterable[nn.Module], chosen: Mapping[nn.Module, str], recording: Recording
) -> Iterator[None]:
    """Hooks on modules: a tap is on while a chosen one runs; the others tell of grids."""
    opened: list[Tap] = []  # innermost last
    handles = []

    def open_tap(tap: Tap) -> None:
        if threading.get_ident() == recording.thread:
            opened.append(tap.__enter__())

    def close_tap(tap: Tap) -> None:
        if threading.get_ident() == recording.thread and opened[-1:] == [tap]:
            opened.pop().__exit__(None, None, None)

    def note_grid(module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() != recording.thread:
            return
        if isinstance(output, Tokens):
            recording.grid = output.grid
        elif isinstance(module, nn.Conv2d) and module.kernel_size == module.stride != (1, 1):
            recording.grid = Grid(*output.shape[-2:])  # how foreign models cut patches

    for module in modules:
        if module in chosen:
            tap = Tap(chosen[module], recording)
            handles += [
                module.register_forward_pre_hook(lambda *_, tap=tap: open_tap(tap)),
                module.register_forward_hook(lambda *_, tap=tap: close_tap(tap), always_call=True),
            ]
        else:
            handles.append(module.register_forward_hook(note_grid))
    try:
        yield
    finally:
        while opened:  # torch calls no hook after KeyboardInterrupt
            opened.pop().__exit__(None, None, None)
        for handle in handles:
            handle.remove()


def _of_attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *, dropout: float, **how: Any) -> Tensor:
    return attention_weights(q, k, **how)


def _of_align(_: Any, scores: Tensor, values: Tensor, *, hard: bool, **how: Any) -> Tensor:
    return weigh(scores, **how)


def _of_torch(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    if is_causal:  # torch counts from the first key, attend from the last
        shape = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        return attention_weights(query, key, mask=attn_mask, scale=scale)
    return attention_weights(query, key, bias=attn_mask, scale=scale)


def _of_torch_multihead(_: Any, *args: Any, **kwargs: Any) -> Tensor:
    asked = {"need_weights": True, "average_attn_weights": False, "training": False}
    _, weights = F.multi_head_attention_forward(*args, **{**kwargs, **asked})
    assert weights is not None
    return weights if weights.ndim == 4 else weights[None]  # one example comes without its batch


def _of_softmax(result: Tensor, scores: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor | None:
    if result.ndim < 3 or dim not in (-1, result.ndim - 1):
        return None  # not over the keys of queries
    return result.to(torch.promote_types(result.dtype, torch.float32), copy=True)


# function → the weights (…, queries, keys) behind a call of it, from its result and its arguments.
WEIGHTS_OF: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    attend: _of_attend,
    align: _of_align,
    F.scaled_dot_product_attention: _of_torch,
    F.multi_head_attention_forward: _of_torch_multihead,
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
}
