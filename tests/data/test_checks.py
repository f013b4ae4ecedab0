"""Everything that is wrong with a folder of pictures is told before training."""

import io
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.batches import Loader, Store
from vitrail.data.checks import examine
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import complete, open_source

PREPROCESS = Preprocess(resize=(8, 8), interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)


def stores_of(place):
    dataset = open_source(place)
    return {split: Store(pictures, PREPROCESS, exact=True) for split, pictures in dataset.splits.items()}


def many(kind, count, folder="train"):
    return [f"{folder}/{kind}/{i}.png" for i in range(count)]


def bomb():
    """A PNG of a few bytes that says it has 30,000 x 30,000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99)))


def encoded(kind):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


BAD = {
    "truncated.jpg": (encoded("JPEG")[:-200], "truncated"),
    "truncated.png": (encoded("PNG")[:-200], "truncated|broken"),
    "empty.jpg": (b"", r"it is empty \(0 bytes\)"),
    "text.jpg": (b"Not a picture, whatever its name says", "it is not a picture in a known format"),
    "bomb.png": (bomb(), "exceeds limit of .* pixels"),
}


@pytest.fixture
def damaged(files):
    place = files(*many("cat", 12), *many("dog", 12), *many("dog", 3, "test"), *many("cat", 3, "test"))
    for name, (data, _) in BAD.items():
        (place / "train/cat" / name).write_bytes(data)
    return place


def test_nothing_to_say_of_good_pictures(files):
    findings = examine(stores_of(files(*many("cat", 12), *many("dog", 11))))
    assert findings.notes == ()
    assert findings.bad == {"train": {}}
    assert findings.counts == {"train": {"cat": 12, "dog": 11}}


def test_bad_pictures_are_named_with_the_reason(damaged):
    stores = stores_of(damaged)
    findings = examine(stores)
    names = stores["train"].pictures.names
    told = {names[index].rpartition("/")[2]: why for index, why in findings.bad["train"].items()}
    assert told.keys() == BAD.keys()
    (note,) = findings.notes
    assert note.startswith("left out: 5 pictures cannot be read:\n")
    for name, (_, why) in BAD.items():
        assert re.search(why, told[name])
        assert f"{damaged / 'train/cat' / name}: {told[name]}" in note
    assert findings.counts == {"test": {"cat": 3, "dog": 3}, "train": {"cat": 12, "dog": 12}}


def test_strict_refuses_bad_pictures(damaged):
    with pytest.raises(
        ValueError, match=r"5 pictures cannot be read:[\s\S]*empty\.jpg: it is empty \(0 bytes\)"
    ):
        examine(stores_of(damaged), strict=True)


def test_files_that_a_table_names_but_are_not_there(files):
    place = files("1.png", "2.png")
    (place / "all.csv").write_text("path,label\n1.png,a\n2.png,b\nsub/3.png,b")
    findings = examine(stores_of(place))
    assert findings.bad == {"train": {2: "No such file or directory"}}
    assert str(place / "sub/3.png") in findings.notes[0]


def test_a_long_list_is_cut_short(files):
    place = files("cat/1.png", "dog/1.png")
    for i in range(30):
        (place / "cat" / f"bad{i}.png").touch()
    note = examine(stores_of(place)).notes[0]
    assert note.startswith("left out: 30 pictures cannot be read:")
    assert note.count("0 bytes") == 20
    assert note.endswith("and 10 more")


def test_nothing_readable_and_one_class_are_refused(files):
    place = files("cat/1.png")
    with pytest.raises(ValueError, match="there is only one class, cat; expected two or more"):
        examine(stores_of(place))
    (place / "cat" / "1.png").write_text("no picture")
    with pytest.raises(
        ValueError, match=r"no picture of train is left; 1 pictures[\s\S]*1\.png: it is not a picture"
    ):
        examine(stores_of(place))


def test_copies_are_told_by_content(files):
    place = files(*many("cat", 12), *many("dog", 12), *many("dog", 3, "test"), "test/cat/0.png")
    shutil.copy(place / "train/dog/3.png", place / "test/dog/same.png")
    shutil.copy(place / "train/cat/5.png", place / "train/dog/other.png")
    shutil.copy(place / "train/cat/7.png", place / "train/cat/again.png")
    leaked, confused, repeated = examine(stores_of(place)).notes
    assert leaked.startswith("the score is too good")
    assert leaked.endswith(f"2 pictures, such as {place}/train/dog/3.png and {place}/test/dog/same.png")
    assert confused.startswith("the same picture has different classes: 2 pictures, such as ")
    assert confused.endswith(f"{place}/train/cat/5.png and {place}/train/dog/other.png")
    assert repeated.startswith("the same picture comes more than once: 6 pictures")


def test_copies_in_arrays(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    pixels[31] = pixels[2]
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(40) // 20)
    confused, repeated = examine(stores_of(tmp_path / "a.npz")).notes
    assert confused.endswith("2 pictures, such as a.npz[2] and a.npz[31]")
    assert repeated.startswith("the same picture comes more than once: 2 pictures")


def test_colours_that_a_grey_model_does_not_see_are_told(files):
    place = files(*many("cat", 12), *many("dog", 12))
    for path in place.rglob("*.png"):
        if path.name != "7.png":
            Image.open(path).convert("L").save(path)
    grey = Preprocess(resize=(8, 8), interpolation="bilinear", mean=(0.5,), std=(0.5,))
    store = Store(open_source(place).splits["train"], grey, exact=False)
    assert examine({"train": store}).notes == (
        f"seen in grey, but in colour: 2 pictures, such as {place / 'train/cat/7.png'}",
    )


def test_few_and_uneven_classes(files):
    place = files(*many("cat", 40), *many("dog", 10), *many("hen", 4), *many("owl", 2, "test"))
    few, uneven = examine(stores_of(place)).notes
    assert few == "fewer than 10 training pictures: hen (4), owl (0); such classes are hardly learned"
    assert uneven.startswith("classes are uneven: 40 training pictures of cat, 0 of owl")


def test_examining_decodes_for_the_loader(files):
    stores = stores_of(files(*many("cat", 12), *many("dog", 12)))
    expected = [batch.images for batch in Loader(stores_of(files())["train"], batch=6).epoch()]
    told = []
    examine(stores, workers=2, progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (24, 24)
    assert stores["train"].kept.all()
    shutil.rmtree(files() / "train")  # nothing is read again
    batches = [batch.images for batch in Loader(stores["train"], batch=6).epoch()]
    assert torch.equal(torch.cat(batches), torch.cat(expected))


def test_nothing_is_wrong_with_real_pictures(shared):
    dataset = complete(open_source(shared / "data" / "clothing"), shares={})
    half = torch.arange(0, len(dataset.splits["val"]), 2)
    stores = {"val": Store(dataset.splits["val"].select(half), PREPROCESS, exact=True)}
    findings = examine(stores)
    assert findings.notes == ()
    assert sum(findings.counts["val"].values()) == len(half)
