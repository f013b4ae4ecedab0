"""Building a config from names and values that a person or a file gives, with errors a person can use."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C")


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names what was probably meant, or all there is."""
    known = list(known)
    close = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"


def build_config(kind: type[C], values: Mapping[str, Any]) -> C:
    """An instance of the frozen dataclass `kind`; unknown names and values of the wrong type are refused.

    A pair may be given as one number (224 for 224x224) or as a list, as JSON has it.
    """
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}; {nearest(name, known)}")
    return kind(**{name: _fit(name, value, hints[name]) for name, value in values.items()})


def _fit(name: str, value: Any, hint: Any) -> Any:
    """The value as the type that the field asks for, or an error that says what it should have been."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if isinstance(value, int) and not isinstance(value, bool) and len(inner) == 2:
            value = (value,) * 2
        if isinstance(value, list | tuple) and (inner[-1] is ... or len(value) == len(inner)):
            return tuple(_fit(name, item, inner[0]) for item in value)
    elif get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        hint = " or ".join(repr(option) for option in get_args(hint))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    raise ValueError(f"{name}={value!r} is not what the field takes: {wanted}")
