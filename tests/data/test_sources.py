"""Pictures in folders, what is no place of pictures, and splits that are cut."""

import itertools
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from judges import torchvision
from vitrail.data.pictures import open_picture
from vitrail.data.sources import Dataset, Pictures, complete, from_files, open_source


def pairs(pictures):
    """(last part of the name, class) of each picture."""
    names = (name.rpartition("/")[2] for name in pictures.names)
    return [(name, pictures.classes[label]) for name, label in zip(names, pictures.labels, strict=True)]


def counts(dataset):
    return {split: len(pictures) for split, pictures in dataset.splits.items()}


# Folders


def test_folders_of_classes(files):
    place = files("dog/2.png", "dog/10.PNG", "dog/puppies/1.jpg", "cat/1.webp")
    found = open_source(place)
    assert found.classes == ("cat", "dog")
    assert counts(found) == {"train": 4}
    assert pairs(found.splits["train"]) == [
        ("1.webp", "cat"),
        ("10.PNG", "dog"),
        ("2.png", "dog"),
        ("1.jpg", "dog"),
    ]
    assert found.notes == (
        "pictures in 1 folders inside of class folders count for the outer class, such as "
        f"{place / 'dog/puppies'}; move them out if they are classes of their own",
    )
    assert (np.asarray(open_picture(found.splits["train"].data(1))) == Image.open(place / "dog/10.PNG")).all()


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train", "val", "test"), ("train", "val", "test")),
        (("Train", "VALID"), ("train", "val")),
        (("training", "Validation", "Testing"), ("train", "val", "test")),
        (("TEST",), ("test",)),
    ],
)
def test_folders_of_splits(files, names, splits):
    for name in names:
        place = files(f"{name}/cat/1.png", f"{name}/dog/1.png", f"{name}/dog/2.png")
    found = open_source(place)
    assert counts(found) == dict.fromkeys(splits, 3)
    assert all(pictures.labels.tolist() == [0, 1, 1] for pictures in found.splits.values())


def test_a_class_called_train_is_a_class(files):
    found = open_source(files("train/1.png", "bus/1.png"))
    assert found.classes == ("bus", "train")
    assert counts(found) == {"train": 2}


def test_splits_without_classes_are_refused(files):
    with pytest.raises(ValueError, match="expected a folder for each class inside of test, train"):
        open_source(files("train/1.png", "test/1.png"))


def test_a_class_that_was_dragged_into_another_is_told(files):
    place = files("cat/1.png", "cat/dog/1.png", "cat/dog/2.png", "cat/dog/old/3.png", "hen/1.png")
    (note,) = open_source(place).notes
    assert note.startswith("pictures in 2 folders inside of class folders count for the outer class")
    assert f" {place / 'cat/dog'};" in note
    files("dog/4.png", "cat/cat/2.png")  # and unpacked twice, which does no harm
    strayed, nested = open_source(place).notes
    assert strayed.startswith("pictures most likely have the wrong class: 2 folders are called like a class")
    assert f" {place / 'cat/dog'};" in strayed
    assert nested.startswith("pictures in 1 folders inside of class folders count for the outer class")
    assert f" {place / 'cat/cat'};" in nested


def test_what_is_odd_about_folders_is_told(files):
    place = files(
        "train/cat/1.png",
        "train/cat/.cache/3.png",
        "train/dog/cat/2.png",
        "train/.thumbs/1.png",
        "other/a/1.png",
    )
    (place / "train" / "empty").mkdir()
    (place / "train" / "cat" / "notes.txt").write_text("nothing")
    (place / "train" / "cat" / "._1.png").write_bytes(b"of a Mac")
    found = open_source(place)
    assert found.classes == ("cat", "dog")
    assert pairs(found.splits["train"]) == [("1.png", "cat"), ("2.png", "dog")]
    inside, beside, passed, empty = found.notes
    assert inside.startswith("pictures most likely have the wrong class: 1 folders")
    assert f"such as {place / 'train/dog/cat'};" in inside
    assert beside == "other beside train is passed over"
    assert passed == f"1 files are no pictures by their names, such as {place / 'train/cat/notes.txt'}"
    assert empty == "class 'empty' has no pictures and is left out"


def test_names_that_are_no_text(files, tmp_path):
    """Shown as text can be, so that they can be printed and written down; and still found."""
    place = files("ok/1.png")
    shutil.copytree(place / "ok", os.fsdecode(os.fsencode(place) + b"/caf\xe9"))
    os.rename(os.fsencode(place) + b"/caf\xe9/1.png", os.fsencode(place) + b"/caf\xe9/\xe9.png")
    found = open_source(place)
    assert found.classes == (r"caf\xe9", "ok")
    assert found.splits["train"].names[0] == rf"{place}/caf\xe9/\xe9.png"
    assert found.splits["train"].data(0) == (place / "ok/1.png").read_bytes()


def test_real_folders_as_torchvision_reads_them(shared):
    found = open_source(shared / "data" / "clothing")
    for split, name in (("train", "train"), ("val", "validation")):
        judge = torchvision.datasets.ImageFolder(shared / "data" / "clothing" / name)
        assert list(found.classes) == judge.classes
        pictures = found.splits[split]
        assert sorted(zip(pictures.names, pictures.labels.tolist(), strict=True)) == sorted(judge.samples)


# Any place


def test_what_is_not_recognised_says_what_is_there_and_what_would_work(files, tmp_path):
    place = files("1.png", "2.png", "3.jpg")
    (place / "empty").mkdir()
    for path, says in (
        (place, r"photos holds 2 files with \.png and 1 files with \.jpg and 1 folders \(empty\)\."),
        (place / "empty", "empty holds nothing"),
        (place / "1.png", "1.png is a file of a kind that holds no labelled pictures"),
        (place / "gone", "gone does not exist"),
    ):
        with pytest.raises(
            ValueError, match=rf"{says}[\s\S]*Expected one of:[\s\S]*a folder of pictures for each"
        ):
            open_source(path)


def test_a_folder_is_not_asked_about_each_of_its_files(files, monkeypatch):
    place = files(*(f"{i}.png" for i in range(30)))
    (place / "all.csv").write_text("path,label\n1.png,a\n2.png,b")
    asked = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: asked.append(path) or stat(path, **options))
    open_source(place)
    assert not [path for path in asked if path.suffix == ".png"]


def test_names_that_a_model_has_twice_are_refused(files):
    classes = ("crane", "hen", "crane")
    assert open_source(files("hen/1.png"), classes=classes).splits["train"].labels.tolist() == [1]
    with pytest.raises(ValueError, match="2 classes are called 'crane', so its pictures may be of any of"):
        open_source(files("crane/1.png"), classes=classes)


def test_labels_numbered_as_a_model_has_them(files):
    place = files("cat/1.png", "dog/1.png")
    found = open_source(place, classes=("dog", "mouse", "cat"))
    assert found.classes == ("dog", "mouse", "cat")
    assert found.splits["train"].labels.tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"unknown class 'dog'; did you mean 'dogs'\?"):
        open_source(place, classes=("dogs", "cat"))


def test_pictures_without_labels(files):
    place = files("1.png", "2.png")
    pictures = from_files([place / "2.png", place / "1.png"])
    assert pictures.labels.tolist() == [-1, -1]
    assert pictures.data(0) == (place / "2.png").read_bytes()
    assert pictures.names == [str(place / "2.png"), str(place / "1.png")]


# Splits


def numbered(sizes, **given):
    """A dataset whose items are numbers, with so many training pictures of each class."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    names = [str(i) for i in range(len(labels))]
    classes = tuple(map(str, range(len(sizes))))
    train = Pictures(range(len(labels)), names, labels, classes, lambda item: item)
    return Dataset("numbers", "a range", classes, {"train": train, **given}, ())


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum),
    st.floats(0.01, 0.45),
    st.floats(0.01, 0.45),
    st.integers(0, 3),
)
def test_every_class_gives_its_share(sizes, val, test, seed):
    try:
        dataset = complete(numbered(sizes), seed=seed, shares={"val": val, "test": test})
    except ValueError:
        if min(sizes) >= math.ceil(1 / min(val, test)):  # as many as the error itself asks for
            raise
        return
    parts = {split: sorted(pictures.items) for split, pictures in dataset.splits.items()}
    assert sorted(itertools.chain(*parts.values())) == list(range(sum(sizes)))  # each in one split only
    per_class = {
        s: torch.bincount(p.labels, minlength=len(sizes)).tolist() for s, p in dataset.splits.items()
    }
    for label, size in enumerate(sizes):
        assert per_class["train"][label] >= min(size, 1)
        for split, share in (("val", val), ("test", test)):
            assert abs(per_class[split][label] - size * share) < 1 or per_class["train"][label] == 1
    if min(sizes) >= 20:  # no class too small for what it would give
        for split, share in (("val", val), ("test", test)):
            assert len(parts[split]) == round(sum(size * share for size in sizes))


def test_largest_remainders_win():
    # 0.1 of 17, 24 and 39 is 1.7, 2.4 and 3.9, together 8: 1 + 2 + 3, and the two largest of .7, .4, .9
    dataset = complete(numbered([17, 24, 39]), shares={"val": 0.1})
    assert torch.bincount(dataset.splits["val"].labels).tolist() == [2, 2, 4]
    assert dataset.notes == ("of 80 training pictures 8 for val are kept apart, class by class (seed 0)",)


def test_small_classes_give_by_turns():
    """Of 30 classes with two pictures each, three give one for validation, and three others one for test."""
    dataset = complete(numbered([2] * 30), shares={"val": 0.05, "test": 0.05})
    assert counts(dataset) == {"train": 54, "val": 3, "test": 3}
    assert torch.bincount(dataset.splits["train"].labels).min() == 1


def test_which_pictures_are_kept_apart():
    """Judged by going through all pictures once for each class."""
    labels = torch.randint(40, (5000,), generator=torch.Generator().manual_seed(0))
    train = replace(numbered([5000]).splits["train"], labels=labels, classes=tuple(map(str, range(40))))
    kept = complete(Dataset("numbers", "", train.classes, {"train": train}, ()), shares={"val": 0.2}, seed=3)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(kept.splits["val"].labels, minlength=40)
    judge = torch.cat([order[labels[order] == label][: counts[label]] for label in range(40)])
    assert kept.splits["val"].items == judge.sort().values.tolist()


def test_many_classes_take_no_longer():
    started = time.perf_counter()
    complete(numbered([10] * 20_000))
    assert time.perf_counter() - started < 4


def test_splits_follow_the_seed_and_leave_given_ones_alone():
    def validation(seed):
        return complete(numbered([30, 30]), seed=seed).splits["val"].items

    assert validation(1) == validation(1)
    assert validation(1) != validation(2)
    mine = numbered([3]).splits["train"]
    dataset = complete(numbered([30, 30], test=mine))
    assert dataset.splits["test"] is mine
    assert counts(dataset) == {"train": 54, "test": 3, "val": 6}
    both = numbered([30, 30], test=mine, val=mine)
    assert complete(both) is both
    assert set(complete(numbered([30]), shares={"val": 0.1}).splits) == {"train", "val"}


def test_splits_that_cannot_be():
    with pytest.raises(
        ValueError,
        match=r"numbers has 3 training pictures of 2 classes, too few to keep 0\.1 of them apart; 10 of each",
    ):
        complete(numbered([1, 2]))
    with pytest.raises(ValueError, match="expected parts that leave a rest"):
        complete(numbered([30]), shares={"val": 0.5, "test": 0.5})
    only = numbered([30])
    only.splits["test"] = only.splits.pop("train")
    with pytest.raises(ValueError, match="numbers has no training pictures, only test"):
        complete(only)
