"""A plain ViT of timm or of vit-pytorch, trained from scratch on a folder of photos against the clock.

    python benchmarks/peers_from_scratch.py PHOTOS MINUTES timm|vit-pytorch

The other side is `vitrail train PHOTOS minutes=MINUTES test=0`. Patches of 16 at 96x96 and width 192 as
there, and a depth of 9, which costs as much as its convolutional stem and 3 blocks (157 and 166 MMACs).
Either peer gets what that has, from timm: its loader with resized crops and one operation of RandAugment,
smoothing, AdamW, warm-up and a cosine by the clock, averaged weights, bfloat16. Needs timm and vit-pytorch.
"""

from __future__ import annotations

import math
import sys
import time
from itertools import chain, count
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from judges import timm

SIDE, DEPTH, WIDTH, HEADS = 96, 9, 192, 3
BATCH, RATE, WARM_UP, DECAY, SMOOTHING, EMA = 128, 1e-3, 0.05, 0.05, 0.1, 0.99


def build(peer: str, classes: int) -> torch.nn.Module:
    """The plain ViT of a peer."""
    if peer == "timm":
        return timm.models.VisionTransformer(
            img_size=SIDE, patch_size=16, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=classes
        )
    from vit_pytorch import ViT

    return ViT(
        image_size=SIDE,
        patch_size=16,
        dim=WIDTH,
        depth=DEPTH,
        heads=HEADS,
        dim_head=WIDTH // HEADS,
        mlp_dim=4 * WIDTH,
        num_classes=classes,
    )


def main(photos: str, minutes: str, peer: str) -> None:
    """Prints the accuracy on the pictures for validation at the end, and the rate."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    folders = {part: next(Path(photos).glob(f"{part}*")) for part in ("train", "val")}
    train, val = (timm.data.create_dataset("", root=str(folder)) for folder in folders.values())
    classes = len(train.reader.class_to_idx)
    common = {"input_size": (3, SIDE, SIDE), "batch_size": BATCH, "use_prefetcher": False, "num_workers": 2}
    batches = timm.data.create_loader(
        train,
        **common,
        is_training=True,
        auto_augment="rand-m9-n1-inc1",
        scale=(0.35, 1.0),
        persistent_workers=True,
    )
    judged = timm.data.create_loader(val, **common, crop_pct=1.0)
    model = build(peer, classes)
    average = timm.utils.ModelEmaV3(model, decay=EMA)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    print(
        f"{peer}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} pictures",
        flush=True,
    )

    began, seen = time.monotonic(), 0
    endless = chain.from_iterable(batches for _ in count())
    while (part := (time.monotonic() - began) / (60 * float(minutes))) < 1:
        images, labels = next(endless)
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(part / WARM_UP, 1.0) * 0.5 * (1 + math.cos(math.pi * part))
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels, label_smoothing=SMOOTHING)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average.update(model)
        seen += len(images)
    took = time.monotonic() - began
    average.eval()
    right = 0
    with torch.inference_mode():
        for images, labels in judged:
            right += int((average(images).argmax(-1) == labels).sum())
    print(
        f"{peer}: {right / len(val):.2%} of {len(val)} after {took:.0f} s, {seen / len(train):.1f} epochs, "
        f"{seen / took:.0f} pictures/s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
