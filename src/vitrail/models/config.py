"""Building a config from names and values that a person or a file gives, with errors a person can use."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vitrail.words import nearest

C = TypeVar("C")


def build_config(kind: type[C], values: Mapping[str, Any]) -> C:
    """An instance of the frozen dataclass `kind`; unknown names and values of the wrong type are refused.

    A pair may be given as one number (224 for 224x224) or as a list, as JSON has it; a config within the
    config as a mapping.
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
        for option in get_args(hint):
            with suppress(ValueError):
                return _fit(name, value, option)
    elif is_dataclass(hint) and isinstance(value, Mapping):
        return build_config(cast("type[Any]", hint), value)
    elif get_origin(hint) is tuple:
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
