"""Recipes: what is read, what lies over what, and what is refused."""

from dataclasses import fields
from pathlib import Path

import pytest

from vitrail.data.readers import NAMED
from vitrail.learn.recipe import (
    BOUNDS,
    PRESETS,
    SMALL,
    Recipe,
    changes,
    choose,
    layered,
    preset,
    read,
    to_toml,
)
from vitrail.models import config_of

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_a_later_layer_lies_over_an_earlier_one() -> None:
    recipe = layered(
        {"epochs": 5, "augment": {"flip": 0.0, "layers": 0}}, {"augment": {"flip": 1}, "lr": 0.1}
    )
    assert (recipe.epochs, recipe.lr) == (5.0, 0.1)
    assert (recipe.augment.flip, recipe.augment.layers) == (1.0, 0)


def test_a_model_is_named_whole_and_changed_in_part() -> None:
    small = {"model": {"name": "vit-ti/4", "stem": "conv", "pool": "mean"}}
    assert layered(small, changes(["model.pool=class"])).model == {**small["model"], "pool": "class"}
    assert layered(small, changes(["model=vit-s/4"])).model == {"name": "vit-s/4"}
    assert layered(small, {"model": "vit-s/4"}).model == {"name": "vit-s/4"}
    both = changes(["model.depth=3", "model=vit-s/4", "model.heads=2"])
    assert layered(small, both).model == {"name": "vit-s/4", "depth": 3, "heads": 2}


def test_of_epochs_and_minutes_the_later_counts() -> None:
    assert layered({"minutes": 3.0}, {"epochs": 7}).minutes is None
    assert layered({"minutes": 3.0}, {"epochs": 7}).epochs == 7
    assert layered({"epochs": 7}, {"minutes": 3}).minutes == 3


def test_words_of_the_command_line() -> None:
    given = ["epochs=3", "augment.scale=[0.5, 1]", "compile=true", "start=a/b c", "learns=2", "minutes=none"]
    recipe = layered(changes(given))
    assert recipe.augment.scale == (0.5, 1.0)
    assert (recipe.compile, recipe.start, recipe.learns, recipe.minutes) == (True, "a/b c", 2, None)
    assert layered(changes(["learns=head"])).learns == "head"


def test_a_word_for_a_table_and_then_its_fields() -> None:
    assert changes(["augment=3", "augment.flip=0"]) == {"augment": {"flip": 0}}
    assert changes(["augment.flip=0", "augment=3"]) == {"augment": 3}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    recipe = layered(
        preset("small", (28, 28)),
        {
            "preset": "small",
            "data": 'a "folder" with ümläut\\',
            "learns": 3,
            "betas": [0.8, 0.95],
            "teacher": None,
        },
    )
    (tmp_path / "recipe.toml").write_text(to_toml(recipe, "one\ntwo"), encoding="utf-8")
    assert layered(read(tmp_path / "recipe.toml")) == recipe
    assert (tmp_path / "recipe.toml").read_text(encoding="utf-8").startswith("# one\n# two\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("epohcs=3", r"no field 'epohcs'; did you mean 'epochs'\?"),
        ("augment.filp=1", r"Augment has no field 'filp'; did you mean 'flip'\?"),
        ("preset=smal", r"unknown preset 'smal'; did you mean 'small'\?"),
        ("objective=distil", "unknown objective 'distil'; did you mean 'distil-"),
        ("precision=fp16", "precision='fp16' is not what the field takes: 'auto' or 'float32' or 'bfloat16'"),
        ("epochs=many", "epochs='many' is not what the field takes: float"),
        ("batch=1.5", "batch=1.5 is not what the field takes: int"),
        ("learns=tail", "learns='tail' is not"),
        ("epochs=-1", "epochs=-1.0 is not possible; expected"),
        ("epochs=inf", r"epochs=inf is not possible; expected from 1e-12 to 1e\+12"),
        ("minutes=inf", "minutes=inf is not possible"),
        ("cache=inf", "cache=inf is not possible"),
        (f"seed={2**64}", f"seed={2**64} is not possible; expected from 0 to 9"),
        ("workers=1000000", "workers=1000000 is not possible; expected from 1 to 1024"),
        (f"batch={10**30}", "is not possible"),
        ("betas=[0.9, 1.5]", r"betas=\(0\.9, 1\.5\) are not possible; expected two from 0 to below 1"),
        ("learns=-1", "learns=-1 is not possible; expected full, head, or a number of blocks"),
        ("model=5", "model=5 is no model; expected a name"),
        ("model.labels=5", "model.labels is not chosen like that"),
        ("model.image_size=32", "model.image_size is not chosen like that: image_size=… decides it"),
        ("smoothing=1", r"smoothing=1.0 is not possible; expected from 0 to 0\.999"),
        ("batch=7", "batch=7 does not divide into 1 parts of whole pairs; expected a multiple of 2"),
        ("accumulate=3", "expected a multiple of 6"),
        ("objective=distil-hard", "expected both objective=distil-hard .* and teacher=MODEL"),
        ("teacher=x", "or neither"),
        ("epochs", "'epochs' is no change to the recipe; write field=value"),
        ("augment.flip=2", "flip"),
    ],
)
def test_what_is_wrong_is_said(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layered(changes([given]))


def test_broken_toml_is_said(tmp_path: Path) -> None:
    for content, why in ((b"epochs = = 3", "line 1"), (b"\xff\xfe\0", "utf-8")):
        (tmp_path / "x.toml").write_bytes(content)
        with pytest.raises(ValueError, match=rf"x\.toml is no valid TOML: .*{why}"):
            read(tmp_path / "x.toml")


def test_bounds_are_of_fields() -> None:
    assert BOUNDS.keys() <= {field.name for field in fields(Recipe)}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("side", [None, (8, 8), (28, 28), (64, 64)])
def test_presets_are_recipes_and_their_models_exist(name: str, side: tuple[int, int] | None) -> None:
    recipe = layered(preset(name, side), {"preset": name})
    if "name" in recipe.model:
        config = config_of(**recipe.model, image_size=recipe.image_size or side or (8, 8))
        assert config.width % config.heads == 0
        assert config.width // config.heads >= 32
        if name == "small":
            assert 4 <= min(config.grid) <= max(config.grid) <= 12


@pytest.mark.parametrize(
    ("given", "kind", "pictures", "expected"),
    [
        ({}, NAMED["digits"].what, 1797, "digits"),
        ({"data": "./digits"}, "a folder", 3_000, "small"),
        ({"data": "x"}, "a folder", SMALL, "none"),
        ({"data": "x", "start": "y"}, "a folder", 3_000, "tune"),
    ],
)
def test_the_preset_is_chosen_and_said(
    given: dict[str, str], kind: str, pictures: int, expected: str
) -> None:
    name, why = choose(layered(given), kind, pictures)
    assert name == expected
    assert why


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_open_with_what_to_expect(path: Path) -> None:
    recipe = layered(read(path))
    heading = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    for word in ("Paper", "Command", "Time", "Score"):
        assert any(line.startswith(f"# {word}") for line in heading), word
    assert f"vitrail train recipes/{path.name}" in "\n".join(heading)
    if "name" in recipe.model:
        config_of(**{"image_size": recipe.image_size or 32, **recipe.model})
