"""Batches hold what they should, once, and the same whenever and wherever they are made again."""

import io
import os
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.augment import Augment
from vitrail.data.batches import Batch, Loader, Store
from vitrail.data.pictures import PictureError
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import Pictures, open_source

SMALL = Preprocess(resize=9, crop=(8, 8), interpolation="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
PLAIN = Preprocess(resize=(8, 8), interpolation="bilinear", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
GREY = Preprocess(resize=(8, 8), interpolation="bicubic", mean=(0.5,), std=(0.25,))


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pictures_of(items, read=lambda item: item):
    names = [f"picture {i}" for i in range(len(items))]
    labels = torch.arange(len(items)) % 3
    return Pictures(items, names, labels, ("a", "b", "c"), read)


def encoded(array, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


def varied(count, memory=2**30):
    """A store of so many pictures of different sizes, for training."""
    pictures = pictures_of([encoded(noise(10 + i % 5, 14 - i % 4, 3, seed=i)) for i in range(count)])
    return Store(pictures, SMALL, exact=False, memory=memory)


def trained_on(store, **options):
    return Loader(store, **{"batch": 4, "train": True, "augment": Augment(), "workers": 2} | options)


def same(ours, others):
    ours, others = list(ours), list(others)
    assert len(ours) == len(others) > 0
    for one, other in zip(ours, others, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(mine, theirs)


# Evaluation


@pytest.mark.parametrize("memory", [0, 5 * 8 * 8 * 3, 2**30])
@pytest.mark.parametrize(
    "preprocess",
    [
        SMALL,
        GREY,
        Preprocess(
            resize=(7, 5),
            interpolation="lanczos",
            mean=(0.1, 0.2, 0.3),
            std=(0.3, 0.2, 0.1),
            fit="contain",
            crop=(7, 7),
        ),
    ],
)
def test_pixels_are_those_of_the_preprocessing(shared, preprocess, memory):
    found = open_source(shared / "data" / "clothing").splits["val"]
    pictures = found.select(torch.arange(0, len(found), 30))
    loader = Loader(Store(pictures, preprocess, exact=True, memory=memory), batch=5)
    for _ in range(2):  # decoded, then kept
        batches = list(loader.epoch())
        assert [len(batch.images) for batch in batches] == [5, 5, len(pictures) - 10]
        images = torch.cat([batch.images for batch in batches])
        assert torch.equal(images, torch.stack([preprocess(name) for name in pictures.names]))
        assert torch.equal(torch.cat([batch.labels for batch in batches]), pictures.labels)
        assert torch.equal(torch.cat([batch.index for batch in batches]), torch.arange(len(pictures)))


@pytest.mark.parametrize("shape", [(6, 8, 8), (6, 8, 8, 1), (6, 8, 8, 3), (6, 9, 7, 3), (6, 9, 9)])
@pytest.mark.parametrize("preprocess", [SMALL, GREY, PLAIN])
def test_pixels_of_arrays_are_those_of_the_preprocessing(shape, preprocess):
    array = noise(*shape)
    batch = next(Loader(Store(pictures_of(array), preprocess, exact=True), batch=6).epoch())
    assert torch.equal(batch.images, torch.stack([preprocess(picture) for picture in array]))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.sets(st.integers(0, 39)))
def test_each_picture_once_over_all_processes_in_order(count, world, share, leave_out):
    leave_out = [index for index in leave_out if index < count]
    kept = [index for index in range(count) if index not in leave_out]
    store = Store(pictures_of(noise(count, 8, 8)), GREY, exact=True)
    if not kept:
        with pytest.raises(ValueError, match="no pictures to make batches of"):
            Loader(store, batch=4, leave_out=leave_out)
        return
    seen = []
    for rank in range(world):
        loader = Loader(store, batch=share * world, rank=rank, world=world, leave_out=leave_out)
        batches = list(loader.epoch())
        assert len(batches) == len(loader)
        assert all(len(batch.index) == share for batch in batches[:-1])
        seen += [index for batch in batches for index in batch.index.tolist()]
    assert seen == kept


def test_bad_pictures_are_named_and_left_out_of_evaluation():
    good = [encoded(noise(9, 9, 3, seed=i)) for i in range(5)]
    items = [good[0], b"text", good[1], good[2], good[3][:60], b""]
    loader = Loader(Store(pictures_of(items), SMALL, exact=True), batch=4)
    first, second = loader.epoch()
    assert first.index.tolist() == [0, 2, 3]
    assert first.labels.tolist() == [0, 2, 0]
    assert torch.equal(first.images[1], SMALL(good[1]))
    assert second.images.shape == (0, 3, 8, 8)
    assert loader.bad.keys() == {1, 4, 5}
    assert loader.bad[5] == "it is empty (0 bytes)"


def test_bad_pictures_stop_training():
    store = Store(pictures_of([encoded(noise(9, 9, 3)), b""]), SMALL, exact=False)
    with pytest.raises(PictureError, match=r"picture 1 cannot be read: it is empty \(0 bytes\)"):
        list(trained_on(store, batch=2).epoch())
    assert next(trained_on(store, batch=2, leave_out=[1]).epoch()).index.tolist() == [0, 0]


def test_what_a_preprocessing_leaves_as_it_is():
    assert PLAIN.keeps(8, 8)
    assert not PLAIN.keeps(9, 9)
    assert not SMALL.keeps(8, 8)  # resized to 9 before the crop
    assert not SMALL.keeps(9, 9)


# Training


def test_an_epoch_has_each_picture_at_most_once_and_whole_batches():
    loader = trained_on(varied(23), leave_out=[3, 7])
    orders = []
    for epoch in range(2):
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader) == 5  # of 21
        assert all(batch.images.shape == (4, 3, 8, 8) for batch in batches)
        orders.append([index for batch in batches for index in batch.index.tolist()])
        assert len(set(orders[-1])) == 20
        assert not {3, 7} & set(orders[-1])
        assert all(torch.equal(batch.labels, batch.index % 3) for batch in batches)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("memory", [0, 7 * 10 * 10 * 3])
@pytest.mark.parametrize("workers", [1, 3])
def test_neither_memory_nor_threads_change_anything(memory, workers):
    whole = trained_on(varied(24))
    other = trained_on(varied(24, memory=memory), workers=workers)
    for epoch in range(2):
        same(other.epoch(epoch), whole.epoch(epoch))
    assert other.store.kept.sum() == min(24, memory // (3 * other.store.size[0] * other.store.size[1]))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("count", [30, 5])
def test_processes_share_what_one_would_have(world, count):
    alone = trained_on(varied(count), batch=12).epoch(1)
    others = [trained_on(varied(count), batch=12, rank=rank, world=world).epoch(1) for rank in range(world)]
    together = [Batch(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*others, strict=True)]
    for one, parts in zip(alone, together, strict=True):
        assert torch.equal(one.index, parts.index)
        torch.testing.assert_close(one.images, parts.images, atol=1e-4, rtol=0)


def test_seeds_and_epochs_differ():
    store = varied(16)
    draws = [
        next(trained_on(store, seed=seed, batch=16).epoch(epoch)) for seed in range(2) for epoch in range(2)
    ]
    orders = {tuple(batch.index.tolist()) for batch in draws}
    assert len(orders) == 4
    by_picture = {tuple(batch.images[batch.index.argsort()][0].flatten().tolist()) for batch in draws}
    assert len(by_picture) == 4  # and picture 0 is varied in four ways


def test_a_picture_is_varied_anew_in_every_step():
    store = Store(pictures_of([encoded(noise(9, 9, 3))]), SMALL, exact=False)
    loader = trained_on(store, batch=1)
    seen = {tuple(next(loader.epoch(epoch)).images.flatten().tolist()) for epoch in range(4)}
    assert len(seen) == 4


def test_the_whole_picture_is_kept_for_crops():
    still = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, "layers": 0, "erase": 0.0}
    small = noise(4, 8, 8)
    store = Store(pictures_of(small), GREY, exact=False)
    assert store.size == (8, 8)
    batch = next(Loader(store, batch=4, train=True, augment=Augment(**still)).epoch())
    expected = torch.stack([GREY(picture) for picture in small])[batch.index]
    torch.testing.assert_close(batch.images, expected, atol=1e-4, rtol=0)

    large = noise(30, 60, 3)
    store = Store(pictures_of([encoded(large)]), SMALL, exact=False)
    assert store.size == (10, 10)  # 1.25 times what the model sees
    pixels, bad = store.read(torch.tensor([0]))
    judge = np.asarray(Image.fromarray(large).resize((10, 10), Image.Resampling.BICUBIC))
    assert (pixels[0].permute(1, 2, 0).numpy() == judge).all()
    assert not bad
    assert store.aspect.tolist() == [2.0]

    wide = Store(pictures_of([encoded(noise(9, 40, 3)), b"", encoded(noise(9, 8, 3))]), SMALL, exact=False)
    assert wide.size == (9, 10)  # no higher than the pictures are


def test_turned_photos_are_kept_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right shows it upright
    array = np.zeros((16, 32, 3), np.uint8)
    array[:, :16] = 255  # white at the left, so at the top when turned
    store = Store(pictures_of([encoded(array, "JPEG", exif=exif)]), SMALL, exact=False)
    pixels = store.read(torch.tensor([0]))[0][0]
    assert store.aspect.tolist() == [0.5]
    assert pixels[:, :4].min() > 200 > 50 > pixels[:, -4:].max()


def test_large_jpegs_are_decoded_smaller(monkeypatch):
    big = np.kron(noise(6, 8, 3), np.ones((100, 100, 1), np.uint8))  # 600 x 800
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, *rest: sizes.append(image.size) or resize(image, *rest)
    )
    store = Store(pictures_of([encoded(big, "JPEG", quality=95)]), SMALL, exact=False)
    pixels = store.read(torch.tensor([0]))[0][0].permute(1, 2, 0).float()
    assert sizes == [(100, 75)]  # an eighth
    judge = np.asarray(resize(Image.fromarray(big), (10, 10), Image.Resampling.BICUBIC), np.float32)
    assert np.abs(pixels.numpy() - judge).mean() < 3


# How batches are made


def slow(seconds, count=12):
    def read(item):
        time.sleep(seconds)
        return item

    return Store(pictures_of(list(noise(count, 9, 9)), read), GREY, exact=True, memory=0)


def seconds(loader):
    started = time.perf_counter()
    list(loader.epoch())
    return time.perf_counter() - started


def test_several_threads_read():
    alone, together = (seconds(Loader(slow(0.03), batch=3, workers=workers)) for workers in (1, 4))
    assert together < 0.6 * alone


def test_several_threads_read_one_batch(monkeypatch):
    monkeypatch.setattr("vitrail.data.batches.PART", 2)
    alone, together = (seconds(Loader(slow(0.03), batch=12, workers=workers)) for workers in (1, 4))
    assert together < 0.6 * alone


def test_no_more_batches_wait_than_fit_into_memory(monkeypatch):
    """Of three pictures of 8 x 8 float32, three times in the memory for it."""
    monkeypatch.setattr("vitrail.data.batches.AHEAD", 3 * 3 * 8 * 8 * 4)
    read = []
    pictures = pictures_of(range(60), lambda item: read.append(item) or noise(9, 9))
    stream = Loader(Store(pictures, GREY, exact=True, memory=0), batch=3, workers=16).epoch()
    read.clear()  # what a store looks at to know its size
    next(stream)
    time.sleep(0.2)
    assert len(read) <= 9
    stream.close()
    assert Loader(slow(0), batch=12, workers=16).ahead == 2  # one to work on, one to come


@pytest.mark.parametrize("step", [0, 3, 6, 14])
def test_a_stream_goes_through_all_epochs(step):
    loader = trained_on(varied(24), seed=5)
    wanted = [batch for epoch in range(3) for batch in loader.epoch(epoch)][step:]
    same(islice(loader.stream(step), len(wanted)), wanted)


def test_the_next_epoch_begins_before_this_one_ends(monkeypatch):
    orders = []
    order = Loader._order
    monkeypatch.setattr(Loader, "_order", lambda loader, epoch: orders.append(epoch) or order(loader, epoch))
    store = Store(pictures_of(noise(8, 8, 8)), GREY, exact=False)
    stream = trained_on(store, batch=2).stream()
    threads = threading.active_count() + 2
    for _ in range(4):
        next(stream)
    assert orders == [0, 1]  # one for each epoch, not for each batch
    assert len(list(islice(stream, 8))) == 8
    assert threading.active_count() <= threads  # of one pool


def test_threads_are_as_many_as_cores_for_each_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 6}, raising=False)
    store = Store(pictures_of(noise(8, 8, 8)), GREY, exact=True)
    assert [Loader(store, batch=8, world=world).workers for world in (1, 2, 8)] == [4, 2, 1]


def test_arrays_are_not_copied():
    array = noise(6, 8, 8)
    store = Store(pictures_of(array), GREY, exact=True, memory=0)
    assert store.pixels.data_ptr() == array.ctypes.data
    assert store.kept.all()


def test_colour_that_is_not_seen_is_known():
    grey = np.repeat(noise(9, 9, 1), 3, axis=2)
    items = [encoded(grey), encoded(noise(9, 9, 3)), encoded(noise(9, 9)), encoded(grey, "JPEG")]
    for exact in (True, False):
        store = Store(pictures_of(items), GREY, exact=exact)
        store.read(torch.arange(4))
        assert store.coloured.tolist() == [False, True, False, False]
        store = Store(pictures_of(items), SMALL, exact=exact)
        store.read(torch.arange(4))
        assert not store.coloured.any()


def test_leaving_early_leaves_nothing_behind():
    before, threads = threading.active_count(), torch.get_num_threads()
    batches = Loader(slow(0.01), batch=3).epoch()
    next(batches)
    batches.close()
    assert threading.active_count() == before
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [threads]  # as many as threads have by default


def test_what_cannot_be_asked_for():
    store = Store(pictures_of(noise(4, 8, 8)), GREY, exact=True)
    with pytest.raises(ValueError, match="a batch of 5 cannot be shared by 2 processes"):
        Loader(store, batch=5, world=2)
    for exact, augment in ((True, Augment()), (False, None)):
        with pytest.raises(ValueError, match="augment needs a store with exact=False"):
            Loader(Store(store.pictures, GREY, exact=exact), batch=4, augment=augment)
