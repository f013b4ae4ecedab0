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
from torch.utils._pytree import tree_leaves

from vitrail.attention import align, attend, attention_weights, weigh
from vitrail.tokens import Grid, Tokens
from vitrail.words import nearest


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
        self.thread = threading.get_ident()
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

    The model's output is the same, bit for bit. A part that would take another path if it were watched
    (compiled, or one of torch's own Transformer modules) runs as it is, and once more uncompiled for
    its weights; in training, dropout is then not the same in both. Call the very model that is given
    here, compiled or not. Wrappers (torch.compile, DistributedDataParallel) do not show in the names.
    Only the thread that opened the context is recorded.
    """
    chosen = _choose(model, layers)
    recording = Recording(chosen.values(), every_call)
    closed = set(_closed_parts(model, chosen))
    hidden = {module for part in closed for module in part.modules()}
    with ExitStack() as stack:
        for part in closed:
            # No need where there is no layer to watch, and no convolution to tell of a grid.
            if any(inner in chosen or isinstance(inner, nn.Conv2d) for inner in part.modules()):
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
            with torch.no_grad(), torch._C.DisableTorchFunction():  # no tap is to see this
                weights = WEIGHTS_OF[func](result, *args, **kwargs)
            if weights is not None:
                self.recording.add(self.name, weights)
        return result


@contextmanager
def _watched(
    modules: Iterable[nn.Module], chosen: Mapping[nn.Module, str], recording: Recording
) -> Iterator[None]:
    """Hooks on modules: a tap is on while a chosen one runs; the others tell of grids."""
    opened: list[_Tap] = []  # innermost last
    handles = []

    def open_tap(tap: _Tap) -> None:
        if threading.get_ident() == recording.thread:
            opened.append(tap.__enter__())

    def close_tap(tap: _Tap) -> None:
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
        while opened:  # torch calls no hook after KeyboardInterrupt
            opened.pop().__exit__(None, None, None)
        for handle in handles:
            handle.remove()


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) or module.compile() made it what it is."""
    if isinstance(call := module._compiled_call_impl, _Replay):
        call = call.before
    return hasattr(module, "_orig_mod") or call is not None


def _is_closed(module: nn.Module) -> bool:
    """Whether the module, once watched, would take another path with other rounding."""
    own_kernel = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return _is_compiled(module) or isinstance(module, own_kernel)


def _closed_parts(module: nn.Module, chosen: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """The outermost closed modules; a chosen one with a closed one inside is closed with it."""
    if _is_closed(module) or (module in chosen and any(map(_is_closed, module.modules()))):
        yield module
    else:
        for child in module.children():
            yield from _closed_parts(child, chosen)


class _Replay:
    """Stands in for a closed part: each call runs it as it is, and then once more, open and watched.

    Looking into compiled code would mean to compile other code, whose answers round otherwise.
    """

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.before: Callable[..., Any] | None = vars(part).get(_place_of(part))
        self.unwatched: Callable[..., Any] = self.before or part._call_impl
        self.plain: Callable[..., Any] = getattr(part, "_orig_mod", part._call_impl)
        self.is_compiled = any(map(_is_compiled, part.modules()))
        self.gpus = sorted({x.device.index for x in part.parameters() if x.is_cuda})
        self.watchers: list[tuple[Mapping[nn.Module, str], Recording]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident()
        watchers = [watcher for watcher in self.watchers if watcher[1].thread == here]
        # The switches below are the whole process's, so all that they could touch waits.
        with _replays, ExitStack() as stack:
            if not watchers:
                return self.unwatched(*args, **kwargs)
            if self.part.training and not self.is_compiled:  # torch takes the open path by itself
                for watcher in watchers:
                    stack.enter_context(_watched(self.part.modules(), *watcher))
                return self.unwatched(*args, **kwargs)
            # What the call changes besides its output (inputs, caches, batch statistics, random
            # numbers) must change once.
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            again = copy.deepcopy((args, kwargs), {id(x): x.detach().clone() for x in tensors})
            output = self.unwatched(*args, **kwargs)
            buffers = [(buffer, buffer.clone()) for buffer in self.part.buffers()]
            for context in (
                torch.compiler.set_stance("force_eager"),
                torch.random.fork_rng(self.gpus),
                torch.no_grad(),
                _without_fast_path(),
                *(_watched(self.part.modules(), *watcher) for watcher in watchers),
            ):
                stack.enter_context(context)
            self.plain(*again[0], **again[1])
            for buffer, kept in buffers:
                buffer.copy_(kept)
            return output


def _place_of(part: nn.Module) -> str:
    """The attribute of a module through which calling it goes, on the instance itself."""
    return "forward" if hasattr(part, "_orig_mod") else "_compiled_call_impl"


_replays = threading.RLock()


@contextmanager
def _replayed(part: nn.Module, chosen: Mapping[nn.Module, str], recording: Recording) -> Iterator[None]:
    """A _Replay in the part's place, shared by all recordings of it and gone with the last of them."""
    watcher = chosen, recording
    with _replays:
        place = _place_of(part)
        replay = vars(part).get(place)
        if not isinstance(replay, _Replay):
            replay = _Replay(part)
            vars(part)[place] = replay
        replay.watchers.append(watcher)
    try:
        yield
    finally:
        with _replays:
            replay.watchers = [other for other in replay.watchers if other is not watcher]
            if not replay.watchers:
                del vars(part)[place]
                if replay.before is not None:
                    vars(part)[place] = replay.before


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Torch's Transformer modules compute by the functions in WEIGHTS_OF while this lasts."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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
