"""Pictures in batches: decoded once while memory lasts, ahead of need, the same whenever asked again."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count, groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment import Augment
from vitrail.data.pictures import PictureError, in_colour, open_picture, picture_size
from vitrail.data.preprocess import INTERPOLATIONS, Preprocess, Sides
from vitrail.data.seeds import mix
from vitrail.data.sources import Pictures

# How much larger than the model's input pictures are kept for training, so that crops stay sharp.
MARGIN = 1.25

AHEAD = 2 * 1024**3  # bytes of finished batches that wait for their turn
PART = 32  # pictures of a batch that a thread reads in one go

# Pixels, and for pictures that cannot be read the reason.
Read = tuple[Tensor, dict[int, str]]


class Batch(NamedTuple):
    """What a model is fed, and which of the pictures that is."""

    images: Tensor  # (batch, channels, height, width), float32
    labels: Tensor  # (batch,)
    index: Tensor  # type: ignore[assignment]  # (batch,); hides the method of tuples


class Store:
    """The pixels of pictures, uint8, decoded when first asked for and kept in memory while they fit.

    exact: keep what `preprocess` makes of a picture. Otherwise keep the whole picture, stretched to one
        shape for all, for `Augment` to crop; `aspect` knows their width to height.
    memory: how many bytes may be kept; pictures beyond are decoded each time.

    coloured: which of the pictures are not grey, of those that were decoded for a model of one channel.
    """

    def __init__(
        self, pictures: Pictures, preprocess: Preprocess, *, exact: bool, memory: int = 2 * 1024**3
    ) -> None:
        self.pictures = pictures
        self.preprocess = preprocess
        self.exact = exact
        self.size = preprocess.size if exact else _whole_size(pictures, preprocess)  # (height, width)
        shape = (len(preprocess.mean), *self.size)
        self.aspect = torch.full((len(pictures),), self.size[1] / self.size[0])  # (pictures,)
        self.kept = torch.zeros(len(pictures), dtype=torch.bool)  # (pictures,)
        self.coloured = torch.zeros(len(pictures), dtype=torch.bool)  # (pictures,)
        ready = self._ready()
        if ready is not None:
            self.pixels, self.kept = ready, ~self.kept
        else:
            room = min(len(pictures), memory // np.prod(shape, dtype=int))
            self.pixels = torch.empty(room, *shape, dtype=torch.uint8)

    def _ready(self) -> Tensor | None:
        """The pictures themselves, (pictures, channels, height, width), if they are an array of this size."""
        items = self.pictures.items
        if not isinstance(items, np.ndarray) or items.dtype != np.uint8 or items.shape[1:3] != self.size:
            return None
        if self.exact and not self.preprocess.keeps(*self.size):
            return None
        array = torch.from_numpy(items.reshape(*items.shape[:3], -1)).permute(0, 3, 1, 2)
        channels = len(self.preprocess.mean)
        return array.expand(-1, channels, -1, -1) if array.shape[1] in (1, channels) else None

    def decode(self, index: int, data: Any) -> Tensor:
        """The pixels (channels, height, width) of the picture of this index, of which `data` is the file."""
        shortest = None if self.exact else max(self.size)
        if self.preprocess.mode == "L":
            data = open_picture(data, shortest=shortest)
            self.coloured[index] = in_colour(data)
        if self.exact:
            pixels = self.preprocess.pixels(data)
        else:
            picture = open_picture(data, shortest=shortest).convert(self.preprocess.mode)
            self.aspect[index] = picture.width / picture.height
            picture = picture.resize(self.size[::-1], INTERPOLATIONS[self.preprocess.interpolation])
            pixels = torch.from_numpy(np.array(picture)).view(*self.size, -1).permute(2, 0, 1)
        if index < len(self.pixels):
            self.pixels[index] = pixels
            self.kept[index] = True
        return pixels

    def get(self, index: int) -> Tensor | str:
        """The pixels of a picture, or the reason why it cannot be read."""
        if self.kept[index]:
            return self.pixels[index]
        try:
            return self.decode(index, self.pictures.data(index))
        except (PictureError, OSError) as error:
            return reason(error)

    def read(self, indices: Tensor) -> Read:
        """The pixels of those that can be read, in order, and for the others the reason why not."""
        if self.kept[indices].all():
            return self.pixels[indices], {}
        numbers = indices.tolist()
        found = [self.get(index) for index in numbers]
        good = [pixels for pixels in found if isinstance(pixels, Tensor)]
        bad = {index: why for index, why in zip(numbers, found, strict=True) if isinstance(why, str)}
        return torch.stack(good) if good else self.pixels[:0], bad


class Loader:
    """Batches of a store's pictures, made ahead of need by threads.

    batch: pictures in a step, over all processes; each of the `world` processes, of which this is
        number `rank`, gets its part of it.
    train: every epoch in another order, whole batches only. Otherwise in the order of the pictures,
        each once; the first process has the first of them, and so on.
    augment: how training pictures are varied, which needs a store that is not exact.
    leave_out: numbers of pictures that are not used.
    workers: threads; by default the cores of this machine, shared by the processes.

    Order and variations depend on seed, epoch and step alone: whoever starts in the middle gets what
    whoever came from the beginning gets. Without train, pictures that cannot be read are not in the
    batches but in `bad`, number → reason.
    """

    def __init__(
        self,
        store: Store,
        *,
        batch: int,
        train: bool = False,
        augment: Augment | None = None,
        seed: int = 0,
        leave_out: Collection[int] = (),
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch % world:
            raise ValueError(f"a batch of {batch} cannot be shared by {world} processes; choose a multiple")
        if store.exact == (augment is not None):
            raise ValueError("augment needs a store with exact=False, and such a store needs augment")
        used = torch.ones(len(store.pictures), dtype=torch.bool)
        used[list(leave_out)] = False
        self.store, self.augment, self.train, self.seed = store, augment, train, seed
        self.used = used.nonzero()[:, 0]
        self.batch, self.share, self.rank, self.world = batch, batch // world, rank, world
        self.workers = workers or max(1, cores() // world)
        pixels = len(store.preprocess.mean) * math.prod(store.preprocess.size)
        self.ahead = max(2, min(self.workers + 1, AHEAD // (4 * self.share * pixels)))  # batches
        self.device = device
        self.bad: dict[int, str] = {}
        if not len(self.used):
            raise ValueError("there are no pictures to make batches of")

    def __len__(self) -> int:
        """Steps in an epoch, of this process."""
        if self.train:
            return max(1, len(self.used) // self.batch)
        return -(-len(self._order(0)) // self.share)

    def epoch(self, epoch: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch."""
        first = epoch * len(self)
        return self._made(range(first, first + len(self)))

    def stream(self, step: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch after another, without end; steps count from the first of epoch 0."""
        return self._made(count(step))

    def _made(self, steps: Iterable[int]) -> Generator[Batch, None, None]:
        """The batches of these steps, some of them ahead of need."""
        # One core for each thread: operations that share theirs wait for each other most of the time.
        pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        wanted = self._wanted(steps)
        jobs: deque[Future[Batch]] = deque()
        try:
            while True:
                for step, index in islice(wanted, self.ahead - len(jobs)):
                    # In parts, so that all threads read where few batches fit into memory.
                    parts = [pool.submit(self.store.read, part) for part in index.split(PART)]
                    jobs.append(pool.submit(self._make, step, index, parts))
                if not jobs:
                    return
                yield jobs.popleft().result()
        finally:  # the consumer may leave before the end
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(torch.get_num_threads())  # later threads take what was set last

    def _wanted(self, steps: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Each step with the numbers of its pictures."""
        per_epoch = len(self)
        for epoch, of_epoch in groupby(steps, lambda step: step // per_epoch):
            batches = self._order(epoch).split(self.share)
            yield from ((step, batches[step % per_epoch]) for step in of_epoch)

    def _order(self, epoch: int) -> Tensor:
        """Which pictures this process uses in an epoch, one batch after another."""
        count = len(self.used)
        if not self.train:
            return self.used[self.rank * count // self.world : (self.rank + 1) * count // self.world]
        shuffled = self.used[torch.randperm(count, generator=_generator(self.seed, "order", epoch))]
        shuffled = shuffled.repeat(-(-self.batch // count))  # too few for a batch: some come again
        whole = shuffled[: len(self) * self.batch].view(len(self), self.world, self.share)
        return whole[:, self.rank].flatten()

    def _make(self, step: int, index: Tensor, parts: Sequence[Future[Read]]) -> Batch:
        read = [part.result() for part in parts]
        pixels = torch.cat([pixels for pixels, _ in read])
        bad = {i: why for _, of_part in read for i, why in of_part.items()}
        if bad:
            if self.train:
                name, why = next((self.store.pictures.names[i], why) for i, why in bad.items())
                raise PictureError(f"{name} cannot be read: {why}", why)
            self.bad |= bad
            index = index[[i not in bad for i in index.tolist()]]
        pixels = pixels.to(self.device)
        if self.augment:
            generator = _generator(self.seed, "augment", step)
            draws = self.augment.draw(self.batch, generator).view(self.world, self.share, -1)[self.rank]
            size, aspect = self.store.preprocess.size, self.store.aspect[index]
            pixels = self.augment(pixels, draws, size, aspect)
        images = self.store.preprocess.normalise(pixels)
        return Batch(images, self.store.pictures.labels[index].to(self.device), index)


def reason(error: PictureError | OSError) -> str:
    """Why a picture cannot be read."""
    return error.reason if isinstance(error, PictureError) else error.strerror or str(error)


def cores() -> int:
    """How many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(mix(*parts))


def _whole_size(pictures: Pictures, preprocess: Preprocess) -> Sides:
    """What whole pictures are stretched to: their mean (height, width), as far as a crop has use of it."""
    sizes = []
    for index in np.linspace(0, len(pictures) - 1, min(64, len(pictures)), dtype=int).tolist():
        with suppress(PictureError, OSError):
            sizes.append(picture_size(pictures.data(index)))
    most = (round(MARGIN * preprocess.size[0]), round(MARGIN * preprocess.size[1]))
    height, width = (round(side) for side in np.mean(sizes or [most], axis=0))
    return min(height, most[0]), min(width, most[1])
