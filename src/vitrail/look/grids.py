"""Where the keys of an attention layer lie in the picture, as far as that is certain."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from vitrail.tokens import Grid, Tokens

# The parameters that models put in front of their patches; each row of one is a token.
LEADING = {
    "cls_token", "class_token", "class_embedding",
    "dist_token", "distillation_token",
    "reg_token", "register_token", "register_tokens",
}  # fmt: skip


class Grids:
    """The grids that the parts of a model tell of while it runs, and for which layers each of them holds.

    A part speaks for its tower: the smallest module that has both the part and attention in it. So the
    patches of CLIP's pictures say nothing of its text.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        layers = set(layers)
        self._tower: dict[nn.Module, nn.Module] = {}
        for module in model.modules():  # from outside to inside
            inside = set(module.modules())
            if layers & inside:
                self._tower |= dict.fromkeys(inside, module)
        self._told: dict[nn.Module, Grid] = {}  # by tower, the latest last

    def listen(self, module: nn.Module, output: Any) -> None:
        """Notes the grid that a module's output lies on, if it is tokens or a map of features."""
        tower = self._tower.get(module)
        if tower is None:
            return
        if isinstance(output, Tokens):
            grid = output.grid
        elif isinstance(module, nn.Conv2d) and isinstance(output, Tensor):
            grid = Grid(*output.shape[-2:])
        else:
            return
        self._told.pop(tower, None)
        self._told[tower] = grid

    def of(self, layer: nn.Module, keys: int) -> Grid | None:
        """The grid that the keys of a layer end with; None where it is not certain that they do."""
        for tower, grid in reversed(self._told.items()):
            if any(module is layer for module in tower.modules()):
                return grid if keys - math.prod(grid) in {0, _leading(tower)} else None
        return None


def _leading(tower: nn.Module) -> int:
    """How many special tokens a tower has in front of its patches."""
    return sum(
        parameter.numel() // parameter.shape[-1]
        for name, parameter in tower.named_parameters()
        if name.rpartition(".")[2] in LEADING
    )
