"""Attention of any layers of any model, computed beside the kernel that the forward uses.

Nothing in a model knows of it, and outside the context nothing is left.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from operator import index

from torch import nn

from vitrail.look.grids import Grids
from vitrail.look.replay import closed_parts, replayed
from vitrail.look.seen import Recording
from vitrail.look.taps import Watcher, watched
from vitrail.words import nearest


@contextmanager
def record(
    model: nn.Module,
    layers: int | str | Iterable[int | str] | None = None,
    *,
    every_call: bool = False,
) -> Iterator[Recording]:
    """Keeps the attention weights of the chosen layers while the context lasts.

    layers: names, patterns ("blocks.*") or numbers (-1 is the last), one or several; all attention
    layers unless given. A module of another kind, by its name, is recorded with all attention in it.
    every_call: keep all calls of a layer, not only the last.

    The model's output is the same, bit for bit. A part that would take another path if it were watched
    (compiled, or one of torch's own Transformer modules) runs as it is, and once more uncompiled for
    its weights; in training, dropout is then not the same in both. Call the very model that is given
    here, compiled or not. Wrappers (torch.compile, DistributedDataParallel) do not show in the names.
    Only the thread that opened the context is recorded. What could not be seen is told of in the end, by
    a warning; looking fails no forward.
    """
    chosen = _choose(model, layers)
    recording = Recording(chosen.values(), every_call)
    watcher = Watcher(chosen, recording, Grids(model, {*chosen, *attention_layers(model).values()}))
    closed = set(closed_parts(model, chosen))
    hidden = {module for part in closed for module in part.modules()}
    with ExitStack() as stack:
        for part in closed:
            # No need where there is no layer to watch, and no convolution to tell of a grid.
            if any(inner in chosen or isinstance(inner, nn.Conv2d) for inner in part.modules()):
                stack.enter_context(replayed(part, watcher))
        open_to_view = [module for module in model.modules() if module not in hidden]
        stack.enter_context(watched(open_to_view, watcher))
        yield recording
    unseen = [name for name in chosen.values() if name not in recording]
    if recording.errors or (unseen and (layers is not None or not recording)):
        why = recording.errors[-1:] or ["did it run, in this thread, and its attention not in compiled code?"]
        warnings.warn(f"nothing was seen of {', '.join(unseen) or 'some calls'}: {why[0]}", stacklevel=3)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that record watches unless told otherwise: innermost modules named for attention."""

    def is_one(module: nn.Module) -> bool:
        kind = type(module).__name__.lower()
        return "attention" in kind or "attn" in kind

    return {
        name: module
        for name, module in _named_modules(model)
        if is_one(module) and not any(is_one(part) for part in module.modules() if part is not module)
    }


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules, from outside to inside; a wrapper and what it wraps have the same name."""
    plain: dict[str, str] = {"": ""}
    wrappers = set()
    for name, module in model.named_modules():
        around, _, own = name.rpartition(".")
        if name:
            plain[name] = plain[around] if around in wrappers else f"{plain[around]}.{own}".lstrip(".")
        if hasattr(module, "_orig_mod") or isinstance(module, WRAPPERS):
            wrappers.add(name)
        yield plain[name], module


WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


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
    every = dict(_named_modules(model))
    wanted: set[str] = set()
    for layer in layers if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]:
        if not isinstance(layer, str):
            number = index(layer)  # also of NumPy's integers, which are not int
            if not -len(candidates) <= number < len(candidates):
                raise ValueError(f"layer {number} is out of range: there are {len(candidates)}")
            found = [list(candidates)[number]]
        else:
            found = [name for name in candidates if fnmatchcase(name, layer)]
            found = found or [name for name in every if name and name == layer]
        if not found:
            raise ValueError(f"no layer is called {layer!r}; {nearest(str(layer), candidates)}")
        wanted.update(found)
    return {module: name for name, module in every.items() if name in wanted}
