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
from vitrail.data.readers.found import expanded
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


def test_all_pictures_below_a_folder(files):
    place = files("b/2.png", "b/10.JPG", "a.png", "b/.hidden.png", "__MACOSX/1.png", ".git/1.png")
    (place / "b" / "folder.jpg").mkdir()
    (place / "b" / "notes.txt").touch()
    named = [str(place / name) for name in ("a.png", "b/10.JPG", "b/2.png")]
    hidden = place / "b" / ".hidden.png"
    assert expanded(["gone.jpg", place, hidden]) == ["gone.jpg", *named, str(hidden)]
    assert expanded([]) == []
    with pytest.raises(ValueError, match=r"folder\.jpg holds no pictures"):
        expanded([place / "b" / "folder.jpg"])


def test_folders_of_classes_beside_a_table_of_something_else(files):
    place = files("cat/1.png", "dog/1.png")
    (place / "sizes.csv").write_text("path,bytes\ncat/1.png,100\nof uneven rows")
    found = open_source(place)
    assert found.classes == ("cat", "dog")
    (note,) = found.notes
    assert note.startswith(f"{place / 'sizes.csv'} is passed over: it has the columns path, bytes; expected")
    (place / "sizes.csv").write_text("path,label\ncat/1.png,")
    found = open_source(place)
    assert found.classes == ("cat", "dog")
    (note,) = found.notes
    assert note.endswith(f" split, {place} holds no labelled pictures")


def test_a_table_beside_one_of_something_else(files):
    place = files("1.png")
    (place / "a.csv").write_text("name,size\n1.png,100")
    (place / "b.csv").write_text("path,label\n1.png,a")
    found = open_source(place)
    assert counts(found) == {"train": 1}
    assert found.notes[0].startswith(f"{place / 'a.csv'} is passed over")


@pytest.mark.parametrize("name", ["labels", "Class-Name", "fine_label", "category_id", "class id"])
@pytest.mark.parametrize("picture", ["filepaths", "Image Path", "file_name"])
def test_usual_names_of_columns(files, name, picture):
    (files("1.png") / "ALL.CSV").write_text(f"{picture},{name}\n1.png,a")
    assert pairs(open_source(files() / "ALL.CSV").splits["train"]) == [("1.png", "a")]


def test_tables_in_folders_of_splits(files):
    for name in ("Train", "valid"):
        (files(f"{name}/1.png") / name / "labels.csv").write_text(f"path,label\n1.png,{name}")
    (files() / "test.csv").write_text("path,label\nTrain/1.png,Train")
    found = open_source(files())
    assert counts(found) == {"train": 1, "val": 1, "test": 1}
    assert found.splits["train"].data(0) == (files() / "Train" / "1.png").read_bytes()


def test_labels_that_are_none_or_many(files):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (files() / "a.csv").write_text("path,label\n1.png,NaN\n2.png,nan\n3.png,b")
    note = "2 pictures of train have no label and are left out"
    found = open_source(files() / "a.csv")
    assert (found.classes, found.notes) == (("b",), (note,))
    names = ["1.png", "2.png", "3.png"]
    parquet.write_table(
        pyarrow.table({"path": names, "y.label": names, "label": [float("nan"), 3.0, None]}),
        files() / "a.parquet",
    )
    found = open_source(files() / "a.parquet")
    assert (found.classes, found.notes) == (("3",), (note,))
    parquet.write_table(pyarrow.table({"path": names, "labels": [[1, 2], [], [1]]}), files() / "b.parquet")
    with pytest.raises(
        ValueError, match=r"b\.parquet .* a picture has the label \[1, 2\]; expected one class"
    ):
        open_source(files() / "b.parquet")


def test_paths_that_pandas_keeps_as_categories(files):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    place = files("1.png", "2.png")
    paths = pyarrow.array(["2.png", "1.png", "2.png"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"path": paths, "label": ["a", "b", "a"]}), place / "ALL.PARQUET")
    pictures = open_source(place / "ALL.PARQUET").splits["train"]
    assert pictures.names[0] == str(place / "2.png")
    assert pictures.data(1) == (place / "1.png").read_bytes()


def test_pictures_that_datasets_only_points_at(files):
    pyarrow = pytest.importorskip("pyarrow")
    place = files("1.png", "2.png")
    cells = [
        {"bytes": None, "path": "2.png"},
        {"bytes": (place / "1.png").read_bytes(), "path": "gone.png"},
        {"bytes": None, "path": None},
    ]
    table = pyarrow.table({"image": cells, "label": [1, 2, 2]})
    pytest.importorskip("pyarrow.parquet").write_table(table, place / "a.parquet")
    pictures = open_source(place / "a.parquet").splits["train"]
    assert pictures.names[:2] == [str(place / "2.png"), f"{place / 'a.parquet'}[1]"]
    assert [pictures.data(i) for i in range(2)] == [(place / f"{i}.png").read_bytes() for i in (2, 1)]


def test_pictures_are_preferred_to_the_paths_that_they_had(files):
    pyarrow = pytest.importorskip("pyarrow")
    place = files("1.png")
    data = (place / "1.png").read_bytes()
    for cell in (data, {"bytes": data, "path": "gone.png"}):
        table = pyarrow.table({"path": ["gone.png"], "image": [cell], "label": ["a"]})
        pytest.importorskip("pyarrow.parquet").write_table(table, place / "a.parquet")
        assert open_source(place / "a.parquet").splits["train"].data(0) == data


def test_classes_that_only_a_later_table_has(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for split, names in (("train", ["cow", "ant"]), ("test", ["ant", "bee"])):
        table = pyarrow.table({"img": [b"1", b"2"], "label": [0, 1]})
        about = json.dumps({"info": {"features": {"label": {"names": names}}}})
        path = tmp_path / f"{split}.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(
            table.replace_schema_metadata({"huggingface": about}), path
        )
    assert sorted(open_source(tmp_path).classes) == ["ant", "bee", "cow"]
    (tmp_path / "val.csv").write_text("path,label\n1.png,fly\n2.png,cow")
    found = open_source(tmp_path)
    assert sorted(found.classes) == ["ant", "bee", "cow", "fly"]
    assert {name for split in found.splits.values() for _, name in pairs(split)} == {*found.classes}


def test_classes_of_the_same_name_are_told(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    about = json.dumps({"info": {"features": {"label": {"names": ["crane", "hen", "crane"]}}}})
    table = pyarrow.table({"img": [b"1", b"2", b"3"], "label": [0, 1, 2]})
    for name in ("a", "b"):
        pytest.importorskip("pyarrow.parquet").write_table(
            table.replace_schema_metadata({"huggingface": about}), tmp_path / f"{name}.parquet"
        )
    found = open_source(tmp_path)
    assert found.classes == ("crane", "hen")
    assert found.notes == ("classes of the same name count as one: crane",)


def test_parquet_of_something_else_beside_folders_of_classes(files):
    pyarrow = pytest.importorskip("pyarrow")
    place = files("cat/1.png", "dog/1.png")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"x": [1]}), place / "x.parquet")
    found = open_source(place)
    assert found.classes == ("cat", "dog")
    assert found.notes[0].startswith(f"{place / 'x.parquet'} is passed over: it has the columns x; expected")


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
        ("path,label\n", r"read as a table .* holds no labelled pictures"),
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
    assert found.splits["train"].items.flags.writeable  # as what tensors share has to be


def test_idx_packed_and_unpacked(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, array in (("images-idx3", noise(3, 5, 4)), ("labels-idx1", np.uint8([0, 1, 0]))):
        (raw / f"train-{name}-ubyte").write_bytes(idx(array))
        (raw / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    for place in (raw, tmp_path / "MNIST"):
        assert counts(open_source(place)) == {"train": 3}


def test_only_fashion_mnist_has_the_names_of_clothes(tmp_path):
    for name, classes in (("old-fashion-shop", ("0", "1")), ("fashion_mnist", ("T-shirt/top", "Trouser"))):
        place = tmp_path / name
        place.mkdir()
        (place / "train-images-idx3-ubyte").write_bytes(idx(noise(2, 5, 4)))
        (place / "train-labels-idx1-ubyte").write_bytes(idx(np.uint8([0, 1])))
        assert open_source(place).classes == classes


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
    place = tmp_path / "FashionMNIST" / "raw"
    place.mkdir(parents=True)
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


def test_npz_with_two_sets_for_training(tmp_path):
    labels = {"y_train": np.zeros(2), "y": np.ones(3)}
    with (tmp_path / "A.NPZ").open("wb") as file:
        np.savez(file, x_train=noise(2, 6, 4), x=noise(3, 6, 4), **labels)
    found = open_source(tmp_path / "A.NPZ")
    assert counts(found) == {"train": 2}  # the surer of the two
    assert found.classes == ("0",)


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


def test_the_photo_among_the_pictures_of_a_sample(tmp_path):
    photo, depth = encoded(noise(5, 4, 3), "JPEG"), encoded(noise(5, 4))
    tar(
        tmp_path / "a.TAR",
        {
            "1.depth.png": depth,
            "1.JPG": photo,
            "1.CLS": b"7",
            "._1.jpg": b"of a Mac",
            "2.mask.png": depth,
            "2.cls": b"8",
        },
    )
    pictures = open_source(tmp_path / "a.TAR").splits["train"]
    assert pairs(pictures) == [("1", "7"), ("2", "8")]
    assert [pictures.data(i) for i in range(2)] == [photo, depth]


def test_shards_in_folders_of_splits(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        tar(tmp_path / split / "0000.tar", {"1.png": encoded(noise(5, 4)), "1.cls": b"7"})
    assert counts(open_source(tmp_path)) == {"train": 1, "val": 1}


def test_an_archive_without_labels_beside_folders_of_classes(files):
    place = files("cat/1.png", "dog/1.png")
    tar(place / "photos.tar", {"cat/1.png": (place / "cat/1.png").read_bytes()})
    found = open_source(place)
    assert found.classes == ("cat", "dog")
    assert found.notes == (
        f"read as tar shards (key.jpg beside key.cls or key.json), {place} holds no labelled pictures",
    )
    with pytest.raises(ValueError, match=r"read as tar shards .* no labelled pictures\nExpected one of"):
        open_source(place / "photos.tar")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.TGZ"])
def test_compressed_shards_say_what_to_do(tmp_path, name):
    (tmp_path / name).touch()
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"{name} is passed over: .* decompress it first\nExpected one"):
            open_source(place)


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
