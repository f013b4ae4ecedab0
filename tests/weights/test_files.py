"""Files that are damaged, hostile, wrapped, or something else altogether."""

import argparse
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

import vitrail
from compare import same
from tiny import tiny
from vitrail.weights import LoadError, load
from vitrail.weights.files import _plain_names, read_file, read_shards

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2)}


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {Evil.mark}",)

    mark = ""


def torch_bytes(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def npz_bytes(compress: bool = False, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def lying_npz() -> bytes:
    """An array whose header claims a terabyte."""
    header = io.BytesIO()
    claim = {"descr": "<f4", "fortran_order": False, "shape": (500_000, 500_000)}
    np.lib.format.write_array_header_1_0(header, claim)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("embedding/kernel.npy", header.getvalue() + b"\0" * 64)
    return buffer.getvalue()


def aliased() -> bytes:
    """One number that claims to be a hundred gigabytes."""
    return torch_bytes({"a": torch.zeros(1).expand(160_000, 160_000)})


HALF = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "one byte": lambda: b"\x80",
    "text": lambda: b"404: Not Found" * 9,
    "a page": lambda: b"<!doctype html><html><body>Sign in</body></html>",
    "a pointer": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "zeros": lambda: b"\0" * 1000,
    "a picture": lambda: b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
    "half a safetensors": lambda: save(STATE)[:-9],
    "a tenth of a safetensors": lambda: save(STATE)[:20],
    "a huge safetensors header": lambda: safetensors_bytes({"a": HALF}, b"\0" * 16, length=2**60),
    "a safetensors header that is none": lambda: safetensors_bytes(b"{nonsense"),
    "safetensors beyond their end": lambda: safetensors_bytes(
        {"a": {**HALF, "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}, b"\0" * 16
    ),
    "safetensors that overlap": lambda: safetensors_bytes({"a": HALF, "b": HALF}, b"\0" * 16),
    "safetensors of an odd size": lambda: safetensors_bytes({"a": {**HALF, "shape": [-4]}}, b"\0" * 16),
    "safetensors of eight bits": lambda: save({"a": torch.zeros(4).to(torch.float8_e4m3fn)}),
    "code": lambda: torch_bytes({"a.weight": torch.zeros(1), "b": Evil()}),
    "code, in the old format": lambda: torch_bytes({"b": Evil()}, _use_new_zipfile_serialization=False),
    "code, in a bare pickle": lambda: pickle.dumps(Evil()),
    "code, in an array": lambda: npz_bytes(a=np.array([Evil()], dtype=object)),
    "a namespace": lambda: torch_bytes({"model": STATE, "args": argparse.Namespace(lr=1)}),
    "a list": lambda: torch_bytes([1, 2, 3]),
    "a tensor": lambda: torch_bytes(torch.zeros(3)),
    "numbers": lambda: torch_bytes({"epoch": 3, "loss": 0.5}),
    "no tensors": lambda: torch_bytes({}),
    "sparse tensors": lambda: torch_bytes({"a": torch.eye(3).to_sparse()}),
    "names that are numbers": lambda: torch_bytes({1: torch.zeros(3)}),
    "half a pickle": lambda: torch_bytes(STATE)[: len(torch_bytes(STATE)) // 2],
    "an old pickle, cut": lambda: torch_bytes(STATE, _use_new_zipfile_serialization=False)[:-30],
    "a tensor that fills memory": aliased,
    "the same name twice": lambda: torch_bytes({**STATE, "_orig_mod.a.bias": torch.zeros(2)}),
    "half an npz": lambda: npz_bytes(a=np.zeros(99))[:-40],
    "an npz that lies": lying_npz,
    "a bomb": lambda: npz_bytes(compress=True, a=np.zeros(6_000_000, "f4")),
    "letters": lambda: npz_bytes(a=np.array(["x", "y"])),
    "an empty archive": lambda: b"PK\x05\x06" + b"\0" * 18,
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["weights.pth", "weights.npz", "model.safetensors"])
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_clear_error_and_nothing_else(kind: str, name: str, tmp_path: Path) -> None:
    Evil.mark = str(tmp_path / "was-here")
    (tmp_path / name).write_bytes(HOSTILE[kind]())
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(LoadError, match=str(tmp_path)) as error:
            load(source)
        assert "Traceback" not in str(error.value)
        assert len(str(error.value)) < 1500
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "is empty"),
        ("a pointer", "git lfs pull"),
        ("a page", "no weights of a known kind"),
        ("code", r"posix.system.*loading that could run code"),
        ("a namespace", r"argparse.Namespace.*could run code.*torch.save\(model.state_dict"),
        ("half a safetensors", "no intact safetensors file"),
        ("half a pickle", "no intact PyTorch file"),
        ("half an npz", "no intact .npz"),
        ("an npz that lies", "claims"),
        ("a bomb", "claims tensors of 24,000,000 bytes"),
        ("a tensor that fills memory", "claims tensors of 102,400,000,000 bytes"),
        ("the same name twice", "a.bias twice"),
    ],
)
def test_the_error_says_what_is_wrong(kind: str, reason: str, tmp_path: Path) -> None:
    Evil.mark = str(tmp_path / "was-here")
    (tmp_path / "weights").write_bytes(HOSTILE[kind]())
    with pytest.raises(LoadError, match=reason):
        load(tmp_path / "weights")


def test_refusing_takes_no_memory(tmp_path: Path) -> None:
    """In a process that may have 3 GB: absurd sizes must be seen before anything is allocated."""
    vitrail.save(tiny(), tmp_path / "absurd")
    file = tmp_path / "absurd" / "config.json"
    content = json.loads(file.read_text())
    content["config"] |= {"width": 3 * 10**6, "mlp_width": 10**7, "classes": 10**7}
    file.write_text(json.dumps(content))
    for kind in ("an npz that lies", "a bomb", "a tensor that fills memory", "a huge safetensors header"):
        (tmp_path / kind).write_bytes(HOSTILE[kind]())
    script = (
        "import sys, resource, pathlib\n"
        "from vitrail.weights import load, LoadError\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    try: load(path); print('loaded', path)\n"
        "    except LoadError: pass\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)\n"
    )
    limit = 8 * 1024**3
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 200  # MB


@pytest.mark.parametrize("form", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"x"', "[" * 100_000, "\x00", '{"weight_map": 3}', '{"a": NaN}']
)
def test_json_that_is_none(form: str, text: str, tmp_path: Path) -> None:
    if form == "config.json":
        vitrail.save(tiny(), tmp_path / "m")
    else:
        (tmp_path / "m").mkdir()
    (tmp_path / "m" / form).write_text(text)
    with pytest.raises(LoadError, match=r"config.json|index.json|m is of no family|m holds"):
        load(tmp_path / "m")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", 3, None, "sub/x"])
def test_shards_stay_in_their_folder(name: Any, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "secret.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(LoadError, match="files beside it"):
        load(folder)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "state_dict_ema", "model_ema", "teacher"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_training_scripts_wrap_around(wrapper: str, prefix: str, tmp_path: Path) -> None:
    content = {"epoch": 3, wrapper: OrderedDict((prefix + name, tensor) for name, tensor in STATE.items())}
    torch.save(content, tmp_path / "x.pth")
    tensors = read_file(tmp_path / "x.pth").tensors
    assert {name: stored.read().tolist() for name, stored in tensors.items()} == {
        name: tensor.tolist() for name, tensor in STATE.items()
    }


def test_a_prefix_that_not_all_names_have_is_a_name() -> None:
    """Of a part that is called module, and not of DistributedDataParallel around all."""
    assert _plain_names({"module.a": 1, "b": 2}, "x") == {"module.a": 1, "b": 2}
    assert _plain_names({"module.module.a": 1, "module.b": 2}, "x") == {"module.a": 1, "b": 2}
    assert _plain_names({"a.module.b": 1, "a._orig_mod.c": 2}, "x") == {"a.module.b": 1, "a.c": 2}


def sharded(folder: Path, weight_map: dict[str, str], shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir()
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B = ({name: tensor} for name, tensor in STATE.items())


def test_tensors_come_from_the_shards_that_the_index_names(tmp_path: Path) -> None:
    index = sharded(tmp_path / "m", {"a.weight": ONE, "a.bias": TWO}, {ONE: A, TWO: B})
    (tmp_path / "m" / "model-00003-of-00002.safetensors").write_bytes(b"in nobody's way")
    tensors = read_shards(index).tensors
    assert all(same(tensors[name].read(), tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ({ONE: A}, f"names {TWO}, which is not there: download it too"),
        ({ONE: B, TWO: A}, f"{ONE} do not agree where to find a.bias, a.weight"),
        ({ONE: STATE, TWO: B}, f"{ONE} do not agree where to find a.bias:"),
        ({ONE: A, TWO: {"a.gain": torch.zeros(2)}}, f"{TWO} do not agree where to find a.bias, a.gain"),
    ],
    ids=["a missing one", "in the wrong ones", "one tensor twice", "another tensor"],
)
def test_shards_that_are_not_as_the_index_says(
    shards: dict[str, dict[str, torch.Tensor]], reason: str, tmp_path: Path
) -> None:
    index = sharded(tmp_path / "m", {"a.weight": ONE, "a.bias": TWO}, shards)
    with pytest.raises(LoadError, match=reason):
        read_shards(index)


def test_averaged_weights_come_first(tmp_path: Path) -> None:
    averaged = {name: tensor + 1 for name, tensor in STATE.items()}
    torch.save({"state_dict": STATE, "state_dict_ema": averaged}, tmp_path / "x.pth")
    assert same(read_file(tmp_path / "x.pth").tensors["a.bias"].read(), averaged["a.bias"])


@pytest.mark.parametrize(
    "write",
    [
        lambda state, path: save_file(state, path),
        lambda state, path: torch.save(state, path),
        lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        lambda state, path: path.write_bytes(npz_bytes(**{n: t.numpy() for n, t in state.items()})),
        lambda state, path: path.write_bytes(npz_bytes(True, **{n: t.numpy() for n, t in state.items()})),
    ],
    ids=["safetensors", "pickle", "old pickle", "npz", "compressed npz"],
)
@pytest.mark.parametrize("name", ["x", "x.bin", "x.safetensors"])
def test_the_kind_is_known_by_the_content(write: Callable[..., Any], name: str, tmp_path: Path) -> None:
    state = {**STATE, "whole": torch.tensor(3), "half": torch.ones(2).half()}
    write(state, tmp_path / name)
    tensors = read_file(tmp_path / name).tensors
    assert tensors.keys() == state.keys()
    for key, tensor in state.items():
        assert (tensors[key].shape, tensors[key].dtype) == (tensor.shape, tensor.dtype)
        assert same(tensors[key].read(), tensor)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds no weights; expected"):
        load(tmp_path)


def test_a_folder_with_several(tmp_path: Path) -> None:
    for name in ("a.pth", "b.npz"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(LoadError, match=r"several files of weights: a.pth, b.npz; name one"):
        load(tmp_path)


def test_our_file_of_weights_by_its_name(tmp_path: Path) -> None:
    model = tiny()
    vitrail.save(model, tmp_path / "m")
    assert load(tmp_path / "m" / "model.safetensors").config == model.config


def test_our_weights_without_their_config(tmp_path: Path) -> None:
    vitrail.save(tiny(), tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(LoadError, match=r"Vitrail.*config.json"):
        load(tmp_path / "m")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize(("name", "write"), [("mine.pt", torch.save), ("mine.safetensors", save_file)])
def test_our_state_dict_alone(prefix: str, name: str, write: Callable[..., Any], tmp_path: Path) -> None:
    write({prefix + key: tensor for key, tensor in tiny().state_dict().items()}, tmp_path / name)
    expected = (
        r"Vitrail's tensors without their config.json.*vitrail.create\(…\).load_state_dict.*vitrail.save"
    )
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(LoadError, match=expected):
            load(source)


@pytest.mark.parametrize("method", ["pathlib.Path.open", "pathlib.Path.exists", "pathlib.Path.read_text"])
def test_what_may_not_be_read(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vitrail.save(tiny(), tmp_path / "m")

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(method, refuse)
    with pytest.raises(LoadError, match=f"^{tmp_path / 'm'} cannot be read: this user has no permission$"):
        load(tmp_path / "m")


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(LoadError, match="cannot be read: the name is too long"):
        load("x" * 5000)


def test_another_family(tmp_path: Path) -> None:
    names = ["bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.attention.self.query.weight"]
    save_file({name: torch.zeros(3, 3) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"no family that can be read.*word_embeddings"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(LoadError, match="model type 'bert'"):
        load(tmp_path)


def test_spaces_and_signs_in_the_path(tmp_path: Path) -> None:
    model = tiny()
    folder = tmp_path / "a folder, für alle"
    vitrail.save(model, folder)
    assert same(load(str(folder)).class_token, model.class_token)
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
