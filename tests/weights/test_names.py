"""Tables of names, read both ways."""

import pytest
import torch

from compare import same
from vitrail.weights.errors import LoadError, SaveError
from vitrail.weights.files import Stored
from vitrail.weights.names import Form, ours_from_theirs, places, theirs_from_ours

TABLE = {
    "blocks.{}.(query|key).*": "layer{+1}.qk.*",
    "stages.{}.{}.conv": "{+1}/{}/kernel",
    "head.weight": ("head", Form(join=lambda parts: parts[0].t(), split=lambda tensor, _: [tensor.t()])),
    "rest.*": "others.*",
}
OURS = {
    "blocks.0.query.weight": torch.arange(6.0).view(2, 3),
    "blocks.0.key.weight": torch.arange(9.0).view(3, 3),
    "blocks.11.key.weight": torch.ones(3, 3),
    "blocks.11.query.weight": torch.zeros(1, 3),
    "stages.0.1.conv": torch.ones(1),
    "stages.1.0.conv": torch.zeros(1),
    "head.weight": torch.arange(6.0).view(2, 3),
    "rest.a.b": torch.tensor(7),
}
THEIRS = {
    "layer1.qk.weight": torch.cat([torch.arange(6.0), torch.arange(9.0)]).view(5, 3),
    "layer12.qk.weight": torch.tensor([0.0, 1, 1, 1])[:, None].expand(4, 3),
    "1/1/kernel": torch.ones(1),
    "2/0/kernel": torch.zeros(1),
    "head": torch.arange(6.0).view(2, 3).t(),
    "others.a.b": torch.tensor(7),
}


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    return {name: Stored(tensor.shape, tensor.dtype, tensor.detach) for name, tensor in tensors.items()}


def read(theirs: dict[str, torch.Tensor], unused: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    shapes = {name: tensor.to("meta") for name, tensor in OURS.items()}
    return ours_from_theirs(places(TABLE, OURS, "it"), shapes, stored(theirs), unused=unused, where="it")


def test_out() -> None:
    written = theirs_from_ours(places(TABLE, OURS, "it"), OURS)
    assert written.keys() == THEIRS.keys()
    assert all(same(written[name], THEIRS[name]) for name in THEIRS)


def test_in() -> None:
    back = read(THEIRS)
    assert back.keys() == OURS.keys()
    assert all(same(back[name], OURS[name]) for name in OURS)


def test_what_was_read_is_its_own() -> None:
    theirs = {name: tensor.clone() for name, tensor in THEIRS.items()}
    back = read(theirs)
    for tensor in theirs.values():
        tensor.zero_()
    assert all(same(back[name], OURS[name]) for name in OURS)
    assert all(tensor.is_contiguous() for tensor in back.values())
    pointers = {tensor.untyped_storage().data_ptr() for tensor in back.values()}
    assert len(pointers) == len(back)


def test_a_name_that_the_table_lacks() -> None:
    with pytest.raises(SaveError, match="it has no place for surprise"):
        places(TABLE, [*OURS, "surprise"], "it")


def test_what_is_unused_may_be_there_or_not() -> None:
    for extra in ({}, {"mask": torch.zeros(3)}):
        assert read(THEIRS | extra, frozenset({"mask"})).keys() == OURS.keys()


def test_every_problem_is_told_at_once() -> None:
    theirs = {**THEIRS, "more": torch.zeros(1), "head": torch.zeros(3, 3)}
    del theirs["1/1/kernel"]
    with pytest.raises(LoadError) as error:
        read(theirs)
    assert str(error.value).splitlines()[1:4] == [
        "  1 missing: 1/1/kernel",
        "  1 unexpected: more",
        "  1 of another shape: head (3, 3) instead of (3, 2)",
    ]


def test_nothing_is_read_before_all_fits() -> None:
    def explode() -> torch.Tensor:
        raise AssertionError("was read")

    theirs = {name: part._replace(read=explode) for name, part in stored(THEIRS).items()}
    del theirs["head"]
    shapes = {name: tensor.to("meta") for name, tensor in OURS.items()}
    with pytest.raises(LoadError, match="1 missing: head"):
        ours_from_theirs(places(TABLE, OURS, "it"), shapes, theirs, unused=(), where="it")
