"""Groups, rates, averages and freezing, against arithmetic, torch and timm."""

import copy

import pytest
import torch
from torch import nn

import vitrail
from compare import same
from judges import timm
from vitrail.learn.optimiser import (
    adamw,
    blocks_of,
    checkpoint_blocks,
    depths,
    follow,
    freeze,
    groups,
    schedule,
    set_rate,
    set_training,
)

TINY = {"width": 24, "depth": 4, "heads": 3, "mlp_width": 48, "image_size": 32, "classes": 5}


def model(**changes):
    return vitrail.create("deit-ti/8", **{**TINY, **changes})


def by_name(found):
    return {name: group for group in found for name in group["names"]}


def test_only_matrices_and_filters_decay():
    found = by_name(groups(model(stem="conv", qk_norm=True, layer_scale=0.1), weight_decay=0.3))
    decaying = {name for name, group in found.items() if group["weight_decay"] == 0.3}
    assert {group["weight_decay"] for group in found.values()} == {0.0, 0.3}
    assert {"patches.projection.weight", "blocks.0.attention.query.weight", "head.weight"} <= decaying
    for name in ("class_token", "distillation_token", "positions.table", "head.bias", "norm.weight"):
        assert name not in decaying
    assert not any("norm" in name or name.endswith(("bias", "gain")) for name in decaying)


def test_every_parameter_is_in_one_group():
    net = model()
    names = [name for group in groups(net, weight_decay=0.1, layer_decay=0.7) for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())


def test_layer_decay_is_that_of_timm():
    """timm counts the last norm with the last block, the papers (BEiT, MAE) with the head, as here."""
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=5
    )
    from timm.optim import param_groups_layer_decay

    scales = {}
    names = {id(parameter): name for name, parameter in theirs.named_parameters()}
    for group in param_groups_layer_decay(theirs, weight_decay=0.1, layer_decay=0.6):
        scales |= {names[id(parameter)]: group["lr_scale"] for parameter in group["params"]}
    ours = by_name(groups(vitrail.create("vit-ti/8", **TINY), weight_decay=0.1, layer_decay=0.6))
    pairs = {"cls_token": "class_token", "pos_embed": "positions.table", "head.weight": "head.weight"}
    pairs |= {"patch_embed.proj.weight": "patches.projection.weight"}
    pairs |= {f"blocks.{i}.mlp.fc1.weight": f"blocks.{i}.mlp.up.weight" for i in range(4)}
    for name, our_name in pairs.items():
        assert ours[our_name]["scale"] == pytest.approx(scales[name]), name
    assert ours["norm.weight"]["scale"] == 1.0
    assert ours["class_token"]["scale"] == pytest.approx(0.6**5)


def test_layers_of_a_model_without_blocks():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert blocks_of(net) == []
    assert set(depths(net).values()) == {0}


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_schedule_is_that_of_torch(floor):
    steps, warmup = 50, 8
    parameter = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    rising = torch.optim.lr_scheduler.LinearLR(optimiser, 1 / warmup, 1.0, warmup - 1)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps - warmup, eta_min=floor)
    both = torch.optim.lr_scheduler.SequentialLR(optimiser, [rising, falling], [warmup])
    for step in range(steps):
        assert schedule(step, steps, warmup=warmup, floor=floor) == pytest.approx(
            optimiser.param_groups[0]["lr"]
        )
        optimiser.step()
        both.step()
    assert schedule(steps, steps, warmup=warmup, floor=floor) == pytest.approx(floor)


def test_schedule_without_warmup_begins_at_the_top():
    assert schedule(0, 10, warmup=0) == 1.0
    assert schedule(5, 10, warmup=0) == pytest.approx(0.5)
    assert schedule(0, 1, warmup=1) == 1.0


def test_a_step_is_that_of_plain_adamw():
    """Two steps with decay and a scaled rate, against torch's simple loop over tensors."""
    net = model()
    twin = copy.deepcopy(net)
    optimiser = adamw(groups(net, weight_decay=0.1, layer_decay=0.5), (0.9, 0.98))
    layers = by_name(groups(twin, weight_decay=0.1, layer_decay=0.5))
    plain = torch.optim.AdamW(
        [
            {
                "params": [parameter],
                "lr": 0.01 * layers[name]["scale"],
                "weight_decay": layers[name]["weight_decay"],
            }
            for name, parameter in twin.named_parameters()
        ],
        betas=(0.9, 0.98),
        foreach=False,
    )
    images = torch.randn(2, 3, 32, 32)
    for _ in range(2):
        set_rate(optimiser, 0.01)
        for learner, moves in ((net, optimiser), (twin, plain)):
            moves.zero_grad()
            learner(images).square().sum().backward()
            moves.step()
    for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which Adam makes steps
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_an_average_follows_with_a_young_decay_first():
    net, average = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    values = [3.0, -1.0, 4.0, 1.5]
    expected = average.weight.item()
    for step, value in enumerate(values):
        nn.init.constant_(net.weight, value)
        net.num_batches_tracked.add_(1)
        follow(average, net, step, decay=0.25)
        decay = min(0.25, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert average.weight.item() == pytest.approx(expected)
    assert average.num_batches_tracked == len(values)


@pytest.mark.parametrize(
    ("part", "learning", "frozen"),
    [
        ("full", {"class_token", "blocks.0.mlp.up.weight", "head.weight"}, set()),
        ("head", {"head.weight", "distillation_head.bias"}, {"norm.weight", "blocks.3.mlp.up.weight"}),
        (
            1,
            {"blocks.3.mlp.up.weight", "norm.weight", "head.bias"},
            {"blocks.2.mlp.up.weight", "class_token"},
        ),
        (4, {"blocks.0.mlp.up.weight"}, {"class_token", "patches.projection.weight", "positions.table"}),
    ],
)
def test_freezing(part, learning, frozen):
    net = model()
    freeze(net, part)
    learns = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert learning <= learns
    assert not frozen & learns
    assert by_name(groups(net, weight_decay=0.1)).keys() == learns


def test_frozen_parts_drop_nothing_and_keep_their_statistics():
    net = model(stem="conv", drop_path=0.5)
    freeze(net, 1)
    set_training(net)
    norm = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    assert not norm.training
    assert not net.blocks[1].drop_path.training
    assert net.blocks[3].drop_path.training
    assert net.training


def test_a_model_without_a_head_cannot_learn_it_alone():
    with pytest.raises(ValueError, match="no head that could learn alone"):
        freeze(model(classes=0), "head")


def test_checkpointed_blocks_give_the_same_with_less_memory():
    images = torch.randn(3, 3, 32, 32)
    plain = model(dropout=0.1)
    thrifty = copy.deepcopy(plain)
    checkpoint_blocks(thrifty)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        sizes = []
        for net in (plain, thrifty):
            kept.clear()
            torch.manual_seed(1)
            net.train()(images).square().sum().backward()
            sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 2
    assert thrifty.state_dict().keys() == plain.state_dict().keys()
    for ours, theirs in zip(plain.parameters(), thrifty.parameters(), strict=True):
        assert same(ours.grad, theirs.grad)
