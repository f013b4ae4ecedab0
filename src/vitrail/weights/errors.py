"""What goes wrong with weights, for the person who asked for them."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from safetensors import SafetensorError


class LoadError(ValueError):
    """Weights cannot be read as what they are said to be; nothing was loaded."""


class SaveError(ValueError):
    """A model cannot be written there, or not in that form; nothing was changed."""


class LoadWarning(UserWarning):
    """A load that worked, but not as the file alone says: a new head, resized positions, a guess."""


SHOWN = 10  # names of each kind in an error


def some(names: Sequence[str]) -> str:
    """The first names of a list that may be long, and how many more there are."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


# What the system complains of, in plain words.
REASONS = {
    errno.EACCES: "this user has no permission",
    errno.EPERM: "this user has no permission",
    errno.EROFS: "the disk can only be read",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "this user's share of the disk is full",
    errno.EFBIG: "files of this size are not allowed there",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EIO: "the disk has a fault",
}


@contextmanager
def explained(kind: type[LoadError | SaveError], what: str) -> Iterator[None]:
    """Turns the system's errors into ours: what did not work and why, without names of passing files."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = _system_error(error)
        if cause is None:
            raise
        raise kind(f"{what}: {REASONS.get(cause.errno or 0, cause.strerror or cause)}") from error


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's error in or behind one of torch or safetensors."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            return OSError(int(number[1]), str(error))
        error = error.__cause__ or error.__context__
    return None
