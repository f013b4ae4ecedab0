"""What was seen: the attention weights of the layers that were watched."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from vitrail.tokens import Grid
from vitrail.words import nearest


@dataclass(frozen=True)
class Seen:
    """One call of one attention layer."""

    name: str
    weights: Tensor  # (batch, heads, queries, keys), float32 or finer; rows sum to 1, or to 0
    grid: Grid | None  # of the keys, which end with it; None where the model has none

    @property
    def special(self) -> int:
        """How many tokens come before the grid: class, distillation, registers."""
        return self.weights.shape[-1] - math.prod(self.grid) if self.grid else 0

    def map(self, query: int | None = None) -> Tensor:
        """What one query sees of the grid: (batch, heads, rows, columns).

        Unless it is named: what the first special token sees, or all queries on average if there is none.
        """
        if self.grid is None:
            raise ValueError(f"the tokens of {self.name!r} do not lie on a grid; use .weights")
        count = self.weights.shape[-2]
        if query is not None and not -count <= query < count:
            raise ValueError(f"query {query} is out of range: {self.name!r} has {count}")
        everyone = query is None and not self.special
        rows = self.weights.mean(-2) if everyone else self.weights[..., query or 0, :]
        return rows[..., self.special :].unflatten(-1, self.grid)

    def __repr__(self) -> str:
        return (
            f"Seen({self.name}, weights {tuple(self.weights.shape)}, grid {self.grid and tuple(self.grid)})"
        )


class Recording(Mapping[str, Seen]):
    """Layer name → what it last saw, in the order of the layers. `calls` has every call, if asked for."""

    def __init__(self, chosen: Iterable[str], every_call: bool) -> None:
        self.chosen = tuple(chosen)
        self.every_call = every_call
        self.errors: list[str] = []  # what went wrong in looking, which no forward is to suffer from
        self.thread = threading.get_ident()
        self._calls: dict[str, list[Seen]] = {}

    def add(self, name: str, weights: Tensor, grid: Grid | None) -> None:
        """Keeps the weights (…, queries, keys) of a call, with batch and heads before them."""
        while weights.ndim < 4:
            weights = weights[None] if weights.ndim == 2 else weights[:, None]
        call = Seen(name, weights.detach(), grid)
        self._calls[name] = [*(self._calls.get(name, []) if self.every_call else []), call]

    def fail(self, error: Exception) -> None:
        """Keeps why something could not be seen, in words: the error itself would hold on to tensors."""
        self.errors.append(f"{type(error).__name__}: {error}")

    def calls(self, name: str) -> list[Seen]:
        """All calls of a layer that were kept, oldest first: one, unless record(…, every_call=True)."""
        if name not in self._calls:
            if name in self.chosen:
                raise KeyError(f"{name!r} is watched but has not run, or computed no attention")
            raise KeyError(f"{name!r} is not watched; {nearest(name, self.chosen)}")
        return self._calls[name]

    def __getitem__(self, layer: str | int) -> Seen:
        """By name, or by number among the layers that have run."""
        return self.calls(layer if isinstance(layer, str) else list(self)[layer])[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.chosen if name in self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.values())) or f"nothing seen yet of {', '.join(self.chosen)}"
