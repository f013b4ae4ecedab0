"""Hub ids, from a cache of exactly the hub's form, offline."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import errors

from compare import same
from tiny import tiny
from vitrail.weights import LoadError, convert, load, save

MAIN = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


def publish(folder: Path, cache: Path, name: str, commit: str = MAIN, ref: str | None = "main") -> None:
    """Puts a folder's files where huggingface_hub keeps what it has downloaded."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = home / "blobs" / f"{commit[:20]}{number:020x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    if ref:
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two revisions of one model, and one model in other forms."""
    cache = tmp_path / "cache"
    for commit, ref, labels in ((MAIN, "main", "abcde"), (OLDER, "v1", "vwxyz")):
        save(tiny(labels=tuple(labels)), tmp_path / commit)
        publish(tmp_path / commit, cache, "org/model", commit, ref)
    for form in ("timm", "transformers"):
        convert(tmp_path / MAIN, tmp_path / form, to=form)
        publish(tmp_path / form, cache, f"{form}/vit_tiny.in1k")
    return cache


@pytest.mark.parametrize("name", ["org/model", "hf-hub:org/model", "hf_hub:org/model", "org/model@main"])
def test_by_name(name: str, cache: Path) -> None:
    assert load(name, cache_dir=cache).labels == tuple("abcde")


@pytest.mark.parametrize("revision", ["v1", OLDER])
def test_by_revision(revision: str, cache: Path) -> None:
    for model in (
        load("org/model", cache_dir=cache, revision=revision),
        load(f"hf-hub:org/model@{revision}", cache_dir=str(cache)),
    ):
        assert model.labels == tuple("vwxyz")


@pytest.mark.parametrize("name", ["timm/vit_tiny.in1k", "transformers/vit_tiny.in1k"])
def test_other_forms(name: str, cache: Path) -> None:
    one, other = load(name, cache_dir=cache), load("org/model", cache_dir=cache)
    assert one.labels == other.labels
    assert one.preprocess == other.preprocess
    assert same(one.class_token, other.class_token)


def test_the_usual_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert load("org/model").labels == tuple("abcde")


def test_a_repository_of_arrays(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "m")
    (tmp_path / "npz").mkdir()
    convert(tmp_path / "m", tmp_path / "npz" / "ViT-Ti_8.npz", to="npz")
    publish(tmp_path / "npz", tmp_path / "cache", "google/vit")
    assert same(
        load("google/vit", cache_dir=tmp_path / "cache").class_token, load(tmp_path / "m").class_token
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "org/none",
            "org/none is no folder or file here, and could not be had from the hub: HF_HUB_OFFLINE is set, "
            "and nothing was downloaded before$",
        ),
        ("org/model@v9", "at revision v9"),
        ("org/--bad--", "org/--bad-- is no folder or file here"),
        ("no such file.pth", "does not exist. Expected a folder, a file, or a hub id"),
        ("one/two/three", "does not exist"),
        ("", "does not exist|holds"),
        ("https://huggingface.co/org/model", "does not exist"),
    ],
)
def test_what_cannot_be_had(name: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(cache)
    with pytest.raises(LoadError, match=reason):
        load(name, cache_dir=cache)


@pytest.mark.parametrize("name", ["vit-b/16", "ViT-B/16", "vit-s/7", "dinov2-reg-g/14"])
def test_a_models_name_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(LoadError, match=rf"'{name}' is the name of a model.*vitrail.create\('{name}'\)"):
        load(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vit-tiny/16", "vit-ti/16"),
        ("vit_base_patch16_224", "vit-b/16"),
        ("vit-b16", "vit-b/16"),
        ("deit_small_patch16_224", "deit-s/16"),
        ("dinov2-small/14", "dinov2-s/14"),
        ("google/vit-base-patch16-224", None),
        ("org/model", None),
        ("photos", None),
    ],
)
def test_what_looks_like_a_models_name(
    name: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError) as error:
        load(name, cache_dir=tmp_path)
    assert ("If you mean the model" in str(error.value)) == bool(meant)
    assert meant is None or f"vitrail.create('{meant}')" in str(error.value)


def caused(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error


def refusal(kind: type[errors.HfHubHTTPError]) -> Exception:
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            caused(
                errors.LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\n…"),
                OSError("[Errno -2] Name or service not known"),
            ),
            r"hub: it cannot be reached \(Name or service not known\), and nothing was downloaded before$",
        ),
        (refusal(errors.GatedRepoError), "its owner wants to be asked"),
        (refusal(errors.RepositoryNotFoundError), "it has none of that name, or a private one"),
        (refusal(errors.RevisionNotFoundError), "there is no such revision"),
        (OSError(28, "No space left on device"), "hub: No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_in_plain_words(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(LoadError, match=reason):
        load("org/model", cache_dir=tmp_path)


def test_a_repository_without_weights(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("soon")
    publish(tmp_path / "empty", tmp_path / "cache", "org/empty")
    with pytest.raises(LoadError, match=r"holds no weights|could not be had"):
        load("org/empty", cache_dir=tmp_path / "cache")


def test_only_what_is_needed_is_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best file of weights; what else a repository holds stays there."""
    asked: list[list[str]] = []
    folder = cache / "models--org--model" / "snapshots" / MAIN
    configs = ["config.json", "preprocessor_config.json"]

    def download(name: str, *, allow_patterns: list[str], token: object, **_: object) -> str:
        assert (name, token) == ("org/other", "secret")
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load("org/other", token="secret")
    assert asked == [[*configs, "model.safetensors"]]
    asked.clear()
    folder = cache / "elsewhere"
    folder.mkdir()
    with pytest.raises(LoadError, match="holds no weights"):
        load("org/other", token="secret")
    assert asked == [
        [*configs, "model.safetensors"],
        [*configs, "model.safetensors.index.json", "model-*.safetensors"],
        [*configs, "pytorch_model.bin"],
        [*configs, "pytorch_model.bin.index.json", "pytorch_model-*.bin"],
        [*configs, "*.npz", "*.pth"],
    ]
