"""What moves the weights: groups of parameters, the rate over time, averages, and what stays frozen."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Part = Literal["full", "head"] | int


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that a model repeats: what its longest ModuleList holds."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def depths(model: nn.Module) -> dict[str, int]:
    """Parameter → layer: 0 before the first block, then the blocks, then one for all that follows."""
    block_of = {
        parameter: layer
        for layer, block in enumerate(blocks_of(model), start=1)
        for parameter in block.parameters()
    }
    after = len(blocks_of(model)) + 1
    reached, layers = 0, {}
    for name, parameter in model.named_parameters():  # in the order in which the model was put together
        if parameter in block_of:
            reached = after
        layers[name] = block_of.get(parameter, reached)
    return layers


def groups(model: nn.Module, *, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Parameters that learn, in groups for AdamW with names, weight_decay, and a `scale` of the rate.

    Only what multiplies decays: matrices and filters called weight; no norm, bias, gain, token or
    position. Each layer learns layer_decay times as fast as the one after it (Clark et al. 2020).
    """
    layers = depths(model)
    top = max(layers.values(), default=0)
    grouped: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1 and name.rpartition(".")[2] == "weight"
        decay, scale = weight_decay if decays else 0.0, layer_decay ** (top - layers[name])
        group = grouped.setdefault(
            (decay, scale), {"names": [], "params": [], "weight_decay": decay, "scale": scale}
        )
        group["names"].append(name)
        group["params"].append(parameter)
    return list(grouped.values())


def adamw(parameter_groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW in one fused kernel for all parameters; its rate is set anew at every step."""
    return torch.optim.AdamW(parameter_groups, lr=0.0, betas=betas, fused=True)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """The same rate for all groups, each by its scale."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["scale"]


def schedule(step: int, steps: int, *, warmup: int, floor: float = 0.0) -> float:
    """The factor on the rate at a step: rises in a line over `warmup` steps, then falls by a half cosine.

    The first step already moves (1 / warmup); the last would be followed by `floor`.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Moves an average of the weights towards them; young averages move faster, to forget the start.

    Running statistics are averaged too; counters are copied.
    """
    decay = min(decay, (1 + step) / (10 + step))
    pairs = list(zip(average.state_dict().values(), model.state_dict().values(), strict=True))
    floating = [(mean, now) for mean, now in pairs if mean.is_floating_point()]
    means, nows = zip(*floating, strict=True)
    torch._foreach_lerp_(means, nows, 1 - decay)
    for mean, now in pairs:
        if not mean.is_floating_point():
            mean.copy_(now)


def freeze(model: nn.Module, part: Part) -> None:
    """Leaves only a part to learn: "full", "head" (children named …head), or the last N blocks and after."""
    if part == "full":
        return
    layers = depths(model)
    heads = tuple(f"{name}." for name, _ in model.named_children() if name.endswith("head"))
    if part == "head" and not heads:
        raise ValueError(f"{type(model).__name__} has no head that could learn alone; train the 'full' model")
    first = len(blocks_of(model)) + 1 - part if isinstance(part, int) else None
    for name, parameter in model.named_parameters():
        learns = name.startswith(heads) if first is None else layers[name] >= max(first, 1)
        parameter.requires_grad_(learns)


def set_training(model: nn.Module) -> None:
    """Training mode, but for the parts that are frozen: they drop nothing and keep their statistics."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def checkpoint_blocks(model: nn.Module) -> None:
    """Has every block forget its insides and compute them again on the way back: less memory, more time."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
