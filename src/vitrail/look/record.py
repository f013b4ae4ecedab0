"""Attention of any layers of any model, computed beside the kernel that the forward uses.

While a chosen layer runs, calls of the functions in WEIGHTS_OF are answered as always, and the weights
behind the answer are worked out from the same arguments. Nothing in a model knows of it, and outside
the context nothing is left. It sees our own attention, torch's, and any foreign model's that calls
scaled_dot_product_attention or a softmax in a module that is named for attention.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.attention import align, attend, attention_weights, weigh
from vitrail.models.config import nearest
from vitrail.tokens import Grid, Tokens


@dataclass(frozen=True)
class Seen:
    """One call of one attention layer."""

    name: str
    weights: Tensor  # (batch, heads, queries, keys), float32 or finer; rows sum to 1, or to 0
    grid: Grid | None  # of the keys, which end with it; None where the model has none

    @property
    def special(self) -> int:
        """How many tokens come before the grid: class, distillation, registers."""
        return self.weights.shape[-1] - math.prod(self.grid) if self.grid else 0

    def map(self, query: int | None = None) -> Tensor:
        """What one query sees of the grid: (batch, heads, rows, columns).

        Unless it is named: what the first special token sees, or all queries on average if there is none.
        """
        if self.grid is None:
            raise ValueError(f"the tokens of {self.name!r} do not lie on a grid; use .weights")
        everyone = query is None and not self.special
        rows = self.weights.mean(2) if everyone else self.weights[:, :, query or 0]
        return rows[..., self.special :].unflatten(-1, self.grid)


class Recording(Mapping[str, Seen]):
    """Layer name → what it last saw, in the order of the layers. `calls` has every call, if asked for."""

    def __init__(self, chosen: Iterable[str], every_call: bool) -> None:
        self.chosen = tuple(chosen)
        self.every_call = every_call
        self.grid: Grid | None = None
        self._calls: dict[str, list[Seen]] = {}

    def add(self, name: str, weights: Tensor) -> None:
        """Keeps the weights (…, queries, keys) of a call, with batch and heads before them."""
        while weights.ndim < 4:
            weights = weights[None] if weights.ndim == 2 else weights[:, None]
        fits = self.grid is not None and math.prod(self.grid) <= weights.shape[-1]
        call = Seen(name, weights.detach(), self.grid if fits else None)
        self._calls[name] = [*(self._calls.get(name, []) if self.every_call else []), call]

    def calls(self, name: str) -> list[Seen]:
        """All calls of a layer that were kept, oldest first: one, unless record(…, every_call=True)."""
        if name not in self._calls:
            if name in self.chosen:
                raise KeyError(f"{name!r} is watched but has not run, or computed no attention")
            raise KeyError(f"{name!r} is not watched; {nearest(name, self.chosen)}")
        return self._calls[name]

    def __getitem__(self, name: str) -> Seen:
        return self.calls(name)[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.chosen if name in self._calls)

    def __len__(self) -> int:
        return len(self._calls)


@contextmanager
def record(
    model: nn.Module,
    layers: int | str | Iterable[int | str] | None = None,
    *,
    every_call: bool = False,
) -> Iterator[Recording]:
    """Keeps the attention weights of the chosen layers while the context lasts.

    layers: names, patterns ("blocks.*.attention") or numbers (-1 is the last), one or several; all
    attention layers unless given. every_call: keep each call of a layer, not only the last.

    The model's output is the same, bit for bit. A model or part that torch.compile made runs as it is,
    and once more uncompiled for its weights; wrappers (torch.compile, DistributedDataParallel) do not
    show in the names. Only the thread that opened the context is recorded.
    """
    chosen = _choose(model, layers)
    recording = Recording(chosen.values(), every_call)
    compiled = list(_compiled_parts(model))
    hidden = {module for part in compiled for module in part.modules()}
    with ExitStack() as stack:
        for part in compiled:
            stack.enter_context(_replayed(part, chosen, recording))
        open_to_view = [module for module in model.modules() if module not in hidden]
        stack.enter_context(_watched(open_to_view, chosen, recording))
        yield recording


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that record watches unless told otherwise: innermost modules named for attention."""

    def is_one(module: nn.Module) -> bool:
        kind = type(module).__name__.lower()
        return "attention" in kind or "attn" in kind

    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if is_one(module) and not any(is_one(part) for part in module.modules() if part is not module)
    }


def plain_name(name: str) -> str:
    """A module's name without the wrappers around it."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _choose(model: nn.Module, layers: int | str | Iterable[int | str] | None) -> dict[nn.Module, str]:
    """The modules to watch and their names, in the model's order."""
    candidates = attention_layers(model)
    if layers is None:
        if not candidates:
            raise ValueError(
                f"{type(model).__name__} has no module whose class is named for attention; "
                "say which compute it: record(model, layers=[…names of modules…])"
            )
        return {module: name for name, module in candidates.items()}
    every = {plain_name(name): module for name, module in model.named_modules()}
    wanted: set[str] = set()
    for layer in [layers] if isinstance(layers, int | str) else layers:
        if isinstance(layer, int):
            if not -len(candidates) <= layer < len(candidates):
                raise ValueError(f"layer {layer} is out of range: there are {len(candidates)}")
            found = [list(candidates)[layer]]
        else:
            found = [name for name in candidates if fnmatchcase(name, layer)]
            found = found or [name for name in every if name == layer]
        if not found:
            raise ValueError(f"no layer is called {layer!r}; {nearest(str(layer), candidates)}")
        wanted.update(found)
    return {module: name for name, module in every.items() if name in wanted}


class _Tap(TorchFunctionMode):
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
        if func in WEIGHTS_OF:
            with torch.no_grad():
                weights = WEIGHTS_OF[func](result, *args, **kwargs)
            if weights is not None:
                self.recording.add(self.name, weights)
        return result


@contextmanager
def _watched(
    modules: Iterable[nn.Module], chosen: Mapping[nn.Module, str], recording: Recording
) -> Iterator[None]:
    """Hooks on modules: a tap is on while a chosen one runs; the others tell of grids."""
    owner = threading.get_ident()
    handles = []

    def open_tap(tap: _Tap) -> None:
        if threading.get_ident() == owner:
            tap.__enter__()

    def close_tap(tap: _Tap) -> None:
        if threading.get_ident() == owner:
            tap.__exit__(None, None, None)

    def note_grid(module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() != owner:
            return
        if isinstance(output, Tokens):
            recording.grid = output.grid
        elif isinstance(module, nn.Conv2d) and module.kernel_size == module.stride != (1, 1):
            recording.grid = Grid(*output.shape[-2:])  # how foreign models cut patches

    for module in modules:
        if module in chosen:
            tap = _Tap(chosen[module], recording)
            handles += [
                module.register_forward_pre_hook(lambda *_, tap=tap: open_tap(tap)),
                module.register_forward_hook(lambda *_, tap=tap: close_tap(tap), always_call=True),
            ]
        else:
            handles.append(module.register_forward_hook(note_grid))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that torch.compile(module) or module.compile() made."""
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        yield module
    else:
        for child in module.children():
            yield from _compiled_parts(child)


@contextmanager
def _replayed(part: nn.Module, chosen: Mapping[nn.Module, str], recording: Recording) -> Iterator[None]:
    """Each call of a compiled part is followed by one of the same part, uncompiled and watched.

    Looking into the compiled code would mean to compile other code, whose answers round otherwise.
    """
    wrapper = hasattr(part, "_orig_mod")
    attribute = "forward" if wrapper else "_compiled_call_impl"
    compiled = getattr(part, attribute)
    plain = getattr(part, "_orig_mod" if wrapper else "_call_impl")
    gpus = sorted({tensor.device.index for tensor in part.parameters() if tensor.is_cuda})

    def run_both(*args: Any, **kwargs: Any) -> Any:
        # What the call changes besides its output (caches, batch statistics, random numbers) must
        # change once.
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        again = copy.deepcopy((args, kwargs), {id(tensor): tensor for tensor in tensors})
        output = compiled(*args, **kwargs)
        buffers = [(buffer, buffer.clone()) for buffer in part.buffers()]
        with (
            torch.compiler.set_stance("force_eager"),
            torch.random.fork_rng(gpus),
            torch.no_grad(),
            _watched(part.modules(), chosen, recording),
        ):
            plain(*again[0], **again[1])
            for buffer, before in buffers:
                buffer.copy_(before)
        return output

    object.__setattr__(part, attribute, run_both)
    try:
        yield
    finally:
        object.__setattr__(part, attribute, compiled)


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


def _of_torch_multihead(_: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    asked = {"need_weights": True, "average_attn_weights": False, "training": False}
    return F.multi_head_attention_forward(*args, **{**kwargs, **asked})[1]


def _of_softmax(result: Tensor, *_: Any, **__: Any) -> Tensor | None:
    return result if result.ndim >= 3 else None


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
