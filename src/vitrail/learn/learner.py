"""What a run changes from step to step, how one step changes it, and how it is kept."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitrail.attention import backend
from vitrail.data.seeds import mix
from vitrail.learn.objectives import Lesson, Objective
from vitrail.learn.optimiser import (
    adamw,
    blocks_of,
    checkpoint_blocks,
    follow,
    freeze,
    groups,
    schedule,
    set_rate,
    set_training,
)
from vitrail.learn.processes import Processes, gathered, summed
from vitrail.learn.recipe import Recipe
from vitrail.learn.state import State
from vitrail.weights.names import differences


class DivergedError(ValueError):
    """A loss or gradient that is no number. The text says at which step and in which layer it began."""


@dataclass
class Learner:
    """Everything that a state has to hold: all randomness is derived from the step."""

    model: nn.Module
    average: nn.Module | None  # of the model's weights, where the recipe asks for it
    optimiser: torch.optim.Optimizer
    step: int = 0  # how many are done
    best: dict[str, float] | None = None  # figures of the best validation, and its step
    seconds: float = 0.0  # of training, over all resumptions

    @property
    def result(self) -> nn.Module:
        """The model to evaluate and to keep."""
        return self.model if self.average is None else self.average


class Taught(nn.Module):
    """Model and objective as one module, whose forward is all that gradients come from."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Any) -> Lesson:
        return self.objective(self.model, batch)


def begin(model: nn.Module, recipe: Recipe) -> Learner:
    """A model made ready to learn as the recipe says."""
    freeze(model, recipe.learns)
    average = copy.deepcopy(model).eval().requires_grad_(False) if recipe.ema else None
    grouped = groups(model, weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay)
    if recipe.checkpoint_blocks:
        checkpoint_blocks(model)
    if recipe.compile:
        for part in blocks_of(model) or [model]:  # however the model is called, and compiled once for all
            part.compile()
    return Learner(model, average, adamw(grouped, recipe.betas))


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """bfloat16 where the recipe says so; it needs no scaling of gradients."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16")


def kernels(recipe: Recipe) -> AbstractContextManager[None]:
    """The attention backend that the recipe names; it must also last for the way back."""
    return backend("fused" if recipe.attention == "auto" else recipe.attention)


def take_step(
    taught: nn.Module,
    learner: Learner,
    batch: Any,
    recipe: Recipe,
    steps: int,
    here: Processes,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """One step down; the figures of the global batch, the rate, and `stop`, how many processes want to.

    taught: Taught, or what `together` made of it. Raises DivergedError before anything is changed but the
    statistics of batch norms.
    """
    factor = schedule(learner.step, steps, warmup=round(recipe.warmup * steps), floor=recipe.floor)
    set_rate(learner.optimiser, recipe.lr * factor)
    set_training(learner.model)
    torch.manual_seed(mix(recipe.seed, learner.step, "noise"))
    parts = list(_parts(batch, recipe.accumulate, here.device))
    figures: dict[str, Tensor] = {}
    for number, part in enumerate(parts, start=1):
        more = number < len(parts)  # gradients are exchanged once, with the last part's
        alone = taught.no_sync() if more and isinstance(taught, DistributedDataParallel) else nullcontext()
        with kernels(recipe), alone:
            with autocast(recipe, here.device):
                lesson = taught(part)
            (lesson.loss / len(parts)).backward()
        for name, value in {"loss": lesson.loss.detach(), **lesson.figures}.items():
            figures[name] = figures.get(name, 0) + value / len(parts)
    parameters = [p for group in learner.optimiser.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    told = torch.stack([*figures.values(), torch.tensor(float(stop()), device=here.device)])
    *values, stops = summed(told, here).tolist()
    result = dict(zip(figures, (value / here.world for value in values), strict=True))
    if not (math.isfinite(result["loss"]) and norm.isfinite()):
        raise DivergedError(_diagnosis(taught, learner, parts, recipe, here, result["loss"]))
    if recipe.clip:
        nn.utils.clip_grads_with_norm_(parameters, recipe.clip, norm)
    learner.optimiser.step()
    learner.optimiser.zero_grad(set_to_none=True)
    if learner.average is not None:
        follow(learner.average, learner.model, learner.step, recipe.ema)
    learner.step += 1
    return {**result, "norm": norm.item(), "lr": recipe.lr * factor, "stop": stops}


@torch.no_grad()
def validate(
    model: nn.Module, objective: Objective, batches: Iterable[Any], recipe: Recipe, here: Processes
) -> dict[str, float]:
    """The objective's loss and figures over all batches of all processes, each picture counted once."""
    model.eval()
    sums: dict[str, float] = defaultdict(float)
    for batch in batches:
        (part,) = _parts(batch, 1, here.device)
        with kernels(recipe), autocast(recipe, here.device):
            lesson = objective(model, part)
        samples = len(part[0])
        for name, mean in {"loss": lesson.loss, **lesson.figures}.items():
            sums[name] += float(mean) * samples
        sums["count"] += samples
    whole = gathered(dict(sums), here)  # of a process that had none: empty
    count = sum(of_process.get("count", 0) for of_process in whole)
    names = dict.fromkeys(name for of_process in whole for name in of_process if name != "count")
    return {name: sum(of_process.get(name, 0) for of_process in whole) / count for name in names}


def _parts(batch: Any, count: int, device: torch.device) -> Iterator[Any]:
    """A batch (a named tuple of tensors) in equal parts, where the model is."""
    fields = (field.to(device, non_blocking=True).chunk(count) for field in batch)
    return (type(batch)(*part) for part in zip(*fields, strict=True))


def _diagnosis(
    taught: nn.Module, learner: Learner, parts: list[Any], recipe: Recipe, here: Processes, loss: float
) -> str:
    """Where it began, found by computing the same batch again and looking at what every layer gives."""
    gradients = [
        name
        for name, parameter in learner.model.named_parameters()
        if parameter.grad is not None and not parameter.grad.isfinite().all()
    ]
    wrong: list[str] = []

    def look(name: str, outputs: Any) -> None:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if any(isinstance(t, Tensor) and not t.isfinite().all() for t in tensors):
            wrong.append(name)

    handles = [
        module.register_forward_hook(lambda _, __, outputs, name=name: look(f"the layer {name}", outputs))
        for name, module in learner.model.named_modules()
        if name
    ]
    plain = taught.module if isinstance(taught, DistributedDataParallel) else taught
    torch.manual_seed(mix(recipe.seed, learner.step, "noise"))
    eager = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), eager, kernels(recipe), autocast(recipe, here.device):
        for part in parts:
            for name, field in part._asdict().items():
                look(f"the batch's {name}", field)
            plain(part)
    for handle in handles:
        handle.remove()
    culprits = [*wrong, *(f"the gradient of {name}" for name in reversed(gradients)), "the loss itself"]
    found = next(told[0] for told in sorted(gathered(culprits, here), key=len, reverse=True))
    return f"step {learner.step + 1}: the loss is {loss:g}, and the first that is no number is {found}"


def to_state(learner: Learner, facts: dict[str, Any]) -> State:
    """Everything of a learner, and the facts of its run."""
    tensors = {f"model/{name}": tensor for name, tensor in learner.model.state_dict().items()}
    if learner.average is not None:
        tensors |= {f"average/{name}": tensor for name, tensor in learner.average.state_dict().items()}
    for name, parameter in _named(learner.optimiser):
        for kind, tensor in learner.optimiser.state[parameter].items():
            tensors[f"optimiser/{name}/{kind}"] = tensor
    own = {"step": learner.step, "best": learner.best, "seconds": learner.seconds}
    return State(tensors, {**facts, **own})


def from_state(learner: Learner, state: State) -> None:
    """Takes a learner to where the state was written; what the recipe asks for since then begins anew."""
    folders: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimiser": {}}
    for path, tensor in state.tensors.items():
        folder, _, name = path.partition("/")
        folders[folder][name] = tensor
    _refuse_other(learner.model, folders["model"])
    learner.model.load_state_dict(folders["model"])
    if learner.average is not None:
        learner.average.load_state_dict(folders["average"] or folders["model"])
    kept: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, tensor in folders["optimiser"].items():
        name, _, kind = path.rpartition("/")
        kept[name][kind] = tensor
    for name, parameter in _named(learner.optimiser):
        learner.optimiser.state[parameter] = {k: t.to(parameter.device) for k, t in kept[name].items()}
    learner.step, learner.best, learner.seconds = (state.facts[key] for key in ("step", "best", "seconds"))


def _refuse_other(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """A state of another network."""
    ours, theirs = ({name: t.shape for name, t in tensors.items()} for tensors in (model.state_dict(), kept))
    if told := differences(ours, theirs):
        raise ValueError(
            "the state to go on from is of another model; such a change needs a run of its own, with another "
            f"--out and perhaps --from the folder of this one{told}"
        )


def _named(optimiser: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        pair for group in optimiser.param_groups for pair in zip(group["names"], group["params"], strict=True)
    ]
