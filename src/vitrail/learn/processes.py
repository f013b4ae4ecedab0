"""One run in several processes, as torchrun starts them: the same global batch, the same run folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitrail.models.block import DropPath
from vitrail.words import unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Which of how many this is, and where it computes. Alone: 0 of 1."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0


@contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """Joins those that torchrun started (gloo on the CPU, nccl on GPUs); alone without torchrun.

    device: one of DEVICES; auto is CUDA where there is one, else the CPU.
    """
    rank, world, local = (int(os.environ.get(name, default)) for name, default in PLACES)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind not in DEVICES:
        raise ValueError(unknown("device", device, DEVICES))
    if kind != "cpu" and not getattr(torch, kind).is_available():
        raise ValueError(f"device={device} is not there for torch on this machine; leave it out, or say cpu")
    place = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world == 1:
        yield Processes(0, 1, place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(rank, world, place)
        dist.barrier()  # gloo aborts a process that leaves while another is still talking to it
    finally:
        gc.collect()  # what still holds the group would end it when the interpreter is half gone, and abort
        dist.destroy_process_group()


DEVICES = ("auto", "cpu", "cuda", "mps")
PLACES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def together(module: nn.Module, here: Processes) -> nn.Module:
    """The module, its gradients averaged over all processes after every backward."""
    if here.world == 1:
        return module
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.forward = partial(shared_batch_norm, part)  # type: ignore[method-assign]
        elif isinstance(part, DropPath | nn.Dropout):
            part.forward = partial(shared_draw, part, here)  # type: ignore[method-assign]
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def shared_draw(part: nn.Module, here: Processes, x: Tensor) -> Tensor:
    """What chance leaves of x (batch, …): drawn alike everywhere, for the batches of all processes."""
    if not part.training:
        return x
    of_one = (1,) * (x.ndim - 1) if isinstance(part, DropPath) else x.shape[1:]
    drawn = type(part).forward(part, x.new_ones(len(x) * here.world, *of_one))
    return x * drawn.tensor_split(here.world)[here.rank]


def shared_batch_norm(norm: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    """Batch norm over the batches of all processes, as one process would compute it: (batch, channels, …).

    torch's own SyncBatchNorm knows no CPU.
    """
    if not norm.training:
        return type(norm).forward(norm, x)
    over = [axis for axis in range(x.ndim) if axis != 1]
    precise = x.float()
    mean = _mean(precise.mean(over, keepdim=True))
    variance = _mean((precise - mean).square().mean(over, keepdim=True))
    count = x.numel() // x.shape[1] * dist.get_world_size()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    with torch.no_grad():
        norm.running_mean.lerp_(mean.flatten(), norm.momentum)
        norm.running_var.lerp_(variance.flatten() * count / (count - 1), norm.momentum)
        norm.num_batches_tracked.add_(1)
    y = (precise - mean) * (variance + norm.eps).rsqrt()
    if norm.affine:
        shape = mean.shape
        y = y * norm.weight.view(shape) + norm.bias.view(shape)
    return y.to(x.dtype)


class _Sum(torch.autograd.Function):
    """Over the processes; every process's result depends on every process's values."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


def _mean(values: Tensor) -> Tensor:
    return _Sum.apply(values) / dist.get_world_size()


def summed(values: Tensor, here: Processes) -> Tensor:
    """The sum over all processes, in place."""
    if here.world > 1:
        dist.all_reduce(values)
    return values


def agreed(value: T, here: Processes) -> T:
    """What the first process has, in all of them."""
    values = [value]
    if here.world > 1:
        dist.broadcast_object_list(values, device=here.device)
    return values[0]


def gathered(value: T, here: Processes) -> list[T]:
    """What each process has, in all of them, in the order of their ranks."""
    values: list[T] = [value] * here.world
    if here.world > 1:
        dist.all_gather_object(values, value)
    return values
