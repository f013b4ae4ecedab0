"""Parts that cannot be watched while they run: compiled ones, and torch's own Transformer modules.

They run as they are, for the answer, and once more open, for the weights.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from vitrail.look.taps import Watcher, watched

T = TypeVar("T")


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) or module.compile() made it what it is, or any method of it."""
    if isinstance(call := module._compiled_call_impl, _Replay):
        call = call.before
    if hasattr(module, "_orig_mod") or call is not None:
        return True
    holders = (module, *type(module).__mro__)
    methods = (thing for holder in holders for thing in vars(holder).values() if isfunction(thing))
    return any(
        # What torch._dynamo.disable makes has the one, too.
        hasattr(method, "_torchdynamo_orig_callable") and not hasattr(method, "_torchdynamo_disable")
        for method in methods
    )


def _is_closed(module: nn.Module) -> bool:
    """Whether the module, once watched, would take another path with other rounding."""
    return _is_compiled(module) or isinstance(module, OWN_KERNEL)


OWN_KERNEL = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def closed_parts(module: nn.Module, chosen: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """The outermost closed modules; a chosen one with a closed one inside is closed with it."""
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return  # its copies run in threads of their own, which nobody watches
    if _is_closed(module) or (module in chosen and any(map(_is_closed, module.modules()))):
        yield module
    else:
        for child in module.children():
            yield from closed_parts(child, chosen)


class _Replay:
    """Stands in for a closed part: each call runs it as it is, and then once more, open and watched.

    Looking into compiled code would mean to compile other code, whose answers round otherwise.
    """

    is_open = False  # while any part runs once more: the parts in it are then open, too

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.before: Callable[..., Any] | None = vars(part).get(_place_of(part))
        self.unwatched: Callable[..., Any] = self.before or part._call_impl
        self.plain: Callable[..., Any] = getattr(part, "_orig_mod", part._call_impl)
        self.is_compiled = any(map(_is_compiled, part.modules()))
        self.own_kernels = [module for module in part.modules() if isinstance(module, OWN_KERNEL)]
        self.watchers: list[Watcher] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident()
        watchers = [watcher for watcher in self.watchers if watcher.recording.thread == here]
        # The switches below are the whole process's, so all that they could touch waits.
        with _replays, ExitStack() as stack:
            # A backward that runs checkpointed layers again is no second call of them.
            if not watchers or _Replay.is_open or torch._C._current_graph_task_id() != -1:
                return self.unwatched(*args, **kwargs)
            # In training torch's own modules take the open path by themselves.
            if not self.is_compiled and all(module.training for module in self.own_kernels):
                for watcher in watchers:
                    stack.enter_context(watched(self.part.modules(), watcher))
                return self.unwatched(*args, **kwargs)
            world = _attempt(watchers, lambda: _spare((args, kwargs, _attributes(self.part)), {}))
            output = self.unwatched(*args, **kwargs)
            if world is not None:
                _attempt(watchers, lambda: self._again(watchers, *world))
            return output

    def _again(
        self,
        watchers: list[Watcher],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        attributes: Mapping[nn.Module, dict[str, Any]],
    ) -> None:
        """Runs the part open and watched, in a world of copies as it was before the call.

        What a call changes besides its output (inputs, caches, batch statistics, counters, random
        numbers) changes once; and nothing is written that a backward still has to read.
        """
        with ExitStack() as stack:
            for context in (
                torch.compiler.set_stance("force_eager"),
                _same_draws(self.part),
                _without_autocast_cache(),
                _disable_current_modes(),
                torch.no_grad(),
                _without_fast_path(),
                _with_attributes(attributes),
                *(watched(self.part.modules(), watcher) for watcher in watchers),
            ):
                stack.enter_context(context)
            _Replay.is_open = True
            try:
                self.plain(*args, **kwargs)
            finally:
                _Replay.is_open = False


def _attempt(watchers: list[Watcher], step: Callable[[], T]) -> T | None:
    """A step of looking; if it fails, whoever looks is told, and the model goes on."""
    try:
        return step()
    except Exception as error:
        for watcher in watchers:
            watcher.recording.fail(error)
        return None


def _attributes(part: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Module → its attributes, buffers and counters among them, for all modules of a part."""
    return {module: vars(module) for module in part.modules()}


@contextmanager
def _with_attributes(attributes: Mapping[nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Modules have these attributes while it lasts, and then the very ones that they had before."""
    before = {module: vars(module) for module in attributes}
    try:
        for module, others in attributes.items():
            object.__setattr__(module, "__dict__", others)
        yield
    finally:
        for module, own in before.items():
            object.__setattr__(module, "__dict__", own)


def _spare(value: Any, copies: dict[int, Any]) -> Any:
    """A copy that shares no tensor with the value, through containers and objects such as caches.

    Modules, their parameters and what drives them stay what they are. copies: by the id of what has been
    copied, so that one thing in two places, or within itself, is one thing in the copy.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, nn.Module | nn.Parameter | torch.optim.Optimizer | type) or callable(value):
        return value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, tuple):
        items = [_spare(item, copies) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else tuple.__new__(type(value), items)
    if isinstance(value, Tensor):
        copies[id(value)] = value.detach().clone()
        return copies[id(value)]
    if not isinstance(value, dict | list | set):
        held = getattr(value, "__dict__", {}).values()
        if not held or any(isinstance(item, nn.Module) for item in held):  # such as a trainer of the model
            return value
    try:
        twin = copy.copy(value)
    except Exception:  # a lock, a handle, a process group: there is but one
        twin = value
    copies[id(value)] = twin
    if twin is value:
        return value
    if isinstance(value, dict):
        for key, item in value.items():
            dict.__setitem__(twin, key, _spare(item, copies))
    elif isinstance(value, list):
        twin[:] = [_spare(item, copies) for item in value]
    if hasattr(value, "__dict__"):
        vars(twin).update({name: _spare(item, copies) for name, item in vars(value).items()})
    return twin


def _place_of(part: nn.Module) -> str:
    """The attribute of a module through which calling it goes, on the instance itself."""
    return "forward" if hasattr(part, "_orig_mod") else "_compiled_call_impl"


_replays = threading.RLock()


@contextmanager
def replayed(part: nn.Module, watcher: Watcher) -> Iterator[None]:
    """A _Replay in the part's place, shared by all recordings of it and gone with the last of them."""
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


@contextmanager
def _same_draws(part: nn.Module) -> Iterator[None]:
    """All that chance decides comes out after this as if it had not been."""
    gpus = sorted({x.device.index for x in part.parameters() if x.is_cuda})
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast keeps nothing that it casts here, without gradients: older torch gave it to all."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
