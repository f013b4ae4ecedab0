"""A small model of ours."""

from typing import Any

import vitrail
from compare import randomise
from vitrail.models import Model

TINY: dict[str, Any] = {
    "width": 48,
    "depth": 2,
    "heads": 3,
    "mlp_width": 96,
    "image_size": (32, 32),
    "classes": 5,
}


def tiny(**changes: Any) -> Model:
    """A model with weights of ordinary size everywhere."""
    model = vitrail.create("vit-ti/8", **TINY | changes)
    randomise(model)
    return model.eval()
