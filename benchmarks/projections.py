"""Three linear layers for queries, keys and values against one fused layer: time of forward and backward.

    python benchmarks/projections.py [threads]

Both compute the same attention; runs alternate, medians are compared.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor, nn

from vitrail.attention import MultiHeadAttention, attend


class Fused(nn.Module):
    """One projection to queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.output(attend(q, k, v).transpose(1, 2).flatten(2))


def seconds(layer: nn.Module, x: Tensor, half: bool) -> float:
    """One forward and backward."""
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        y = layer(x)
    y.float().sum().backward()
    return time.perf_counter() - start


def main() -> None:
    """Prints a row for each size and precision."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} threads, medians of 30, forward and backward")
    for width, heads, tokens, batch in ((96, 3, 65, 128), (192, 3, 197, 16), (768, 12, 197, 4)):
        layers = [MultiHeadAttention(width, heads), Fused(width, heads)]
        x = torch.randn(batch, tokens, width)
        for half in (False, True):
            times = [[seconds(layer, x, half) for layer in layers] for _ in range(33)][3:]
            three, one = (statistics.median(column) for column in zip(*times, strict=True))
            print(
                f"width {width:4} tokens {tokens:4} batch {batch:4} {'bfloat16' if half else 'float32':9}"
                f" three {1e3 * three:7.2f} ms  one {1e3 * one:7.2f} ms  ratio {three / one:.3f}"
            )


if __name__ == "__main__":
    main()
