"""What is told of a run while it goes on: to a person, and to the run folder."""

from __future__ import annotations

import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from vitrail.data.batches import Batch, Loader
from vitrail.learn.learner import Learner
from vitrail.learn.state import write_lines

REFRESH = 0.2  # seconds


class Progress:
    """Rate, time left, loss and accuracy, for a person: a line that moves in a terminal, else plain lines."""

    def __init__(self, done: int, steps: int, per_epoch: int, batch: int, *, speaks: bool) -> None:
        self.first, self.steps, self.per_epoch, self.batch = done, steps, per_epoch, batch
        self.speaks = speaks
        self.moves = speaks and sys.stdout.isatty()
        self.began = self.shown = time.monotonic()
        self.waited = 0.0
        self.done, self.figures = done, dict[str, float]()

    def step(self, done: int, figures: dict[str, float], waited: float) -> None:
        """After a step; what it waited for its batch goes into the idle share."""
        self.done, self.figures = done, figures
        self.waited += waited
        now = time.monotonic()
        if self.moves and now - self.shown > REFRESH:
            self.shown = now
            _redraw(self._line(), sys.stdout)

    def _line(self) -> str:
        elapsed = time.monotonic() - self.began
        pace = (self.done - self.first) / elapsed
        return (
            f"epoch {self.done / self.per_epoch:.1f} of {self.steps / self.per_epoch:.4g}  "
            f"step {self.done:,} of {self.steps:,}  {told(self.figures)}  "
            f"{pace * self.batch:,.0f} pictures/s  idle {self.waited / elapsed:.0%}  "
            f"left {clock((self.steps - self.done) / pace)}"
        )

    def validation(self, scores: dict[str, float], better: bool) -> None:
        """After a validation: lines that stay."""
        self.say(f"{self._line()}\n  validation: {told(scores)}{'  (the best so far)' if better else ''}")

    def say(self, text: str) -> None:
        """A line that stays, from the one process that speaks."""
        if self.speaks:
            self.end()
            print(text, flush=True)

    def end(self) -> None:
        """Leaves the moving line."""
        if self.moves:
            _redraw("", sys.stdout)


def ticker(what: str) -> Callable[[int, int], None]:
    """To be called with how many are done, of how many: told on a terminal, in a line that moves and goes."""
    began = shown = time.monotonic()

    def tick(done: int, of: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and (now - shown > REFRESH or done == of):
            shown = now
            rate = done / (now - began)
            left = f"{what} {done:,} of {of:,}  {rate:,.0f}/s  left {clock((of - done) / rate)}"
            _redraw(left if done < of else "", sys.stderr)

    return tick


def followed(loader: Loader, what: str) -> Iterator[Batch]:
    """The batches of a loader, each once, with a ticker."""
    tick, of = ticker(what), len(loader.used)
    for step, batch in enumerate(loader.epoch(), start=1):
        yield batch
        if loader.rank == 0:
            tick(min(step * loader.batch, of), of)


def _redraw(text: str, terminal: TextIO) -> None:
    """The terminal's last line, with another text or none."""
    width = shutil.get_terminal_size().columns - 1
    print(f"\r{text[:width]:<{width}}", end="" if text else "\r", flush=True, file=terminal)


class Journal:
    """The figures of the steps since the last line of metrics, and the file of these lines."""

    def __init__(self, learner: Learner, folder: Path, per_epoch: int, writes: bool) -> None:
        self.learner = learner
        self.folder = folder
        self.per_epoch = per_epoch
        self.writes = writes
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.waited = 0.0
        self.began = time.monotonic()

    def add(self, figures: dict[str, float], waited: float) -> None:
        """The figures of one more step, and how long it waited for its batch."""
        self.steps += 1
        self.waited += waited
        for name, value in figures.items():
            self.sums[name] += value

    def close(self, scores: dict[str, float] | None = None) -> None:
        """Writes the line that is due, if any, and that of a validation."""
        step = self.learner.step
        about = {"step": step, "epoch": round(step / self.per_epoch, 4), "time": round(time.time(), 3)}
        lines: list[dict[str, Any]] = []
        if self.steps:
            elapsed = time.monotonic() - self.began
            means = {name: total / self.steps for name, total in self.sums.items()}
            pace = {"seconds_per_step": elapsed / self.steps, "idle": self.waited / elapsed}
            lines.append({"part": "train", **about, **means, **pace})
        if scores is not None:
            lines.append({"part": "val", **about, **scores})
        if lines and self.writes:
            write_lines(self.folder, lines)
        self._clear()


def told(figures: dict[str, float]) -> str:
    """The figures that a person follows."""
    forms = {"loss": "loss {:.4f}", "accuracy": "accuracy {:.2%}"}
    return "  ".join(form.format(figures[name]) for name, form in forms.items() if name in figures)


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
