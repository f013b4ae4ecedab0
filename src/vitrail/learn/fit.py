"""The loop: steps, validations, and the moments at which all is kept."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.learn.learner import DivergedError, Learner, Taught, take_step, to_state
from vitrail.learn.objectives import Objective
from vitrail.learn.processes import Processes, together
from vitrail.learn.progress import Journal, Progress
from vitrail.learn.recipe import Recipe
from vitrail.learn.state import State, rewind, write_state

EVERY = 50  # steps between lines of metrics, besides those of a validation or a state

Batches = Callable[[int], Generator[Any, None, None]]  # from a step on: the batches that follow
Validate = Callable[[nn.Module], dict[str, float]]
Keep = Callable[[Any, str], None]  # writes a model under a name: "last" or "best"


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and has kept its state."""


def fit(
    learner: Learner,
    objective: Objective,
    batches: Batches,
    validate: Validate,
    recipe: Recipe,
    state: State | None,
    keep: Keep,
    *,
    steps: int,
    per_epoch: int,
    period: int,
    folder: Path,
    here: Processes,
) -> None:
    """Takes the learner through all steps that it has not done. state: where it goes on from, if it does.

    It is validated after every `period` steps, and the state is kept every `save_seconds`; both at the
    end. Raises Stopped when a signal came (the state is kept), DivergedError when the loss is no number
    (the state from before stays).
    """
    facts = {"threads": torch.get_num_threads(), "processes": here.world, "device": here.device.type}
    if here.first:
        rewind(folder, learner.step)
    taught = together(Taught(learner.model, objective), here)
    progress = Progress(learner.step, steps, per_epoch, recipe.batch, speaks=here.first)
    if state is not None:
        progress.say(_resumed(state, steps, facts))
        if here.first:
            keep(learner.result, "last")  # it may be what a crash has spoiled
    journal = Journal(learner, folder, per_epoch, here.first)
    saved = began = time.monotonic()
    spent = learner.seconds
    with _signals() as stop, closing(batches(learner.step)) as stream:
        if state is None and here.first:
            write_state(folder, to_state(learner, facts))
        while learner.step < steps:
            asked = time.monotonic()
            batch = next(stream)
            waited = time.monotonic() - asked
            try:
                figures = take_step(taught, learner, batch, recipe, steps, here, stop.is_set)
            except DivergedError as error:
                raise DivergedError(
                    f"{error}. The newest state in {folder} is from before and whole. Go on from it more "
                    f"gently: --resume --out {folder} with a smaller rate (lr={recipe.lr / 3:.1g})"
                    + (" or precision=float32" if recipe.precision == "bfloat16" else "")
                ) from None
            stopped = figures.pop("stop") > 0
            learner.seconds = spent + time.monotonic() - began
            journal.add(figures, waited)
            progress.step(learner.step, figures, waited)
            done = learner.step == steps
            if learner.step % period == 0 or done:
                scores = validate(learner.result)
                better = learner.best is None or _rank(scores) > _rank(learner.best)
                if better:
                    learner.best = {"step": learner.step, **scores}
                journal.close(scores)
                progress.validation(scores, better)
                if better and here.first:
                    keep(learner.result, "best")
            elif learner.step % EVERY == 0:
                journal.close()
            due = time.monotonic() - saved >= recipe.save_seconds
            if here.first and (done or stopped or due):
                journal.close()
                keep(learner.result, "last")
                write_state(folder, to_state(learner, facts))
                saved = time.monotonic()
            if stopped and not done:
                progress.end()
                raise Stopped(
                    f"stopped after step {learner.step} of {steps}, all of it kept. Go on with:\n"
                    f"  vitrail train --resume --out {shlex.quote(folder.as_posix())}"
                )
    progress.end()


def _resumed(state: State, steps: int, facts: dict[str, Any]) -> str:
    """From where it goes on, and whether that is exactly as if it had never stopped."""
    other = [
        f"{name} was {state.facts[name]}, is {now}" for name, now in facts.items() if state.facts[name] != now
    ]
    rounding = f"; sums round differently now, as {', '.join(other)}" if other else ""
    return f"going on after step {state.facts['step']:,} of {steps:,}{rounding}"


def _rank(scores: dict[str, float]) -> tuple[float, float]:
    """What makes one validation better than another."""
    return scores.get("accuracy", 0.0), -scores["loss"]


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM, so that a step is finished and kept; a second one ends at once."""
    asked = threading.Event()

    def ask(number: int, _: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread is told of signals
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
