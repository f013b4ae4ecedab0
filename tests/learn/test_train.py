"""From a place of pictures to a run folder, on the digits that scikit-learn carries."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

import vitrail
from compare import same
from learning import digits
from vitrail.data.preprocess import Preprocess
from vitrail.learn import fit
from vitrail.learn.evaluate import evaluate
from vitrail.learn.fit import Stopped
from vitrail.learn.state import STATES, read_lines, read_state
from vitrail.learn.train import train

SHAPE = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
SMALL = [
    *(f"model.{name}={value}" for name, value in SHAPE.items()),
    "batch=32",
    "attention=fused",  # measured, it might be another the next time
    "precision=float32",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs/ will be."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """A hundred digits in an .npz."""
    images, labels = digits()
    pixels = ((images[:, 0] + 1) * 127.5).round().byte()
    np.savez(tmp_path / "few.npz", images=pixels.numpy(), labels=labels.numpy())
    return str(tmp_path / "few.npz")


def test_the_built_in_digits(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(None, [*SMALL, "epochs=2"])
    assert folder == Path("runs/digits")
    said = capsys.readouterr().out
    for expected in (
        "preset digits: ",
        "1,437 train, 180 val, 180 test, of 10 classes, seen at 16x16",
        "2 epochs of 44 steps of 32, float32, processes: 1 (cpu)",
        "epoch 2.0 of 2  step 88 of 88  loss ",
        "pictures   180, test of digits",
        "report     runs/digits/report.html",
    ):
        assert expected in said
    for kind in ("last", "best"):
        model = vitrail.load(folder / kind)
        assert model.labels == tuple("0123456789")
        assert model.preprocess == Preprocess(
            resize=(16, 16), interpolation="bicubic", mean=(0.5,), std=(0.5,)
        )
    best = vitrail.load(folder / "best").state_dict()
    assert all(same(tensor, best[name]) for name, tensor in vitrail.load(folder).state_dict().items())
    state = read_state(folder)
    assert state is not None
    kept = vitrail.load(folder / "last").state_dict()
    assert all(same(state.tensors[f"average/{name}"], tensor) for name, tensor in kept.items())
    assert [line["step"] for line in read_lines(folder, 10**9) if line["part"] == "val"] == [44, 88]
    assert json.loads((folder / "data.json").read_text())["bad"]["train"] == {}


def test_a_second_run_has_a_folder_of_its_own(place: Path, pictures: str) -> None:
    assert train(pictures, [*SMALL, "epochs=0.5"]) == Path("runs/few")
    assert train(pictures, [*SMALL, "epochs=0.5"]) == Path("runs/few-2")
    with pytest.raises(
        ValueError, match="runs/few already holds a run; go on with --resume, or choose another --out"
    ):
        train(pictures, [*SMALL], out=Path("runs/few"))


def test_stopped_and_resumed_is_the_same(place: Path, pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an epoch, with augmentation and mixing; the recipe comes from the folder."""
    asked = [*SMALL, "epochs=6", "augment.layers=2", "augment.erase=0.5", "mixup=0.2", "batch=16"]
    train(pictures, asked, out=place / "undisturbed")
    take_step, steps = fit.take_step, []

    def interrupting(*arguments: object) -> object:
        steps.append(arguments)
        return {**take_step(*arguments), "stop": float(len(steps) == 7)}

    monkeypatch.setattr(fit, "take_step", interrupting)
    with pytest.raises(Stopped, match="after step 7 of"):
        train(pictures, asked, out=place / "disturbed")
    monkeypatch.undo()
    monkeypatch.chdir(place)
    train(out=place / "disturbed", resume=True)
    one, two = (read_state(place / name) for name in ("undisturbed", "disturbed"))
    assert one is not None
    assert two is not None
    assert all(same(one.tensors[name], two.tensors[name]) for name in one.tensors)
    assert one.facts["best"] == two.facts["best"]


def test_resume_takes_the_latest_run_and_its_changes(place: Path, pictures: str) -> None:
    with pytest.raises(
        ValueError, match="there is no run in runs/ to go on with; name its folder with --out"
    ):
        train(resume=True)
    with pytest.raises(ValueError, match="holds no run to go on with"):
        train(out=place, resume=True)
    train(pictures, [*SMALL, "epochs=1"])
    assert train(assignments=["epochs=2"], resume=True) == Path("runs/few")
    state = read_state(place / "runs" / "few")
    assert state is not None
    assert state.facts["step"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["model.width=32"],
            r"another model; .* with another --out and perhaps --from .*\n.*another shape: ",
        ),
        (["model.stem=patch"], r"another model; .*\n  \d+ unexpected: patches\.stem"),
        (["data=letters.npz"], r"runs/few was begun with data=.*few\.npz, not letters\.npz; .*another --out"),
        (["seed=3"], "was begun with seed=0, not 3"),
        (["test=0"], "was begun with test=0.1, not 0"),
    ],
)
def test_a_run_does_not_go_on_as_another(
    place: Path, pictures: str, changes: list[str], message: str
) -> None:
    """Refused with its recipe as it was, so that it can still go on."""
    run = train(pictures, [*SMALL, "epochs=1"])
    assert run is not None
    with np.load(pictures) as found:
        np.savez(
            place / "letters.npz", images=found["images"], labels=np.array([*"abcdefghij"])[found["labels"]]
        )
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        train(assignments=changes, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_what_may_change_when_a_run_goes_on(place: Path, pictures: str) -> None:
    train(pictures, [*SMALL, "epochs=1", "ema=0"])
    train(assignments=["epochs=2", "ema=0.9", "learns=head"], resume=True)
    train(assignments=["epochs=3", "ema=0", "learns=full"], resume=True)
    state = read_state(place / "runs" / "few")
    assert state is not None
    assert state.facts["step"] == 6


def test_damaged_states_are_not_begun_over(place: Path, pictures: str) -> None:
    run = train(pictures, [*SMALL, "epochs=1"])
    assert run is not None
    for name in STATES:
        (run / name).write_bytes(b"torn")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"runs/few cannot go on, .*--from runs/few/best"):
        train(resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for name in STATES:
        (run / name).unlink()  # killed before the first of them was there
    train(out=run, resume=True)
    assert read_state(run) is not None


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_read(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(ValueError, match="file cannot be a run folder"):
        train("nowhere", out=place / "file")
    (place / "busy").mkdir()
    with (
        FileLock(place / "busy" / ".lock"),
        pytest.raises(ValueError, match="busy is being written to by another run"),
    ):
        train("nowhere", out=place / "busy")


def test_a_dry_run_writes_nothing(place: Path, pictures: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    assert train(pictures, [*SMALL, "minutes=1", "precision=auto"], dry_run=True) is None
    said = capsys.readouterr().out
    assert "80 train, 10 val, 10 test" in said
    assert "preset small: 80 pictures are few to learn from scratch: convolutional stem" in said
    assert "pictures/s, so about 0:57; " in said  # 95 % of the minute
    assert "GiB of memory" in said
    assert sorted(place.rglob("*")) == before


def test_minutes_become_epochs_and_stay(place: Path, pictures: str) -> None:
    folder = train(pictures, [*SMALL, "minutes=0.01", "precision=auto"])
    assert folder is not None
    text = (folder / "recipe.toml").read_text()
    assert "minutes =" not in text
    assert "auto" not in text.replace('device = "auto"', "")
    assert "epochs = " in text


def test_from_weights_and_their_head_alone(
    place: Path, pictures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    start = vitrail.create("vit-ti/4", **SHAPE, image_size=8, classes=3)
    vitrail.save(start, place / "start")
    changes = ["epochs=1", "batch=16", "precision=float32", "learns=head", "ema=0"]
    folder = train(pictures, changes, start=str(place / "start"))
    assert folder is not None
    assert "preset tune: " in capsys.readouterr().out
    tuned = vitrail.load(folder / "last")
    before = start.state_dict()
    changed = {name for name, tensor in tuned.state_dict().items() if not (same(tensor, before[name]))}
    assert changed == {"head.weight", "head.bias"}
    assert tuned.preprocess == start.preprocess
    assert tuned.labels == tuple("0123456789")


def test_distilling_from_a_run(place: Path, pictures: str) -> None:
    teacher = train(pictures, [*SMALL, "epochs=1"])
    student = [*SMALL, "epochs=1", "model=deit-ti/4", "objective=distil-hard", f"teacher={teacher}"]
    folder = train(pictures, [*student, "model.pool=class"])
    assert folder is not None
    assert vitrail.load(folder / "best").config.distillation_token


@pytest.mark.parametrize(
    ("given", "start", "message"),
    [
        (["batch=30", "accumulate=2"], None, "batch=30 does not divide"),
        (["model=vit-tii/4"], None, "no model is called 'vit-tii/4'; did you mean 'vit-ti/"),
        (["model.heds=2"], None, "no field 'heds'; did you mean 'heads'"),
        (["model=vit-ti/4"], "somewhere", "are two beginnings; give one"),
        ([], "nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    place: Path, pictures: str, given: list[str], start: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(pictures, given, start=start)
    assert not (place / "runs").exists()


def test_a_run_is_no_place_of_pictures(place: Path, pictures: str) -> None:
    run = train(pictures, [*SMALL, "epochs=0.5"])
    with pytest.raises(
        ValueError, match=f"{run} is a run, not pictures; go on with it by --resume --out {run}"
    ):
        train(str(run))


def test_resuming_takes_no_other_weights_or_pictures(place: Path, pictures: str) -> None:
    run = train(pictures, [*SMALL, "epochs=0.5"])
    for given, what in (({"source": "digits"}, "data="), ({"start": "digits"}, "start=")):
        with pytest.raises(ValueError, match=f"{run} was begun with {what}.*, not digits; a run goes on"):
            train(**given, out=run, resume=True)


def test_the_same_command_begins_and_goes_on(
    place: Path, pictures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured when it began is not measured again, though the command asks for it."""
    asked = [*SMALL[:-1], "minutes=0.01"]  # the precision is measured, too
    run = train(pictures, asked, out=place / "run", resume=True)
    assert run is not None
    before = (run / "recipe.toml").read_text()
    assert "few.npz" in before
    assert "auto" not in before.replace('device = "auto"', "")
    capsys.readouterr()
    train("few.npz", asked, out=run, resume=True)
    assert (run / "recipe.toml").read_text() == before
    said = capsys.readouterr().out
    assert "epochs, as minutes count when a run begins" in said
    assert "measured" not in said


def test_pictures_that_changed_are_not_gone_on_with(place: Path, pictures: str) -> None:
    """As many, but others: those learned from could be judged by."""
    train(pictures, [*SMALL, "epochs=1"])
    with np.load(pictures) as found:
        np.savez(pictures, images=found["images"], labels=np.roll(found["labels"], 1))
    with pytest.raises(ValueError, match=r"does not give the pictures that runs/few was begun with"):
        train(resume=True)


def test_a_folder_that_holds_something_else_is_not_written_into(place: Path, pictures: str) -> None:
    (place / "mine" / "best").mkdir(parents=True)
    with pytest.raises(ValueError, match="mine is no run, but holds best, which a run would write over"):
        train(pictures, SMALL, out=place / "mine")


def test_weights_that_know_the_pictures_kept_apart_are_told(
    place: Path, pictures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(pictures, [*SMALL, "epochs=0.5"])
    capsys.readouterr()
    for seed, leaks in ((0, False), (1, True)):
        train(pictures, ["epochs=0.5", "batch=32", "precision=float32", f"seed={seed}"], start=f"{run}/best")
        assert ("the score is too good, because runs/few/best has" in capsys.readouterr().out) == leaks


def test_a_folder_called_digits_is_not_the_built_in_ones(
    place: Path, pictures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "digits").mkdir()
    train(None, [*SMALL, "epochs=0.1"])
    assert "test of digits" in capsys.readouterr().out


def test_a_written_recipe_trains_the_same_again(place: Path, pictures: str) -> None:
    """From anywhere, and whatever the presets become."""
    run = train("few.npz", [*SMALL, "epochs=1"])
    assert run is not None
    text = (run / "recipe.toml").read_text()
    assert 'preset = "none"' in text
    assert f'data = "{pictures}"' in text
    again = train(str(run / "recipe.toml"), out=place / "again")
    assert again is not None
    one, two = (read_state(folder) for folder in (run, again))
    assert one is not None
    assert two is not None
    assert all(same(one.tensors[name], two.tensors[name]) for name in one.tensors)


def test_a_recipe_goes_on_as_its_file_says_now(place: Path, pictures: str) -> None:
    """The same command begins and goes on; another seed is another run; minutes count at the beginning."""
    text = f'preset = "small"\ndata = "{pictures}"\nbatch = 32\nepochs = 1.0\nprecision = "auto"\n'
    model = '\n[model]\nname = "vit-ti/4"\nwidth = 16\ndepth = 1\nheads = 2\nmlp_width = 32\n'
    recipe = place / "mine.toml"
    recipe.write_text(text + model)
    for epochs, steps in ((1.0, 2), (2.0, 4)):
        recipe.write_text(text.replace("epochs = 1.0", f"epochs = {epochs}") + model)
        run = train(str(recipe), out=place / "run", resume=True)
        assert run is not None
        state = read_state(run)
        assert state is not None
        assert state.facts["step"] == steps
    recipe.write_text(f"seed = 1\n{text}{model}")
    with pytest.raises(ValueError, match="was begun with seed=0, not 1"):
        train(str(recipe), out=place / "run", resume=True)
    train(str(recipe), ["seed=0"], out=place / "run", resume=True)  # the words count more than the file


def test_a_table_of_full_paths_is_the_same_from_anywhere(
    place: Path, pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names begin with the folder's full path, whether the folder was named by it or not."""
    (place / "photos").mkdir()
    rows = ["path,label"]
    with np.load(pictures) as found:
        for number, (pixels, label) in enumerate(
            zip(found["images"][:60], found["labels"][:60], strict=True)
        ):
            file = place / "photos" / f"{number}.png"
            Image.fromarray(pixels).save(file)
            rows.append(f"{file},{label}")
    (place / "photos" / "labels.csv").write_text("\n".join(rows))
    run = train("photos/labels.csv", [*SMALL, "epochs=1"], out=place / "run")
    monkeypatch.chdir("/")
    assert train(out=run, assignments=["epochs=2"], resume=True) == run
    assert evaluate(str(place / "run" / "best" / "model.safetensors")) is not None


def test_what_has_no_training_pictures_says_so(place: Path, pictures: str) -> None:
    with np.load(pictures) as found:
        np.savez(place / "x.npz", x_test=found["images"], y_test=found["labels"])
    with pytest.raises(ValueError, match=r"x\.npz has no training pictures, only test"):
        train("x.npz", [*SMALL, "test=0"])
