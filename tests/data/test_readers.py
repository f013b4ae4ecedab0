"""Whatever a place is made of, each picture comes out once, with its class, in its split."""

import gzip
import io
import json
import struct
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from vitrail.data.pictures import open_picture
from vitrail.data.sources import open_source


def pairs(pictures):
    """(last part of the name, class) of each picture."""
    names = (name.rpartition("/")[2] for name in pictures.names)
    return [(name, pictures.classes[label]) for name, label in zip(names, pictures.labels, strict=True)]


def counts(dataset):
    return {split: len(pictures) for split, pictures in dataset.splits.items()}


def encoded(array, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def noise(*shape):
    return np.random.default_rng(len(shape)).integers(0, 256, shape, dtype=np.uint8)


# Tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(files, delimiter):
    place = files("a, b.png", "sub/2.png", "3.png")
    rows = ['"Path"|Label|split|more', '"a, b.png"|b|train|', "sub/2.png| a |VALID|x", "", "3.png||test|y"]
    table = place / "labels.csv"
    table.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).replace("|", delimiter).encode())
    for source in (table, place):
        found = open_source(source)
        assert found.classes == ("a", "b")
        assert pairs(found.splits["train"]) == [("a, b.png", "b")]
        assert pairs(found.splits["val"]) == [("2.png", "a")]
        assert counts(found) == {"train": 1, "val": 1}
        assert found.notes == ("1 pictures of test have no label and are left out",)
        assert open_picture(found.splits["val"].data(0)).size == (16, 12)


def test_numbers_sort_as_numbers(files):
    (files() / "a.csv").write_text("file,class\n" + "\n".join(f"{n}.png,{n}" for n in (10, 9, 100)))
    assert open_source(files() / "a.csv").classes == ("9", "10", "100")


def test_the_names_of_tables_say_their_split(files):
    for name in ("train", "test"):
        (files() / f"{name}.csv").write_text(f"path,label\n{name}.png,a")
    assert counts(open_source(files())) == {"train": 1, "test": 1}


def test_folders_of_classes_beside_a_table_of_something_else(files):
    place = files("cat/1.png", "dog/1.png")
    (place / "sizes.csv").write_text("path,bytes\ncat/1.png,100")
    assert open_source(place).classes == ("cat", "dog")


def test_parquet_of_paths(files):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    place = files("1.png", "2.png")
    table = pyarrow.table({"filename": ["2.png", "1.png"], "label": [7, 3], "split": ["test", "train"]})
    parquet.write_table(table, place / "all.parquet")
    found = open_source(place / "all.parquet")
    assert found.classes == ("3", "7")
    assert pairs(found.splits["test"]) == [("2.png", "7")]
    assert found.splits["test"].data(0) == (place / "2.png").read_bytes()


@pytest.fixture
def hugging_face():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ant", "cow"])}
    )

    def make(seed, labels):
        shapes = [(5 + seed, 7, 3)] * len(labels)
        pictures = [Image.fromarray(noise(*shape) ^ np.uint8(i)) for i, shape in enumerate(shapes)]
        return datasets.Dataset.from_dict({"img": pictures, "label": labels}, features=features)

    return datasets.DatasetDict({"train": make(0, [2, 0, 2]), "test": make(1, [1, -1])})


def same_as_hugging_face(found, splits):
    assert found.classes == ("zebra", "ant", "cow")  # the order of the place, not of the alphabet
    for split, judge in splits.items():
        kept = [row for row in judge if row["label"] >= 0]
        pictures = found.splits[split]
        assert pictures.labels.tolist() == [row["label"] for row in kept]
        for index, row in enumerate(kept):
            assert (np.asarray(open_picture(pictures.data(index))) == np.asarray(row["img"])).all()
    assert found.notes == ("1 pictures of test have no label and are left out",)


def test_a_folder_that_datasets_saved(hugging_face, tmp_path):
    hugging_face.save_to_disk(tmp_path / "saved")
    same_as_hugging_face(open_source(tmp_path / "saved"), hugging_face)
    hugging_face["train"].save_to_disk(tmp_path / "one")
    assert open_source(tmp_path / "one").splits["train"].labels.tolist() == [1, 0, 1]  # zebra and cow


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("state.json", "{}", r"state\.json is damaged: expected .* JSON with a list of '_data_files'"),
        ("state.json", '{"_data_files": [3]}', r"state\.json is damaged"),
        ("dataset_dict.json", "{", r"dataset_dict\.json is damaged: .* a list of 'splits'"),
        ("dataset_dict.json", "[]", r"dataset_dict\.json is damaged"),
        ("state.json", '{"_data_files": [{"filename": "a.arrow"}]}', r"a\.arrow cannot be read: "),
        ("state.json", '{"_data_files": []}', "holds no labelled pictures"),
    ],
)
def test_what_datasets_did_not_write_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    (tmp_path / "a.arrow").write_bytes(b"no arrow at all")
    with pytest.raises(ValueError, match=says):
        open_source(tmp_path)


def test_a_label_beyond_the_names_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"img": [b"1", b"2"], "label": [0, 2]})
    about = {"info": {"features": {"label": {"names": ["ant", "cow"]}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet .* has the label 2; expected 0 to 1, for ant …"):
        open_source(tmp_path / "a.parquet")


def test_parquet_as_the_hub_has_it(hugging_face, tmp_path):
    (tmp_path / "data").mkdir()
    for split, dataset in hugging_face.items():
        dataset.to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    same_as_hugging_face(open_source(tmp_path), hugging_face)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("picture,label\n1.png,a", "has the columns picture, label; expected path"),
        ("path,label\n1.png", "'1.png' is not one value each of path, label"),
        ("path,label,split\n1.png,a,half", r"has the splits \['half'\]; expected train, val and test"),
        ("", r"has the columns \(none\); expected path"),
        ("path,label\n", "holds no labelled pictures; it was read as a table"),
        ("path,label\n" + "x" * 200_000 + ",a", r"a\.csv cannot be read: field larger than"),
    ],
)
def test_tables_that_are_refused(tmp_path, text, says):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=says):
        open_source(tmp_path / "a.csv")


def test_text_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("path,label\na.png,b", encoding="utf-16")
    for place in (tmp_path, tmp_path / "a.csv"):
        with pytest.raises(ValueError, match=r"a\.csv cannot be read: expected text in UTF-8, but it"):
            open_source(place)


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'a\.parquet needs pyarrow; run: pip install "vitrail\[data\]"'):
        open_source(tmp_path / "a.parquet")


# Arrays


def idx(array):
    """Two zeros, 8 for bytes, the number of dimensions, each of them in four bytes, then the values."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx(tmp_path, ending):
    pack = gzip.compress if ending else bytes
    arrays = {name: noise(count, 5, 4) for name, count in (("train", 3), ("t10k", 2))}
    labels = {"train": np.uint8([2, 0, 9]), "t10k": np.uint8([0, 9])}
    place = tmp_path / "Fashion-MNIST"
    for folder in (tmp_path / "mnist", place):
        folder.mkdir()
        for name, array in arrays.items():
            (folder / f"{name}-images-idx3-ubyte{ending}").write_bytes(pack(idx(array)))
            (folder / f"{name}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels[name])))
    found = open_source(tmp_path / "mnist")
    assert found.classes == ("0", "2", "9")
    assert found.splits["train"].labels.tolist() == [1, 0, 2]
    assert found.splits["test"].labels.tolist() == [0, 2]
    for split, name in (("train", "train"), ("test", "t10k")):
        for index, array in enumerate(arrays[name]):
            assert (found.splits[split].data(index) == array).all()
    assert open_source(place).classes == ("T-shirt/top", "Pullover", "Ankle boot")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x89PNG....", "begins with the bytes 89 50 4e 47; expected 00 00 08"),
        (idx(noise(3, 5, 4))[:-1], "holds 59 values; its header says 3 x 5 x 4"),
        (b"\0\0\x08", "images-idx3-ubyte cannot be read: it ends after 3 bytes, before its header does"),
        (b"\0\0\x08\x03\0\0", "it ends after 6 bytes"),
        (idx(noise(2, 5, 4)), "labels are 3; expected"),
    ],
)
def test_idx_that_is_damaged(tmp_path, data, says):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(data)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.uint8([0, 1, 2])))
    with pytest.raises(ValueError, match=says):
        open_source(tmp_path)


def test_idx_needs_labels_that_it_can_name(tmp_path):
    place = tmp_path / "fashion"
    place.mkdir()
    (place / "train-images-idx3-ubyte").write_bytes(idx(noise(2, 5, 4)))
    with pytest.raises(ValueError, match="has no labels beside it; expected them in train-labels-idx1-ubyte"):
        open_source(place)
    (place / "train-labels-idx1-ubyte").write_bytes(idx(np.uint8([3, 10])))
    with pytest.raises(ValueError, match=r"labels-idx1-ubyte .* has the label 10; expected 0 to 9, for T-"):
        open_source(place)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("x_train", "y_train", "x_test", "y_test"), ("train", "test")),
        (("train_images", "train_labels", "val_images", "val_labels"), ("train", "val")),
        (("images", "labels"), ("train",)),
    ],
)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 1), (6, 4, 3)])
def test_npz(tmp_path, names, splits, shape):
    arrays = [noise(4, *shape) if i % 2 == 0 else np.array([[1], [0], [1], [5]]) for i in range(len(names))]
    np.savez(tmp_path / "a.npz", **dict(zip(names, arrays, strict=True)))
    found = open_source(tmp_path / "a.npz")
    assert tuple(found.splits) == splits
    assert found.classes == ("0", "1", "5")
    for split in splits:
        assert found.splits[split].labels.tolist() == [1, 0, 1, 2]
        assert (found.splits[split].data(3) == arrays[0][3]).all()


def test_npz_with_channels_first_and_names_for_labels(tmp_path):
    pixels = noise(2, 3, 6, 4)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.array(["b", "a"]))
    found = open_source(tmp_path / "a.npz")
    assert found.classes == ("a", "b")
    assert (found.splits["train"].data(1) == pixels[1].transpose(1, 2, 0)).all()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a": np.zeros(3), "y_train": np.zeros(3)}, "holds the arrays a, y_train; expected pairs of"),
        (
            {"images": np.zeros((3, 2)), "labels": np.zeros(3)},
            r"pictures are \(3, 2\), labels are 3; expected",
        ),
        ({"images": np.zeros((3, 2, 2)), "labels": np.zeros(2)}, "labels are 2; expected"),
    ],
)
def test_npz_that_is_refused(tmp_path, arrays, says):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=says):
        open_source(tmp_path / "a.npz")


def test_digits():
    judge = pytest.importorskip("sklearn.datasets").load_digits()
    found = open_source("digits")
    assert counts(found) == {"train": 1797}
    pictures = found.splits["train"]
    assert pictures.labels.tolist() == judge.target.tolist()
    seen = np.stack([pictures.data(i) for i in range(len(pictures))])
    assert np.abs(seen / 255 - judge.images / 16).max() <= 0.5 / 255 + 1e-9


# Shards


def tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_shards(tmp_path):
    one, two, three = encoded(noise(5, 4, 3)), encoded(noise(9, 8), "JPEG"), encoded(noise(3, 3))
    tar(tmp_path / "train-0000.tar", {"a/1.jpg": two, "a/1.cls": b"7\n", "a/2.png": one, "a/2.cls": b"10"})
    tar(
        tmp_path / "train-0001.tar",
        {"a/3.json": json.dumps({"label": 7}).encode(), "a/3.seg.txt": b"", "a/3.png": three},
    )
    tar(tmp_path / "val-0000.tar", {"1.png": one, "1.json": b'{"cls": "10"}', "2.png": two, "3.cls": b"7"})
    found = open_source(tmp_path)
    assert found.classes == ("7", "10")
    assert pairs(found.splits["train"]) == [("1", "7"), ("2", "10"), ("3", "7")]
    assert [found.splits["train"].data(i) for i in range(3)] == [two, one, three]
    assert pairs(found.splits["val"]) == [("1", "10")]
    assert found.notes == ("1 pictures of val have no label and are left out",)
    assert counts(open_source(tmp_path / "train-0001.tar")) == {"train": 1}


@pytest.mark.parametrize("name", ["a.tar", "a.npz", "a.parquet", "train-images-idx3-ubyte.gz"])
def test_damaged_archives_say_so(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\3\4 no archive of any kind" * 40)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.uint8([1]))))
    with pytest.raises(ValueError, match=f"{name} cannot be read: "):
        open_source(tmp_path if name.endswith("gz") else tmp_path / name)


def test_an_array_alone_is_no_npz(tmp_path):
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, noise(3, 5, 4))
    with pytest.raises(ValueError, match="no archive of arrays as numpy"):
        open_source(tmp_path / "a.npz")
