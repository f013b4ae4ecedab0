"""Words that errors share, whatever room they come from."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(given: object, known: Iterable[str]) -> str:
    """A clause that names what was probably meant, and all there is."""
    known = list(known)
    close = " or ".join(map(repr, get_close_matches(str(given).lower(), known, n=2)))
    return f"{close and f'did you mean {close}? '}expected one of: {', '.join(known)}"


def unknown(what: str, given: object, known: Iterable[str]) -> str:
    """The text of an error about a name that is not there."""
    return f"unknown {what} {given!r}; {nearest(given, known)}"
