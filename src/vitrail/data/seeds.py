"""Randomness that is derived, never carried, so that nothing random has to be kept to go on."""

from __future__ import annotations

import hashlib


def mix(*parts: int | str) -> int:
    """One seed from several numbers and words, such as a run's seed, a step and a purpose."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # what both torch and numpy take
