"""What every system of the house has in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from vitrail.data.preprocess import Preprocess


class Model(nn.Module):
    """A system together with what must travel with its weights.

    config: the frozen dataclass it was built from, as config.json holds it.
    preprocess: turns a picture into what forward expects.
    labels: the names of the classes, in the order of the logits; empty when unknown.
    """

    def __init__(self, config: Any, preprocess: Preprocess, labels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.preprocess = preprocess
        self.labels = labels
