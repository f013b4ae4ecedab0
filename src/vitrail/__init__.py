"""Attention and vision transformers in one library.

A public name is imported when it is first used, so that `import vitrail` and `vitrail --help` need
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail import models
    from vitrail.attention import attend, attention_weights
    from vitrail.look import record
    from vitrail.models import create
    from vitrail.weights import load, save

__version__ = "0.1.0"

__all__ = ["attend", "attention_weights", "create", "load", "models", "record", "save"]

_HOMES = {
    "attend": "vitrail.attention",
    "attention_weights": "vitrail.attention",
    "create": "vitrail.models",
    "load": "vitrail.weights",
    "models": "vitrail.models",
    "record": "vitrail.look",
    "save": "vitrail.weights",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if name == "models" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
