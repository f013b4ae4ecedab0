"""The forms of weights that are read and written."""

from vitrail.weights import jax, native, timm, torchvision, transformers
from vitrail.weights.adapter import Adapter

# Asked in this order which of them a checkpoint is.
FORMS: dict[str, Adapter] = {
    "vitrail": native.ADAPTER,
    "transformers": transformers.ADAPTER,
    "timm": timm.ADAPTER,
    "torchvision": torchvision.ADAPTER,
    "npz": jax.ADAPTER,
}
