"""The loop: what it computes, what it keeps, and what interrupts it."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import learning
import vitrail
from compare import distance, same
from learning import PER_EPOCH, STEPS, recipe, run
from vitrail.learn import learner
from vitrail.learn.fit import Stopped, fit
from vitrail.learn.learner import DivergedError, begin, validate
from vitrail.learn.objectives import Lesson, classify
from vitrail.learn.state import STATES, read_lines, read_state

PROGRAM = learning.__file__


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, recipe())
    return folder


def alike(folder: Path, other: Path) -> bool:
    """Bit for bit: weights, averages, optimiser, the saved models, and every validation."""
    one, two = read_state(folder), read_state(other)
    assert one is not None
    assert two is not None
    metrics = [read_lines(f, 10**9) for f in (folder, other)]
    validations = [
        [(line["step"], line["loss"], line["accuracy"]) for line in lines if line["part"] == "val"]
        for lines in metrics
    ]
    for lines in metrics:
        places = [(line["part"], line["step"]) for line in lines]
        assert len(places) == len(set(places)), "a line of metrics is there twice"
    return (
        validations[0] == validations[1]
        and one.facts["best"] == two.facts["best"]
        and one.tensors.keys() == two.tensors.keys()
        and all(same(one.tensors[name], two.tensors[name]) for name in one.tensors)
        and all(
            (folder / path).read_bytes() == (other / path).read_bytes()
            for path in ("last/model.safetensors", "best/model.safetensors", "last/config.json")
        )
    )


def test_it_learns(tmp_path: Path) -> None:
    run(tmp_path, recipe(mixup=0, cutmix=0, ema=0, lr=1e-2, save_seconds=60), steps=100)
    lines = [line for line in read_lines(tmp_path, 10**9) if line["part"] == "val"]
    assert lines[-1]["accuracy"] > 0.8 > 0.3 > lines[0]["accuracy"]


def test_a_run_is_the_same_every_time_but_for_its_seed(undisturbed: Path, tmp_path: Path) -> None:
    run(tmp_path / "again", recipe())
    run(tmp_path / "other", recipe(seed=1))
    assert alike(undisturbed, tmp_path / "again")
    assert not alike(undisturbed, tmp_path / "other")


@pytest.mark.parametrize("steps", [1, PER_EPOCH, STEPS - 1])
def test_stopped_and_resumed_is_the_same(undisturbed: Path, tmp_path: Path, steps: int) -> None:
    class Interrupting(nn.Module):
        def __call__(self, model, batch):
            if model.training and model.calls == steps:
                os.kill(os.getpid(), signal.SIGTERM)
            model.calls += model.training
            return classify(smoothing=recipe().smoothing)(model, batch)

    model = learning.tiny(recipe())
    model.calls = 1
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=rf"after step {steps} of.*\n.*vitrail train --resume --out {tmp_path}"):
        run(tmp_path, recipe(save_seconds=1e9), model=model, objective=Interrupting())
    assert signal.getsignal(signal.SIGTERM) is handler
    run(tmp_path, recipe())
    assert alike(undisturbed, tmp_path)


def test_killed_at_any_file_operation(undisturbed: Path, tmp_path: Path) -> None:
    """SIGKILL before the 1st, 2nd … rename, sync, or removal of a file; then resumed."""
    ranges = [(3, 53, 3), (53, 130, 7)]  # a whole round of writing, then later ones
    for number, span in enumerate(ranges):
        subprocess.run(
            [sys.executable, PROGRAM, str(tmp_path / str(number)), "kill", *map(str, span)],
            check=True,
            capture_output=True,
        )
    folders = sorted(tmp_path.glob("*/*"))
    assert len(folders) == sum(len(range(*span)) for span in ranges)
    for folder in folders:
        assert alike(undisturbed, folder), folder
        assert vitrail.load(folder / "last") is not None


@pytest.mark.parametrize("delay", [0.05, 0.3])
def test_killed_from_outside(undisturbed: Path, tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen([sys.executable, PROGRAM, str(tmp_path)], stdout=subprocess.DEVNULL)
    while not (tmp_path / STATES[0]).exists():
        time.sleep(0.01)
        assert process.poll() is None
    time.sleep(delay)
    process.kill()
    process.wait()
    run(tmp_path, recipe())
    assert alike(undisturbed, tmp_path)


@pytest.mark.parametrize("damage", ["short", "changed", "empty"])
def test_a_torn_state_gives_way_to_the_one_before(undisturbed: Path, tmp_path: Path, damage: str) -> None:
    run(tmp_path, recipe())
    newest = max((tmp_path / name for name in STATES), key=lambda path: path.stat().st_mtime_ns)
    content = newest.read_bytes()
    changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    newest.write_bytes({"short": content[:-100], "changed": changed, "empty": b""}[damage])
    state = read_state(tmp_path)
    assert state is not None
    assert state.facts["step"] == STEPS - 1
    (tmp_path / "last" / "model.safetensors").write_bytes(content[:50])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"part": "train", "st')
    run(tmp_path, recipe())
    assert alike(undisturbed, tmp_path)


def test_the_best_is_what_validation_found_best(tmp_path: Path) -> None:
    learner = run(tmp_path, recipe(ema=0), scores=[0.2, 0.5, 0.5])
    assert learner.best is not None
    assert (learner.best["step"], learner.best["accuracy"]) == (6, 0.5), "as good, with less loss"
    learner = run(tmp_path / "falling", recipe(ema=0), scores=[0.2, 0.5, 0.3])
    assert learner.best is not None
    assert (learner.best["step"], learner.best["accuracy"]) == (4, 0.5)
    last, best = (load_file(tmp_path / "falling" / kind / "model.safetensors") for kind in ("last", "best"))
    assert same(last["head.weight"], learner.model.head.weight)
    assert not same(best["head.weight"], learner.model.head.weight)


def test_accumulated_parts_learn_the_same(tmp_path: Path) -> None:
    model = {**learning.MODEL, "stem": "patch"}  # batch norm sees parts, not the batch
    learners = [run(tmp_path / str(n), recipe(model=model, accumulate=n)) for n in (1, 4)]
    whole, parts = (learner.model.state_dict() for learner in learners)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-3, atol=1e-5)


def test_the_average_is_what_is_kept(tmp_path: Path) -> None:
    learner = run(tmp_path, recipe())
    assert learner.average is not None
    kept = load_file(tmp_path / "last" / "model.safetensors")
    assert all(same(kept[name], tensor) for name, tensor in learner.average.state_dict().items())
    assert not same(kept["head.weight"], learner.model.head.weight)


def test_a_loss_that_is_no_number_stops_and_says_where(tmp_path: Path) -> None:
    small = recipe()
    model = learning.tiny(small)
    model.blocks[1].mlp.up.register_forward_hook(
        lambda module, inputs, output: output * (math.nan if model.fail else 1)
    )
    model.fail = False

    def objective(model: nn.Module, batch: object) -> Lesson:
        model.calls += model.training
        model.fail = model.calls >= 4
        return classify()(model, batch)

    model.calls = 0
    with pytest.raises(
        DivergedError, match=r"step 4: the loss is nan.* the layer blocks\.1\.mlp\.up\b.*--resume"
    ):
        run(tmp_path, small, model=model, objective=objective)
    state = read_state(tmp_path)
    assert state is not None
    assert state.facts["step"] == 3
    assert all(tensor.isfinite().all() for tensor in state.tensors.values() if tensor.is_floating_point())
    assert all(p.isfinite().all() for p in vitrail.load(tmp_path / "last").parameters())


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["head.weight", "blocks.0.mlp.up.weight"])
def test_a_gradient_that_is_no_number_stops(tmp_path: Path, name: str, wrong: float) -> None:
    model = learning.tiny(recipe())
    model.get_parameter(name).register_hook(lambda gradient: gradient * wrong)
    with pytest.raises(DivergedError, match=rf"the loss is 2\.\d+, .* the gradient of {re.escape(name)}\."):
        run(tmp_path, recipe(), model=model)


@pytest.mark.parametrize(("clip", "greatest"), [(0.01, 0.01), (0, math.inf)])
def test_gradients_are_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float, greatest: float
) -> None:
    norms: list[float] = []

    def step(optimiser: torch.optim.Optimizer) -> None:
        gradients = [p.grad.flatten() for group in optimiser.param_groups for p in group["params"]]
        norms.append(torch.cat(gradients).norm().item())

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    run(tmp_path, recipe(clip=clip), steps=2)
    assert 0.01 * 0.999 < min(norms) <= max(norms) < greatest * 1.001
    assert max(norms) > 0.1 or clip
    told = next(line["norm"] for line in read_lines(tmp_path, 2) if line["part"] == "train")
    assert told > 0.1  # the norm from before


def test_a_spike_of_the_loss_is_no_reason_to_stop(tmp_path: Path) -> None:
    def objective(model: nn.Module, batch: object) -> Lesson:
        lesson = classify()(model, batch)
        return lesson._replace(loss=lesson.loss * 1e6) if model.training else lesson

    assert run(tmp_path, recipe(), objective=objective).step == STEPS


def test_compiled_blocks_learn_the_same(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    whole = nn.Module.compile

    def traced(module: nn.Module) -> None:
        compiled.append(type(module).__name__)
        whole(module, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", traced)
    run(tmp_path, recipe(compile=True))
    assert compiled == ["Block", "Block"]
    one, two = (load_file(folder / "last" / "model.safetensors") for folder in (undisturbed, tmp_path))
    assert one.keys() == two.keys()
    assert all(distance(one[name], two[name]) < 1e-4 for name in one if not name.endswith("key.bias"))


def test_any_module_and_objective_will_do(tmp_path: Path) -> None:
    """A line through points, whose model nobody but its own `keep` knows how to write."""

    class Points(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    def batches(step: int) -> Iterator[Points]:
        while True:
            x = torch.randn(32, 1, generator=torch.Generator().manual_seed(step))
            yield Points(x, 3 * x - 2)
            step += 1

    def objective(model: nn.Module, batch: Points) -> Lesson:
        return Lesson((model(batch.x) - batch.y).square().mean(), {})

    plain = recipe(lr=0.1, ema=0)
    line = begin(nn.Linear(1, 1), plain)
    kept: dict[str, float] = {}
    fit(
        line,
        objective,
        batches,
        lambda model: validate(model, objective, [next(batches(1000))], plain, learning.ALONE),
        plain,
        None,
        lambda model, kind: kept.update({kind: model.weight.item()}),
        steps=200,
        per_epoch=50,
        period=50,
        folder=tmp_path,
        here=learning.ALONE,
    )
    assert line.model.weight.item() == pytest.approx(3, abs=0.05)
    assert line.model.bias.item() == pytest.approx(-2, abs=0.05)
    assert kept["last"] == line.model.weight.item()
    assert [line["step"] for line in read_lines(tmp_path, 200) if line["part"] == "val"] == [
        50,
        100,
        150,
        200,
    ]


def test_a_process_without_validation_pictures_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, held = learning.tiny(recipe()), [learning.digits()]
    alone = validate(net, classify(), held, recipe(), learning.ALONE)
    monkeypatch.setattr(learner, "gathered", lambda mine, here: [{}, mine, {}])
    assert validate(net, classify(), held, recipe(), learning.ALONE) == alone
    other = {"loss": 0.0, "accuracy": 0.0, "count": 300}
    monkeypatch.setattr(learner, "gathered", lambda mine, here: [mine, other])
    together = validate(net, classify(), held, recipe(), learning.ALONE)
    assert together["loss"] == pytest.approx(alone["loss"] / 4)  # 100 of 400


def test_metrics_and_tensorboard_say_the_same(undisturbed: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(undisturbed / "tensorboard"))
    board.Reload()
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    for part, name in (("train", "loss"), ("train", "lr"), ("val", "accuracy")):
        drawn = {event.step: event.value for event in board.Scalars(f"{part}/{name}")}
        written = {line["step"]: line[name] for line in lines if line["part"] == part}
        assert drawn == pytest.approx(written)
    assert len(written) == 3


def test_a_resumed_run_draws_nothing_twice(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, recipe(), steps=4)
    (tmp_path / STATES[0]).unlink()
    run(tmp_path, recipe())
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == sorted(set(range(1, STEPS + 1)))
