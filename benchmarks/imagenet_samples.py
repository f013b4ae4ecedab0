"""A real checkpoint on real photos, against timm: the same predictions, and no bit lost on a round trip.

    python benchmarks/imagenet_samples.py MODEL PHOTOS

MODEL: a folder as timm's hub serves it. PHOTOS: a folder of n01440764_tench.JPEG and the like, where
the place of a WordNet id among all 1000, sorted, is the class; with fewer ids than classes, they are
taken to be evenly spread. Needs the extra `peers`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

import vitrail

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from judges import timm

CHAIN = ("vitrail", "transformers", "npz", "timm", "torchvision", "vitrail")


def main(folder: str, photos: str) -> None:
    """Prints accuracy of both, how many predictions are equal, and what each conversion changed."""
    torch.set_num_threads(2)
    ours = vitrail.load(folder)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(
        **timm.data.resolve_data_config({}, model=theirs), is_training=False
    )
    files = sorted(Path(photos).glob("*.JPEG"))
    ids = sorted({file.name.split("_")[0] for file in files})
    spread = ours.config.classes // len(ids)
    print(f"torch {torch.__version__}, timm {timm.__version__}, {len(files)} photos, 2 threads")

    right = [0, 0]
    equal = pixels = 0
    apart = 0.0
    start = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(files), 50):
            batch = files[first : first + 50]
            one = torch.stack([ours.preprocess(file) for file in batch])
            other = torch.stack([transform(Image.open(file).convert("RGB")) for file in batch])
            pixels += sum(a.equal(b) for a, b in zip(one, other, strict=True))
            answers = ours(one), theirs(other)
            apart = max(apart, ((answers[0] - answers[1]).abs().max() / answers[1].abs().max()).item())
            said = [answer.argmax(-1) for answer in answers]
            truth = torch.tensor([spread * ids.index(file.name.split("_")[0]) for file in batch])
            right = [count + int((guess == truth).sum()) for count, guess in zip(right, said, strict=True)]
            equal += int((said[0] == said[1]).sum())
    total = len(files)
    print(f"pixels equal bit for bit: {pixels} of {total}")
    print(f"predictions equal: {equal} of {total}; logits at most {apart:.1e} apart, relative")
    print(f"top-1: vitrail {right[0] / total:.1%}, timm {right[1] / total:.1%}")
    print(f"{time.perf_counter() - start:.0f} s")

    with tempfile.TemporaryDirectory() as space:
        source, images = folder, one[:8]
        with torch.inference_mode():
            expected = ours(images)
        state = ours.state_dict()
        for number, form in enumerate(CHAIN):
            target = Path(space) / f"{number}"
            target = target.with_suffix({"npz": ".npz", "torchvision": ".pth"}.get(form, ""))
            vitrail.weights.convert(source, target, to=form)
            back = vitrail.load(target)
            with torch.inference_mode():
                same = expected.equal(back(images))
            tensors = sum(tensor.equal(state[name]) for name, tensor in back.state_dict().items())
            kept = back.preprocess == ours.preprocess
            print(f"→ {form:<13}{tensors} of {len(state)} tensors, logits {same}, preprocessing {kept}")
            source = str(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
