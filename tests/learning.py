"""A run small enough for a test: real digits, a ViT of a few thousand parameters, a state after every step.

As a program: `python learning.py FOLDER [field=value …]` begins or goes on with the run in a folder;
`python learning.py FOLDER kill FROM TO EACH` kills it at each of those file operations, and goes on.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail import create
from vitrail.data.seeds import mix
from vitrail.learn.fit import fit
from vitrail.learn.learner import Learner, begin, from_state, validate
from vitrail.learn.objectives import Objective, classify, mix_pairs
from vitrail.learn.processes import Processes, agreed, processes
from vitrail.learn.recipe import Recipe, changes, layered
from vitrail.learn.state import locked, read_state, write_model

ALONE = Processes(0, 1, torch.device("cpu"))
STEPS, PER_EPOCH, BATCH = 6, 2, 16

SMALL = {
    "batch": BATCH,
    "lr": 3e-3,
    "precision": "float32",
    "save_seconds": 0,
    "ema": 0.9,
    "mixup": 0.2,
    "cutmix": 1.0,
    "warmup": 0.2,
}
MODEL = {"name": "vit-ti/4", "width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "stem": "conv"}


class Digits(NamedTuple):
    """A batch, without what objectives do not need."""

    images: Tensor
    labels: Tensor


@functools.cache
def digits() -> Digits:
    """The first hundred, (100, 1, 8, 8) from -1 to 1."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images[:100], dtype=torch.float32)[:, None] / 8 - 1
    return Digits(images, torch.tensor(found.target[:100]))


def recipe(**given: Any) -> Recipe:
    """The small run, with changes."""
    return layered(SMALL, {"model": MODEL}, given)


def tiny(recipe: Recipe) -> Any:
    """The model of the run, the same every time."""
    torch.manual_seed(0)
    return create(**{"classes": 10, "image_size": 8, "channels": 1, **recipe.model})


def batches(recipe: Recipe, here: Processes = ALONE) -> Callable[[int], Generator[Any, None, None]]:
    """As fit takes them: each step draws its part of the pictures and of the mixing."""

    def from_step(step: int) -> Generator[Any, None, None]:
        everything = digits()
        while True:
            generator = torch.Generator().manual_seed(mix(recipe.seed, step, "order"))
            rows = torch.randperm(100, generator=generator)[: recipe.batch].view(here.world, -1)[here.rank]
            batch = Digits(*(field[rows] for field in everything))
            yield mix_pairs(
                batch,
                mix(recipe.seed, step, "mix"),
                mixup=recipe.mixup,
                cutmix=recipe.cutmix,
                rank=here.rank,
                world=here.world,
            )
            step += 1

    return from_step


def run(
    folder: Path,
    recipe: Recipe,
    *,
    here: Processes = ALONE,
    objective: Objective | None = None,
    model: Any = None,
    steps: int = STEPS,
    scores: Iterable[float] | None = None,
) -> Learner:
    """Begins the run in a folder, or goes on with it. scores: what validations are made to find."""
    objective = objective or classify(smoothing=recipe.smoothing)
    learner = begin(model or tiny(recipe), recipe)
    share = torch.arange(100)[here.rank :: here.world]
    held = [Digits(*(field[share] for field in digits()))]
    found = None if scores is None else iter(scores)

    def judge(model: nn.Module) -> dict[str, float]:
        measured = validate(model, objective, held, recipe, here)
        return measured if found is None else {**measured, "accuracy": next(found)}

    with locked(folder) if here.first else nullcontext():
        state = agreed(read_state(folder) if here.first else None, here)
        if state is not None:
            from_state(learner, state)
        fit(
            learner,
            objective,
            batches(recipe, here),
            judge,
            recipe,
            state,
            lambda model, kind: write_model(model, folder / kind),
            steps=steps,
            per_epoch=PER_EPOCH,
            period=PER_EPOCH,
            folder=folder,
            here=here,
        )
    return learner


def killed_at(operation: int, folder: Path, recipe: Recipe) -> bool:
    """Whether a run in a process of its own came to that file operation, where SIGKILL ends it."""
    child = os.fork()
    if child == 0:
        done = 0

        def counted(what: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal done
                done += 1
                if done == operation:
                    os.kill(os.getpid(), signal.SIGKILL)
                return what(*arguments, **options)

            return call

        for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        run(folder, recipe)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(folder: Path, *words: str) -> None:
    torch.set_num_threads(1)
    if words[:1] == ("kill",):
        digits()
        for operation in range(*map(int, words[1:])):
            place = folder / str(operation)
            assert killed_at(operation, place, recipe()), f"the run is over before operation {operation}"
            run(place, recipe())
        return
    with processes() as here:
        run(folder, recipe(**changes(words)), here=here)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
