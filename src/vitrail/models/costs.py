"""What a model costs: parameters, multiplications, tokens, and the memory of its attention matrices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.models.registry import build


class Costs(NamedTuple):
    """For one image of the config's image_size."""

    parameters: int
    macs: int  # multiply-adds of one forward
    tokens: int
    attention_bytes: int  # of all attention matrices at once, in float32


def attention_memory(tokens: int, *, layers: int, heads: int, bytes_each: int = 4) -> int:
    """Bytes that the attention matrices of all layers and heads take together, for one example."""
    return tokens**2 * layers * heads * bytes_each


def costs(config: Any, system: str = "vit") -> Costs:
    """Built and run without memory, on torch's meta device."""
    with torch.device("meta"):
        model = build(system, config).eval()
        images = torch.empty(1, config.channels, *config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    tokens = config.special_tokens + math.prod(config.grid)
    return Costs(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=counter.get_total_flops() // 2,
        tokens=tokens,
        attention_bytes=attention_memory(tokens, layers=config.depth, heads=config.heads),
    )
