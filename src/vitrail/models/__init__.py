"""One file per system, and the table that names them."""

from vitrail.models.base import Model
from vitrail.models.costs import Costs, attention_memory, costs
from vitrail.models.registry import SYSTEMS, TABLE, build, config_of, create, describe, names
from vitrail.models.vit import ViT, ViTConfig

__all__ = [
    "SYSTEMS",
    "TABLE",
    "Costs",
    "Model",
    "ViT",
    "ViTConfig",
    "attention_memory",
    "build",
    "config_of",
    "costs",
    "create",
    "describe",
    "names",
]
