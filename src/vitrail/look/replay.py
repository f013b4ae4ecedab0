"""Parts that cannot be watched while they run: compiled ones, and torch's own Transformer modules.

They run as they are, for the answer, and once more open, for the weights.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.look.seen import Recording
from vitrail.look.taps import watched


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) or module.compile() made it what it is."""
    if isinstance(call := module._compiled_call_impl, _Replay):
        call = call.before
    return hasattr(module, "_orig_mod") or call is not None


def _is_closed(module: nn.Module) -> bool:
    """Whether the module, once watched, would take another path with other rounding."""
    own_kernel = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return _is_compiled(module) or isinstance(module, own_kernel)


def closed_parts(module: nn.Module, chosen: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """The outermost closed modules; a chosen one with a closed one inside is closed with it."""
    if _is_closed(module) or (module in chosen and any(map(_is_closed, module.modules()))):
        yield module
    else:
        for child in module.children():
            yield from closed_parts(child, chosen)


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
                    stack.enter_context(watched(self.part.modules(), *watcher))
                return self.unwatched(*args, **kwargs)
            # What the call changes besides its output (inputs, caches, batch statistics, random
            # numbers) must change once.
            again = _spare((args, kwargs))
            output = self.unwatched(*args, **kwargs)
            buffers = [(buffer, buffer.clone()) for buffer in self.part.buffers()]
            for context in (
                torch.compiler.set_stance("force_eager"),
                torch.random.fork_rng(self.gpus),
                torch.no_grad(),
                _without_fast_path(),
                *(watched(self.part.modules(), *watcher) for watcher in watchers),
            ):
                stack.enter_context(context)
            self.plain(*again[0], **again[1])
            for buffer, kept in buffers:
                buffer.copy_(kept)
            return output


def _spare(value: Any) -> Any:
    """A copy that shares no tensor with the value, through containers and objects such as caches."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _spare(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(_spare, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
        twin = copy.copy(value)
        vars(twin).update(_spare(vars(value)))
        return twin
    return value


def _place_of(part: nn.Module) -> str:
    """The attribute of a module through which calling it goes, on the instance itself."""
    return "forward" if hasattr(part, "_orig_mod") else "_compiled_call_impl"


_replays = threading.RLock()


@contextmanager
def replayed(part: nn.Module, chosen: Mapping[nn.Module, str], recording: Recording) -> Iterator[None]:
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
