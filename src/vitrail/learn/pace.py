"""How fast a run will be, measured before it begins on copies of the real things."""

from __future__ import annotations

import copy
import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vitrail.learn.fit import Batches
from vitrail.learn.learner import Taught, begin, take_step
from vitrail.learn.objectives import Objective
from vitrail.learn.processes import Processes
from vitrail.learn.recipe import Recipe
from vitrail.models import Model

WARM_UP = 3  # steps that compile, allocate, and use up what the loader had ready
LEAST = 4  # steps that are measured,
SECONDS = 2.5  # and for how long at least: the rate of a machine comes and goes
SCHEDULE = 1000  # steps that the copy believes to have before it
CLEARLY = 0.95  # what a later way must take at most of the time of those before, to be worth its rounding

# Kind of device → what "auto" may become.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "cpu": (
        {"precision": "float32", "attention": "fused"},
        {"precision": "bfloat16", "attention": "matmul"},
    ),
    "cuda": (
        {"precision": "float32", "attention": "fused"},
        {"precision": "bfloat16", "attention": "fused"},
    ),
    "mps": ({"precision": "float32", "attention": "fused"},),
}


class Pace(NamedTuple):
    """What one step takes."""

    seconds: float
    memory: int  # bytes, at the most


def pace(model: Model, objective: Objective, batches: Batches, recipe: Recipe, here: Processes) -> Pace:
    """Measured over a few steps of a copy on real batches, loading and augmenting included."""
    alone = replace(here, rank=0, world=1)  # the copies of several processes need not agree
    learner = begin(copy.deepcopy(model), recipe)
    taught = Taught(learner.model, objective)
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(here.device)
    with closing(batches(0)) as stream:

        def step() -> None:
            take_step(taught, learner, next(stream), recipe, SCHEDULE, alone, stop=lambda: False)

        for _ in range(WARM_UP):
            step()
        began, steps = time.monotonic(), 0
        while steps < LEAST or time.monotonic() - began < SECONDS:
            step()
            steps += 1
    return Pace((time.monotonic() - began) / steps, _memory(here.device))


def settle(
    model: Model, objective: Objective, batches: Batches, recipe: Recipe, here: Processes
) -> tuple[Recipe, Pace]:
    """The recipe with "auto" replaced by what was fastest, and the pace that it goes at."""
    ways: list[Recipe] = []
    for way in WAYS[here.device.type]:
        asked = {name: value for name, value in way.items() if getattr(recipe, name) == "auto"}
        if (chosen := replace(recipe, **asked)) not in ways:
            ways.append(chosen)
    best, measured = ways[0], pace(model, objective, batches, ways[0], here)
    for other in ways[1:]:
        faster = pace(model, objective, batches, other, here)
        if faster.seconds < CLEARLY * measured.seconds:
            best, measured = other, faster
    return best, measured


def _memory(device: torch.device) -> int:
    """The most that the device, or else this process, has held so far; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
