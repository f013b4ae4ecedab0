"""The memory of a decoder: keys and values of the tokens that one attention layer has already seen."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Grows along the tokens by doubling, so that adding one token does not copy all before it.

    Meant for decoding under torch.no_grad(): what is stored is written in place.
    """

    def __init__(self) -> None:
        self.length = 0
        self._storage: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds (…, new, width) to what is kept and returns all of it: (…, length, width) each."""
        start, length = self.length, self.length + keys.shape[-2]
        if self._storage is None:
            self._storage = keys, values
        else:
            if length > self._storage[0].shape[-2]:
                k, v = (_grown(kept, start, 2 * length) for kept in self._storage)
                self._storage = k, v
            for kept, new in zip(self._storage, (keys, values), strict=True):
                kept[..., start:length, :] = new
        self.length = length  # last: what could not be added leaves what is kept as it was
        return self.kept

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """All keys and values so far, (…, length, width) each."""
        if self._storage is None:
            raise ValueError("nothing has been cached yet: call extend(keys, values) first")
        keys, values = (kept[..., : self.length, :] for kept in self._storage)
        return keys, values


def _grown(kept: Tensor, length: int, capacity: int) -> Tensor:
    """Room for `capacity` tokens, the first `length` of them copied from what is kept."""
    shape = torch.Size((*kept.shape[:-2], capacity, kept.shape[-1]))
    grown = kept.new_empty(shape)
    grown[..., :length, :] = kept[..., :length, :]
    return grown
