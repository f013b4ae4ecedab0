"""Attention and vision transformers in one library.

A public name is imported when it is first used, so that `import vitrail` and `vitrail --help` need
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail import attention, data, learn, look, models, positions, tokens, weights
    from vitrail.attention import attend, attention_weights
    from vitrail.look import record
    from vitrail.models import create
    from vitrail.weights import load, save

__version__ = "0.1.0"

__all__ = [
    "attend",
    "attention",
    "attention_weights",
    "create",
    "data",
    "learn",
    "load",
    "look",
    "models",
    "positions",
    "record",
    "save",
    "tokens",
    "weights",
]

# Where the names live that are no rooms themselves.
_HOMES = {
    "attend": "vitrail.attention",
    "attention_weights": "vitrail.attention",
    "create": "vitrail.models",
    "load": "vitrail.weights",
    "record": "vitrail.look",
    "save": "vitrail.weights",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name) if name in _HOMES else import_module(f"vitrail.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
