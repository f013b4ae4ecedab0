"""Attention of any layers of any model, computed beside the kernel that the forward uses.

Nothing in a model knows of it, and outside the context nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

from torch import nn

from vitrail.look.replay import closed_parts, replayed
from vitrail.look.seen import Recording
from vitrail.look.taps import watched
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
    Only the thread that opened the context is recorded.
    """
    chosen = _choose(model, layers)
    recording = Recording(chosen.values(), every_call)
    closed = set(closed_parts(model, chosen))
    hidden = {module for part in closed for module in part.modules()}
    with ExitStack() as stack:
        for part in closed:
            # No need where there is no layer to watch, and no convolution to tell of a grid.
            if any(inner in chosen or isinstance(inner, nn.Conv2d) for inner in part.modules()):
                stack.enter_context(replayed(part, chosen, recording))
        open_to_view = [module for module in model.modules() if module not in hidden]
        stack.enter_context(watched(open_to_view, chosen, recording))
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
            found = found or [name for name in every if name and name == layer]
        if not found:
            raise ValueError(f"no layer is called {layer!r}; {nearest(str(layer), candidates)}")
        wanted.update(found)
    return {module: name for name, module in every.items() if name in wanted}
