"""The attention backends beside each other, forward and with the way back, where models of pictures use them.

python benchmarks/backends.py
"""

from __future__ import annotations

import statistics
import time

import torch

from vitrail.attention import attend, backend

NAMES = ("fused", "matmul", "explicit")
REPEATS = 7
SHAPES = {  # batch, heads, tokens, width of a head
    "ViT-Ti/4 at 32": (128, 3, 64, 64),
    "windows of 7x7": (512, 3, 49, 32),
    "ViT-Ti/16 at 224": (32, 3, 197, 64),
    "ViT-B/16 at 224": (8, 12, 197, 64),
    "ViT-B/16 at 384": (4, 12, 577, 64),
    "ViT-B/16 at 512": (2, 12, 1025, 64),
}


def measure(name: str, shape: tuple[int, ...], dtype: torch.dtype, *, back: bool) -> float:
    """Milliseconds, the median."""
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=back) for _ in range(3))
    taken = []
    with backend(name):
        for _ in range(REPEATS + 2):
            began = time.perf_counter()
            y = attend(q, k, v)
            if back:
                y.backward(torch.ones_like(y))
            taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken[2:])


def main() -> None:
    """A line for each shape, precision and direction."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; milliseconds, medians of {REPEATS}")
    print(f"{'':<20}{'':<10}{'':<18}" + "".join(f"{name:>10}" for name in NAMES) + f"{'matmul/fused':>15}")
    for what, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for back in (False, True):
                taken = {name: measure(name, shape, dtype, back=back) for name in NAMES}
                print(
                    f"{what:<20}{str(dtype)[6:]:<10}{'forward, backward' if back else 'forward':<18}"
                    + "".join(f"{taken[name]:>10.2f}" for name in NAMES)
                    + f"{taken['matmul'] / taken['fused']:>15.2f}"
                )


if __name__ == "__main__":
    main()
