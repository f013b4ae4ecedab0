"""How near two answers are, and how to show that a comparison can fail."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

# Torch hands the linker its own folder as it is.
with_inductor = pytest.mark.skipif(
    " " in torch.__file__, reason="torch does not compile from a path with a space"
)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value of theirs; shapes must be the same."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    assert theirs.isfinite().all()
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit."""
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@contextmanager
def disturbed(parameter: Tensor) -> Iterator[None]:
    """One entry of a weight is another while this lasts: what was equal before must now differ."""
    entry = parameter.detach().view(-1)[:1]
    before = entry.clone()
    with torch.no_grad():
        entry.add_(0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            entry.copy_(before)


def randomise(module: nn.Module) -> None:
    """Weights of ordinary size everywhere: fresh ones are often zeros or ones, which hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
