"""The weights behind a call of attention, worked out beside it.

While a chosen layer runs, calls of the functions in WEIGHTS_OF are answered as always, and the weights
behind the answer are computed from the same arguments. Our own attention, torch's, and any foreign
model's that calls scaled_dot_product_attention or a softmax are seen by this one door.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vitrail.attention import align, attend, attention_weights, weigh
from vitrail.look.grids import Grids
from vitrail.look.seen import Recording


class Watcher(NamedTuple):
    """Who looks: at which modules, under which names, and where it is kept."""

    chosen: Mapping[nn.Module, str]
    recording: Recording
    grids: Grids


class Tap(TorchFunctionMode):
    """While on, keeps the weights behind every call of a function in WEIGHTS_OF, for the recording.

    A softmax need not be attention: a layer may also have gates. So of all that one run of the layer
    computes, a function of attention counts more than a softmax, one of heads more than one without, and
    one of numbers that come straight out of a linear map, which compares nothing, least.
    """

    def __init__(self, layer: nn.Module, name: str, recording: Recording, grids: Grids) -> None:
        super().__init__()
        self.layer = layer
        self.name = name
        self.recording = recording
        self.grids = grids
        self.rank = 0.0
        self.kept: list[Tensor] = []
        # What the last linear map gave, while it lives.
        self.mapped: Callable[[], Tensor | None] = lambda: None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():  # a function of the layer's own, which is to stay as it is
            return result
        if func is F.linear:
            self.mapped = weakref.ref(result)
        # A backward that runs checkpointed layers again is no second call of them.
        if func in WEIGHTS_OF and torch._C._current_graph_task_id() == -1:
            try:
                # No tap is to see this, nor a mode that counts the operations of checkpointed layers.
                with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                    weights = WEIGHTS_OF[func](result, *args, **kwargs)
            except Exception as error:
                self.recording.fail(error)
                weights = None
            if weights is not None:
                rank: float = math.inf
                if WEIGHTS_OF[func] is _of_softmax:
                    scores = args[0] if args else kwargs["input"]
                    rank = 0 if scores is self.mapped() else weights.ndim
                self._keep(weights, rank)
        return result

    def _keep(self, weights: Tensor, rank: float) -> None:
        if rank < self.rank:
            return
        if rank > self.rank or not self.recording.every_call:
            self.kept.clear()
        self.rank = rank
        self.kept.append(weights)

    def hand_over(self) -> None:
        """Gives the recording what was kept of this run of the layer."""
        for weights in self.kept:
            self.recording.add(self.name, weights, self.grids.of(self.layer, weights.shape[-1]))
        self.rank = 0.0
        self.kept.clear()


@contextmanager
def watched(modules: Iterable[nn.Module], watcher: Watcher) -> Iterator[None]:
    """Hooks on modules: a tap is on while a chosen one runs; the others tell of grids."""
    chosen, recording, grids = watcher
    opened: list[Tap] = []  # innermost last
    handles = []

    def open_tap(tap: Tap) -> None:
        if threading.get_ident() == recording.thread:
            opened.append(tap.__enter__())

    def close_tap(tap: Tap) -> None:
        if threading.get_ident() == recording.thread and opened[-1:] == [tap]:
            close_last()

    def close_last() -> None:
        tap = opened.pop()
        tap.__exit__(None, None, None)
        tap.hand_over()

    def note_grid(module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() == recording.thread:
            grids.listen(module, output)

    try:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            if module in chosen:
                tap = Tap(module, chosen[module], recording, grids)
                handles += [
                    module.register_forward_pre_hook(lambda *_, tap=tap: open_tap(tap)),
                    module.register_forward_hook(lambda *_, tap=tap: close_tap(tap), always_call=True),
                ]
            else:
                handles.append(module.register_forward_hook(note_grid))
        yield
    finally:
        while opened:  # torch calls no hook after KeyboardInterrupt
            close_last()
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
    if isinstance(attn_mask, CausalBias):  # what it holds itself was never filled
        attn_mask = attn_mask._materialize(query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        return attention_weights(query, key, mask=attn_mask, scale=scale)
    return attention_weights(query, key, bias=attn_mask, scale=scale)


def _of_torch_multihead(_: Any, *args: Any, **kwargs: Any) -> Tensor:
    asked = {"need_weights": True, "average_attn_weights": False, "training": False}
    with _Scores() as seen:
        _, rounded = F.multi_head_attention_forward(*args, **{**kwargs, **asked})
    assert rounded is not None
    scores = seen.scores.to(torch.promote_types(seen.scores.dtype, torch.float32))
    weights = weigh(scores).view(rounded.shape)
    return weights if weights.ndim == 4 else weights[None]  # one example comes without its batch


class _Scores(TorchDispatchMode):
    """Keeps what goes into a softmax, which torch rounds to half precision, and makes NaN of blind rows."""

    scores: Tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._softmax.default:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))


def _of_softmax(result: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor | None:
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
