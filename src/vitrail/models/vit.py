"""The Vision Transformer (Dosovitskiy et al. 2021), and what only differs from it by a row of a table:
DeiT (Touvron et al. 2021), DINOv2 (Oquab et al. 2023), registers (Darcet et al. 2024), hybrids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.attention import MultiHeadAttention
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import Model
from vitrail.models.block import ACTIVATIONS, MLP, Block
from vitrail.models.resnet import ResNetStages
from vitrail.positions import RESIZE, LearnedPositions, sincos_for
from vitrail.tokens import ConvolutionalStem, Grid, Patches, Tokens


@dataclass(frozen=True)
class ViTConfig:
    """Everything that decides a Vision Transformer's shape; the defaults are ViT-B/16."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    patch: tuple[int, int] = (16, 16)  # pixels, height and width
    image_size: tuple[int, int] = (224, 224)  # the grid that learned positions are kept for
    channels: int = 3
    classes: int = 1000  # 0: forward gives features
    stem: Literal["patch", "conv", "resnet"] = "patch"
    stem_convolutions: int = 1  # for each halving by the convolutional stem
    resnet_units: tuple[int, ...] = ()  # units in each ResNet stage of a hybrid
    pool: Literal["class", "mean", "attention", "class+mean"] = "class"
    class_token: bool = True
    distillation_token: bool = False  # DeiT: a second token with a head of its own
    registers: int = 0
    positions: Literal["learned", "sincos", "none"] = "learned"
    positioned_tokens: int | None = None  # special tokens with a learned position; None: all
    position_resize: str = "bicubic-antialias"  # a key of positions.RESIZE
    mlp: str = "gelu"  # a key of block.ACTIVATIONS, or "swiglu"
    qkv_bias: bool = True
    qk_norm: bool = False
    layer_scale: float | None = None
    norm_eps: float = 1e-6
    pre_norm: bool = False  # CLIP's towers: a norm before the first block, and no bias of the patches
    norm_after_pool: bool = False
    representation: int = 0  # width of a tanh layer before the head, as in pre-training; 0: none
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0  # of the last block; rises linearly from 0

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches at image_size, the last ones padded if need be."""
        height, width = self.image_size
        return Grid(-(-height // self.patch[0]), -(-width // self.patch[1]))

    @property
    def special_tokens(self) -> int:
        """How many tokens come before the patches: class, distillation, registers."""
        return self.class_token + self.distillation_token + self.registers

    @property
    def positioned(self) -> int:
        """How many special tokens have a learned position: the first ones."""
        return self.special_tokens if self.positioned_tokens is None else self.positioned_tokens

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("pool", self.pool, POOLS),
            ("stem", self.stem, STEMS),
            ("position_resize", self.position_resize, RESIZE),
            ("mlp", self.mlp, (*ACTIVATIONS, "swiglu")),
            ("positions", self.positions, ("learned", "sincos", "none")),
        ):
            if value not in allowed:
                raise ValueError(f"{field}={value!r} is not known; choose from {', '.join(allowed)}")
        for least, names in LEAST.items():
            for name in names:
                value = getattr(self, name)
                if min(value, default=least) < least if isinstance(value, tuple) else value < least:
                    raise ValueError(f"{name}={value} is too small; at least {least}")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is a rate: from 0 to below 1")
        if not self.class_token and (self.pool.startswith("class") or self.distillation_token):
            raise ValueError(
                f"pool={self.pool!r}, distillation_token={self.distillation_token} need the class "
                "token; keep class_token=True, or choose pool='mean' or 'attention'"
            )
        if self.distillation_token and (self.pool != "class" or self.representation or self.norm_after_pool):
            raise ValueError(
                "distillation_token=True has two heads on two tokens, which takes pool='class', "
                f"representation=0, norm_after_pool=False; got pool={self.pool!r}, "
                f"representation={self.representation}, norm_after_pool={self.norm_after_pool}"
            )
        if not 0 <= self.positioned <= self.special_tokens:
            raise ValueError(
                f"positioned_tokens={self.positioned_tokens} is not from 0 to {self.special_tokens}"
            )


SPECIAL_TOKENS = ("class_token", "distillation_token", "register_tokens")  # in their order

# The least value of fields → their names.
LEAST = {
    1: ("width", "depth", "heads", "mlp_width", "patch", "image_size", "channels", "stem_convolutions"),
    0: ("classes", "registers", "representation", "resnet_units"),
}


class AttentionPooling(nn.Module):
    """One learned query looks at all patches (Zhai et al. 2022): (batch, tokens, width) → (batch, width)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.query = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.query, std=width**-0.5)
        self.attention = MultiHeadAttention(width, config.heads)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.mlp = MLP(width, config.mlp_width, activation=config.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.query.expand(len(x), -1, -1), x)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]


class ViT(Model):
    """Images to logits: (batch, channels, height, width) → (batch, classes), for any height and width."""

    config: ViTConfig

    def __init__(self, config: ViTConfig, preprocess: Preprocess, labels: tuple[str, ...] = ()) -> None:
        super().__init__(config, preprocess, labels)
        width = config.width
        self.patches = STEMS[config.stem](config)
        if config.class_token:
            self.class_token = nn.Parameter(torch.empty(1, 1, width))
        if config.distillation_token:
            self.distillation_token = nn.Parameter(torch.empty(1, 1, width))
        if config.registers:
            self.register_tokens = nn.Parameter(torch.empty(1, config.registers, width))
        if config.positions == "learned":
            self.positions = LearnedPositions(
                config.grid, width, prefix=config.positioned, resize=config.position_resize
            )
        self.dropout = nn.Dropout(config.dropout)
        if config.pre_norm:
            self.pre_norm = nn.LayerNorm(width, config.norm_eps)
        self.blocks = nn.ModuleList(
            Block(
                width,
                MultiHeadAttention(
                    width,
                    config.heads,
                    qkv_bias=config.qkv_bias,
                    qk_norm=config.qk_norm,
                    norm_eps=config.norm_eps,
                    dropout=config.attention_dropout,
                ),
                MLP(width, config.mlp_width, activation=config.mlp, dropout=config.dropout),
                norm_eps=config.norm_eps,
                layer_scale=config.layer_scale,
                drop_path=config.drop_path * layer / max(config.depth - 1, 1),
                dropout=config.dropout,
            )
            for layer in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, config.norm_eps)
        if config.pool == "attention":
            self.attention_pooling = AttentionPooling(config)
        features = width * (2 if config.pool == "class+mean" else 1)
        if config.representation:
            self.representation = nn.Linear(features, config.representation)
            features = config.representation
        if config.classes:
            self.head = nn.Linear(features, config.classes)
            if config.distillation_token:
                self.distillation_head = nn.Linear(features, config.classes)
        self.apply(initialise)

    def encode(self, images: Tensor) -> Tokens:
        """All tokens after the last block: (batch, special tokens + patches, width), and their grid."""
        if images.ndim != 4 or images.shape[1] != self.config.channels or not images.is_floating_point():
            raise ValueError(
                f"images are {tuple(images.shape)} {images.dtype}; this model takes (batch, "
                f"{self.config.channels}, height, width) of floats, such as model.preprocess gives, stacked"
            )
        # Half-precision weights take pictures as preprocess gives them, float32.
        x, grid = self.patches(images.to(self.patches.projection.weight.dtype))  # (batch, patches, width)
        x = self.dropout(self._with_special_tokens(x, grid))
        if self.config.pre_norm:
            x = self.pre_norm(x)
        for block in self.blocks:
            x = block(x)
        return Tokens(x if self.config.norm_after_pool else self.norm(x), grid)

    def features(self, images: Tensor) -> Tensor:
        """What the head sees: (batch, width)."""
        return self._pooled(self.encode(images).values)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes), or features where there are no classes; DeiT's two heads averaged."""
        if self.config.distillation_token:
            by_class, by_distillation = self.both_logits(images)
            return (by_class + by_distillation) / 2
        features = self.features(images)
        return self.head(features) if self.config.classes else features

    def both_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """DeiT's two answers, of the class token and of the distillation token, (batch, classes) each.

        Without classes: the two tokens' features, (batch, width) each.
        """
        if not self.config.distillation_token:
            raise ValueError(
                "this model has one head; both_logits needs distillation_token=True, as deit-* have"
            )
        x = self.encode(images).values
        features, distilled = self._pooled(x), x[:, 1]
        if not self.config.classes:
            return features, distilled
        return self.head(features), self.distillation_head(distilled)

    def _with_special_tokens(self, x: Tensor, grid: Grid) -> Tensor:
        """(batch, patches, width) → (batch, special tokens + patches, width), positions added."""
        special = [getattr(self, name) for name in SPECIAL_TOKENS if hasattr(self, name)]
        if self.config.positions == "sincos":
            x = x + sincos_for(x, grid)
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in special), x], 1)
        if self.config.positions == "learned":
            table = self.positions(grid)
            bare = x.shape[1] - table.shape[1]  # special tokens that have no position
            if bare:
                covered = self.positions.prefix
                nothing = table.new_zeros(1, bare, table.shape[2])
                table = torch.cat([table[:, :covered], nothing, table[:, covered:]], 1)
            x = x + table
        return x

    def _pooled(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → features (batch, width)."""
        x = POOLS[self.config.pool](self, x)
        if self.config.norm_after_pool:
            x = self.norm(x)
        if self.config.representation:
            x = self.representation(x).tanh()
        return x


def _patches(config: ViTConfig) -> Patches:
    return Patches(config.channels, config.width, config.patch, bias=not config.pre_norm)


def _patches_after_convolutions(config: ViTConfig) -> Patches:
    if config.patch[0] != config.patch[1]:
        raise ValueError(f"a convolutional stem needs square patches; got {config.patch}")
    stride = config.patch[0]
    stem = ConvolutionalStem(config.channels, config.width, stride, each=config.stem_convolutions)
    return Patches(
        config.width, config.width, config.patch, bias=not config.pre_norm, stem=stem, stem_stride=stride
    )


def _patches_after_resnet(config: ViTConfig) -> Patches:
    stem = ResNetStages(config.channels, config.resnet_units)
    return Patches(
        stem.width, config.width, config.patch, bias=not config.pre_norm, stem=stem, stem_stride=stem.stride
    )


STEMS: dict[str, Callable[[ViTConfig], Patches]] = {
    "patch": _patches,
    "conv": _patches_after_convolutions,
    "resnet": _patches_after_resnet,
}


def _patches_mean(model: ViT, x: Tensor) -> Tensor:
    return x[:, model.config.special_tokens :].mean(1)


POOLS: dict[str, Callable[[ViT, Tensor], Tensor]] = {
    "class": lambda model, x: x[:, 0],
    "mean": _patches_mean,
    "attention": lambda model, x: model.attention_pooling(x[:, model.config.special_tokens :]),
    "class+mean": lambda model, x: torch.cat([x[:, 0], _patches_mean(model, x)], -1),
}


def initialise(module: nn.Module) -> None:
    """Small normal weights and zero biases everywhere; special tokens start at almost nothing."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for name in SPECIAL_TOKENS:
        token = getattr(module, name, None)
        if isinstance(token, nn.Parameter):
            nn.init.normal_(token, std=0.02 if name == "distillation_token" else 1e-6)


SIZES = {  # width, depth, heads, MLP width: Table 1 of the papers
    "ti": (192, 12, 3, 768),
    "s": (384, 12, 6, 1536),
    "b": (768, 12, 12, 3072),
    "l": (1024, 24, 16, 4096),
    "h": (1280, 32, 16, 5120),
    "g": (1536, 40, 24, 4096),
}
