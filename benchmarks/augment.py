"""Training pictures varied by ours, kornia and torchvision: crop, flip, RandAugment, random erasing.

    PYTHONPATH=tests python benchmarks/augment.py [threads]

Ours varies a batch at once, every picture in its own way; so does kornia, but that RandAugment chooses its
operations for the whole batch, and fails on greyscale. torchvision does it picture by picture. Runs
alternate, the best of each counts.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from judges import torchvision
from vitrail.data.augment import Augment

Vary = Callable[[Tensor], Tensor]


def rivals(side: int, *, all_of_it: bool) -> dict[str, Vary]:
    """Name → from uint8 pictures to varied ones of this side; crops and flips only, or everything."""
    import kornia.augmentation as kornia
    from kornia.augmentation.auto import RandAugment
    from torchvision.transforms import v2

    settings = Augment() if all_of_it else Augment(layers=0, erase=0)
    generator = torch.Generator().manual_seed(0)
    size = (side, side)
    steps = [kornia.RandomResizedCrop(size, scale=(0.35, 1)), kornia.RandomHorizontalFlip()]
    theirs = [v2.RandomResizedCrop(size, scale=(0.35, 1), antialias=False), v2.RandomHorizontalFlip()]
    if all_of_it:
        steps += [RandAugment(n=2, m=9), kornia.RandomErasing(p=0.25)]
        theirs += [v2.RandAugment(2, 9), v2.RandomErasing(0.25)]
    batchwise = nn.Sequential(*steps)
    one_by_one = v2.Compose([*theirs, v2.ToDtype(torch.float32, scale=True)])
    return {
        "ours": lambda x: settings(x, settings.draw(len(x), generator), size, torch.ones(len(x))),
        "kornia": lambda x: batchwise(x / 255),
        "torchvision": lambda x: torch.stack([one_by_one(picture) for picture in x]),
    }


def main() -> None:
    """Prints pictures per second."""
    warnings.simplefilter("ignore")
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {threads} threads, pictures/s")
    for batch, channels, kept, side in ((128, 3, 32, 32), (128, 1, 28, 28), (64, 3, 280, 224)):
        pixels = torch.randint(0, 256, (batch, channels, kept, kept), dtype=torch.uint8)
        for all_of_it in (False, True):
            ways = rivals(side, all_of_it=all_of_it)
            if all_of_it and channels == 1:
                del ways["kornia"]
            best: dict[str, float] = {}
            for _ in range(8):
                for name, vary in ways.items():
                    start = time.perf_counter()
                    vary(pixels)
                    best[name] = max(best.get(name, 0), batch / (time.perf_counter() - start))
            what = "everything" if all_of_it else "crop, flip"
            print(
                f"{batch} x {channels} x {side} x {side}  {what}  "
                + "  ".join(f"{name} {rate:>7,.0f}" for name, rate in best.items())
            )


if __name__ == "__main__":
    main()
