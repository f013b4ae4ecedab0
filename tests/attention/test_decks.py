"""The worked examples of the lecture decks, number by number, and where the slides are wrong.

What a slide says is copied here as it stands. The truth comes from our own calls, and once more from
plain arithmetic. A cell is right when it is the truth, rounded to the places that its table shows.
Decks: 000 "Attention & Vision Transformers", 001 on attention and its road into vision, 002 "Visual
Transformers (ViTs)", 003 "Vision Transformers". docs/decks/worked-examples.md tells it in words.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vitrail.attention import AlignmentAttention, BilinearScore, attend, attention_weights
from vitrail.models import attention_memory, build, config_of
from vitrail.tokens import Patches

DOC = Path(__file__).resolve().parents[2] / "docs/decks/worked-examples.md"
INF = math.inf

# --- What the words are: deck 000 ---

FOUR = {"footballer": (1, 4), "other footballer": (0, 3), "dog": (4, 0), "cat": (2, 1)}
PAIRS = [
    ("footballer", "other footballer"),
    ("dog", "cat"),
    ("footballer", "dog"),
    ("footballer", "cat"),
]
SHEEP = {"the": (1, 1), "sheep": (4, 0), "and": (0, 0), "goat": (2.5, 2.5), "grazing": (5, 0)}
MESSI = {"Messi": (0, 5), "is": (1, 1), "goat": (2.5, 2.5), "not": (0, 0), "Ronaldo": (0, 4)}
SEVEN = {
    "Messi": (6, 2),
    "is": (1, 1),
    "the": (1, 1),
    "goat": (5, 3),
    ",": (0, 0),
    "not": (1, 0),
    "Ronaldo": (4, 2),
}
Words = dict[str, tuple[float, float]]


# --- The truth, by our own calls ---


def tokens(words: Words) -> Tensor:
    return torch.tensor(list(words.values()), dtype=torch.float64)


def dots(words: Words, divided_by: float = 1.0) -> Tensor:
    """All dot products: the bilinear alignment sᵀ W h with W = 1, or W = 1/√d where it is scaled."""
    score = BilinearScore(2, 2).double()
    with torch.no_grad():
        score.key.weight.copy_(torch.eye(2, dtype=torch.float64) / divided_by)
        x = tokens(words)[None]
        return score(x, x)[0]


def of_goat(words: Words, table: Tensor) -> Tensor:
    return table[list(words).index("goat")][None]


def of_pairs(table: Tensor) -> Tensor:
    names = list(FOUR)
    return torch.stack([table[names.index(a), names.index(b)] for a, b in PAIRS])[None]


def weights(words: Words) -> Tensor:
    return attention_weights(tokens(words), tokens(words))


def output(words: Words) -> Tensor:
    x = tokens(words)
    return attend(x, x, x)


def causal_weights() -> Tensor:
    nothing = torch.zeros(8, 1, dtype=torch.float64)
    return attention_weights(nothing, nothing, causal=True)


# --- The truth, by plain arithmetic ---


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores: Sequence[float]) -> list[float]:
    exponentials = [math.exp(score) for score in scores]
    return [e / math.fsum(exponentials) for e in exponentials]


def row_by_hand(words: Words, word: str, divided_by: float) -> list[float]:
    return [dot(words[word], other) / divided_by for other in words.values()]


def table_by_hand(words: Words) -> list[list[float]]:
    return [softmax(row_by_hand(words, word, math.sqrt(2))) for word in words]


def sum_by_hand(words: Words) -> list[float]:
    shares = softmax(row_by_hand(words, "goat", math.sqrt(2)))
    return [math.fsum(p * v[i] for p, v in zip(shares, words.values(), strict=True)) for i in (0, 1)]


def triangle(inside: Callable[[int], float], outside: float) -> list[list[float]]:
    """8 by 8: inside(row) up to the diagonal, `outside` beyond."""
    return [[inside(row) if column <= row else outside for column in range(8)] for row in range(8)]


# --- The slides ---


class Table(NamedTuple):
    """One table of a slide: what it says, and the truth twice."""

    deck: str
    rows: list[str]
    columns: list[str]
    places: int  # digits after the point
    says: list[list[float]]
    ours: Callable[[], Tensor]
    by_hand: Callable[[], list[list[float]]]


WIDTH = ["first feature", "second feature"]
EIGHT = [str(n) for n in range(1, 9)]
ROOT = math.sqrt(2)

TABLES: dict[str, Table] = {
    "similarity": Table(
        "000", ["dot product"], [" · ".join(pair) for pair in PAIRS], 0,
        [[12, 8, 4, 6]],
        lambda: of_pairs(dots(FOUR)),
        lambda: [[dot(FOUR[a], FOUR[b]) for a, b in PAIRS]],
    ),
    "scaled similarity": Table(
        "000", ["dot product / √2"], [" · ".join(pair) for pair in PAIRS], 1,
        [[8.5, 5.7, 2.8, 4.2]],
        lambda: of_pairs(dots(FOUR, ROOT)),
        lambda: [[dot(FOUR[a], FOUR[b]) / ROOT for a, b in PAIRS]],
    ),
    "scores, sheep": Table(
        "000", ["goat"], list(SHEEP), 1,
        [[5, 10, 0, 12.5, 12.5]],
        lambda: of_goat(SHEEP, dots(SHEEP)),
        lambda: [row_by_hand(SHEEP, "goat", 1)],
    ),
    "scores, Messi": Table(
        "000", ["goat"], list(MESSI), 1,
        [[12.5, 5, 12.5, 0, 10]],
        lambda: of_goat(MESSI, dots(MESSI)),
        lambda: [row_by_hand(MESSI, "goat", 1)],
    ),
    "scaled scores, sheep": Table(
        "000", ["goat"], list(SHEEP), 2,
        [[3.55, 7.08, 0, 8.85, 8.85]],
        lambda: of_goat(SHEEP, dots(SHEEP, ROOT)),
        lambda: [row_by_hand(SHEEP, "goat", ROOT)],
    ),
    "scaled scores, Messi": Table(
        "000", ["goat"], list(MESSI), 2,
        [[8.85, 3.55, 8.85, 0, 7.08]],
        lambda: of_goat(MESSI, dots(MESSI, ROOT)),
        lambda: [row_by_hand(MESSI, "goat", ROOT)],
    ),
    "softmax, sheep": Table(
        "000", ["goat"], list(SHEEP), 2,
        [[0.00, 0.08, 0.00, 0.46, 0.46]],
        lambda: of_goat(SHEEP, weights(SHEEP)),
        lambda: [softmax(row_by_hand(SHEEP, "goat", ROOT))],
    ),
    "softmax, Messi": Table(
        "000", ["goat"], list(MESSI), 2,
        [[0.43, 0, 0.43, 0, 0.14]],
        lambda: of_goat(MESSI, weights(MESSI)),
        lambda: [softmax(row_by_hand(MESSI, "goat", ROOT))],
    ),
    "weighted sum, sheep": Table(
        "000", ["goat"], WIDTH, 2,
        [[3.77, 1.15]],
        lambda: of_goat(SHEEP, output(SHEEP)),
        lambda: [sum_by_hand(SHEEP)],
    ),
    "weighted sum, Messi": Table(
        "000", ["goat"], WIDTH, 2,
        [[1.08, 3.79]],
        lambda: of_goat(MESSI, output(MESSI)),
        lambda: [sum_by_hand(MESSI)],
    ),
    "self-attention, step 1": Table(
        "000", ["Messi"], list(SEVEN), 2,
        [[28.37, 5.67, 5.67, 25.53, 0, 4.25, 19.86]],
        lambda: dots(SEVEN, ROOT)[:1],
        lambda: [row_by_hand(SEVEN, "Messi", ROOT)],
    ),
    "self-attention, step 2, exponents": Table(
        "000", ["Messi"], list(SEVEN), 2,
        [[28.37, 5.67, 5.67, 25.53, 0, 4.25, 19.85]],
        lambda: dots(SEVEN, ROOT)[:1],
        lambda: [row_by_hand(SEVEN, "Messi", ROOT)],
    ),
    "self-attention, step 2": Table(
        "000", list(SEVEN), list(SEVEN), 2,
        [
            [0.94, 0.0, 0.0, 0.06, 0.0, 0.0, 0.0],
            [0.0, 0.94, 0.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.94, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.94, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.94, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.94, 0.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.94],
        ],
        lambda: weights(SEVEN),
        lambda: table_by_hand(SEVEN),
    ),
    "self-attention, final": Table(
        "000", list(SEVEN), list(SEVEN), 2,
        [
            [0.94, 0.0, 0.0, 0.06, 0.0, 0.0, 0.0],
            [0.44, 0.01, 0.01, 0.44, 0.0, 0.0, 0.11],
            [0.44, 0.01, 0.01, 0.44, 0.0, 0.0, 0.11],
            [0.8, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0],
            [0.14, 0.14, 0.14, 0.14, 0.14, 0.14, 0.14],
            [0.54, 0.02, 0.02, 0.27, 0.01, 0.02, 0.13],
            [0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.8],
        ],
        lambda: weights(SEVEN),
        lambda: table_by_hand(SEVEN),
    ),
    "causal mask": Table(
        "002", EIGHT, EIGHT, 0,
        [
            [1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1, 1, 1, 1],
        ],
        lambda: (causal_weights() > 0).double(),
        lambda: triangle(lambda row: 1, 0),
    ),
    "causal scores": Table(
        "002", EIGHT, EIGHT, 0,
        [
            [0, -INF, -INF, -INF, -INF, -INF, -INF, -INF],
            [0, 0, -INF, -INF, -INF, -INF, -INF, -INF],
            [0, 0, 0, -INF, -INF, -INF, -INF, -INF],
            [0, 0, 0, 0, -INF, -INF, -INF, -INF],
            [0, 0, 0, 0, 0, -INF, -INF, -INF],
            [0, 0, 0, 0, 0, 0, -INF, -INF],
            [0, 0, 0, 0, 0, 0, 0, -INF],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ],
        # The logarithm undoes the softmax, but for what was added to a whole row.
        lambda: (causal_weights() / causal_weights().amax(-1, keepdim=True)).log(),
        lambda: triangle(lambda row: 0, -INF),
    ),
    "causal weights": Table(
        "002", EIGHT, EIGHT, 4,
        [
            [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
            [0.3333, 0.3333, 0.3333, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
            [0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000, 0.0000],
            [0.2000, 0.2000, 0.2000, 0.2000, 0.2000, 0.0000, 0.0000, 0.0000],
            [0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.0000, 0.0000],
            [0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.0000],
            [0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250],
        ],
        causal_weights,
        lambda: triangle(lambda row: 1 / (row + 1), 0),
    ),
}  # fmt: skip


class Wrong(NamedTuple):
    """A row of a slide with cells that are not the truth rounded: column → (slide says, truth)."""

    table: str
    row: str
    cells: dict[str, tuple[float, float]]
    why: str


COARSE_ROOT = "divides by √2 rounded to 1.41"
FROM_ROUNDED = "5/√2 is 3.54; the others are 2 and 2½ times 3.54, that is, rounded and then multiplied"
PLACEHOLDER = "a placeholder: the first row's 0.94 along the diagonal, not yet computed"

WRONG = [
    Wrong(
        "scaled scores, sheep", "goat",
        {
            "the": (3.55, 3.54), "sheep": (7.08, 7.07),
            "goat": (8.85, 8.84), "grazing": (8.85, 8.84),
        },
        FROM_ROUNDED,
    ),
    Wrong(
        "scaled scores, Messi", "goat",
        {
            "Messi": (8.85, 8.84), "is": (3.55, 3.54),
            "goat": (8.85, 8.84), "Ronaldo": (7.08, 7.07),
        },
        FROM_ROUNDED,
    ),
    Wrong(
        "softmax, Messi", "goat",
        {"Messi": (0.43, 0.46), "goat": (0.43, 0.46), "Ronaldo": (0.14, 0.08)},
        "the scores are those of the sheep's sentence in another order, so the weights must be too; "
        "√5 for √2 would give these",
    ),
    Wrong(
        "weighted sum, sheep", "goat",
        {"first feature": (3.77, 3.76)},
        "sums weights that were rounded before",
    ),
    Wrong(
        "weighted sum, Messi", "goat",
        {"first feature": (1.08, 1.15), "second feature": (3.79, 3.76)},
        "follows from the wrong weights 0.43, 0.43, 0.14; the truth mirrors the sheep's sentence",
    ),
    Wrong(
        "self-attention, step 1", "Messi",
        {
            "Messi": (28.37, 28.28), "is": (5.67, 5.66), "the": (5.67, 5.66),
            "goat": (25.53, 25.46), "not": (4.25, 4.24), "Ronaldo": (19.86, 19.80),
        },
        COARSE_ROOT,
    ),
    Wrong(
        "self-attention, step 2, exponents", "Messi",
        {
            "Messi": (28.37, 28.28), "is": (5.67, 5.66), "the": (5.67, 5.66),
            "goat": (25.53, 25.46), "not": (4.25, 4.24), "Ronaldo": (19.85, 19.80),
        },
        COARSE_ROOT + "; Ronaldo's 19.85 is not even the 19.86 of the table beside it",
    ),
    Wrong(
        "self-attention, step 2", "is",
        {
            "Messi": (0.0, 0.44), "is": (0.94, 0.01), "the": (0.0, 0.01),
            "goat": (0.0, 0.44), "Ronaldo": (0.0, 0.11),
        },
        PLACEHOLDER,
    ),
    Wrong(
        "self-attention, step 2", "the",
        {
            "Messi": (0.0, 0.44), "is": (0.0, 0.01), "the": (0.94, 0.01),
            "goat": (0.0, 0.44), "Ronaldo": (0.0, 0.11),
        },
        PLACEHOLDER,
    ),
    Wrong(
        "self-attention, step 2", "goat",
        {"Messi": (0.0, 0.80), "goat": (0.94, 0.20)},
        PLACEHOLDER,
    ),
    Wrong(
        "self-attention, step 2", ",",
        {
            "Messi": (0.0, 0.14), "is": (0.0, 0.14), "the": (0.0, 0.14), "goat": (0.0, 0.14),
            ",": (0.94, 0.14), "not": (0.0, 0.14), "Ronaldo": (0.0, 0.14),
        },
        PLACEHOLDER,
    ),
    Wrong(
        "self-attention, step 2", "not",
        {
            "Messi": (0.0, 0.54), "is": (0.0, 0.02), "the": (0.0, 0.02), "goat": (0.0, 0.27),
            ",": (0.0, 0.01), "not": (0.94, 0.02), "Ronaldo": (0.0, 0.13),
        },
        PLACEHOLDER,
    ),
    Wrong(
        "self-attention, step 2", "Ronaldo",
        {"Messi": (0.0, 0.80), "goat": (0.0, 0.20), "Ronaldo": (0.94, 0.00)},
        PLACEHOLDER,
    ),
    Wrong(
        "self-attention, final", "Ronaldo",
        {"Messi": (0.0, 0.80), "Ronaldo": (0.8, 0.00)},
        "the weights of Messi and Ronaldo are swapped: [4,2] · [6,2] = 28, [4,2] · [4,2] = 20",
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_our_calls_agree_with_plain_arithmetic(name: str) -> None:
    table = TABLES[name]
    expected = torch.tensor(table.by_hand(), dtype=torch.float64)
    torch.testing.assert_close(table.ours(), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", TABLES)
def test_the_cells_that_differ_are_exactly_those_listed(name: str) -> None:
    table = TABLES[name]
    truth = table.ours().tolist()
    assert [len(row) for row in table.says] == [len(table.columns)] * len(table.rows)
    found = {
        (row, column): (says, round(true, table.places) + 0.0)
        for row, says_row, true_row in zip(table.rows, table.says, truth, strict=True)
        for column, says, true in zip(table.columns, says_row, true_row, strict=True)
        if not (says == true == -INF or round(true, table.places) == says)
    }
    listed = {
        (wrong.row, column): cell
        for wrong in WRONG
        if wrong.table == name
        for column, cell in wrong.cells.items()
    }
    assert found == listed


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.table}: {wrong.row}")
def test_the_page_lists_what_is_listed_here(wrong: Wrong) -> None:
    places = TABLES[wrong.table].places
    cells = ", ".join(
        f"`{column}` {says:.{places}f} → **{truth:.{places}f}**"
        for column, (says, truth) in wrong.cells.items()
    )
    line = f"| {wrong.table} | `{wrong.row}` | {cells} | {wrong.why} |"
    assert line in DOC.read_text(encoding="utf-8").splitlines()


def test_why_the_slides_are_wrong() -> None:
    """The reasons above, as arithmetic."""
    # 28.37 … is what 1.41 for √2 gives, and is not what √2 gives.
    coarse = [round(x / 1.41, 2) for x in row_by_hand(SEVEN, "Messi", 1)]
    assert coarse == [28.37, 5.67, 5.67, 25.53, 0.0, 4.26, 19.86]  # 4.2553: the slide cuts it to 4.25
    assert pytest.approx([7.08, 8.85]) == [2 * 3.54, 2.5 * 3.54]
    # 3.77 is the sum of rounded weights, 0.08 · 4 + 0.46 · 2.5 + 0.46 · 5.
    assert round(0.08 * 4 + 0.46 * 2.5 + 0.46 * 5, 2) == 3.77
    # 1.08 and 3.79 follow from 0.43, 0.43, 0.14.
    assert pytest.approx(1.075) == 0.43 * 2.5
    assert pytest.approx(3.785) == 0.43 * 5 + 0.43 * 2.5 + 0.14 * 4
    # 0.43, 0.43, 0.14 is what √5 would give (the sentence has five words), small words left out.
    assert [round(p, 2) for p in softmax([x / math.sqrt(5) for x in (12.5, 12.5, 10)])] == [
        0.43, 0.43, 0.14,
    ]  # fmt: skip
    # The two sentences mirror each other, word for word and feature for feature.
    torch.testing.assert_close(of_goat(MESSI, output(MESSI)), of_goat(SHEEP, output(SHEEP)).flip(1))


def test_goat_by_the_alignment_of_any_function() -> None:
    """The same numbers through the general mechanism: e = sᵀ W h / √2, a = softmax(e), c = Σ a h."""
    score = BilinearScore(2, 2).double()
    with torch.no_grad():
        score.key.weight.copy_(torch.eye(2, dtype=torch.float64) / ROOT)
    x = tokens(SHEEP)[None]
    goat = AlignmentAttention(score)(x[:, 3:4], x).context[0]
    torch.testing.assert_close(goat, of_goat(SHEEP, output(SHEEP)))


# --- Statements with numbers ---

KIB, MIB, GIB = 2**10, 2**20, 2**30


def test_memory_of_attention_matrices() -> None:
    """Deck 001: 224x224 pixels as 14x14 or 16x16 patches, and 128x128 pixels as they are; float32."""
    deck = {"layers": 48, "heads": 16}
    one = {"layers": 1, "heads": 1}
    assert 14**4 == 38_416  # "entries"
    assert 16**4 == 65_536
    assert attention_memory(14 * 14, **one) == 4 * 38_416  # "150 KB"
    assert attention_memory(14 * 14, **one) / KIB == pytest.approx(150.0625)
    assert attention_memory(16 * 16, **one) == 256 * KIB  # "256 KB"
    assert attention_memory(14 * 14, **deck) == 48 * 16 * 4 * 38_416
    assert attention_memory(14 * 14, **deck) / MIB == pytest.approx(112.546875)  # "112 MB"
    assert attention_memory(16 * 16, **deck) == 192 * MIB  # "192MB"
    assert attention_memory(128 * 128, **deck) == 768 * GIB  # "768GB"
    assert attention_memory(128 * 128, layers=1, heads=16) == 16 * GIB  # of one layer
    assert attention_memory(14 * 14 + 1, **deck) / MIB == pytest.approx(113.7, abs=0.01)
    assert attention_memory(56 * 56, **one) == 4 * 9_834_496  # Swin's "9.8M entries" on 56x56


@pytest.mark.parametrize(
    ("name", "says", "row", "with_head", "without_head"),
    [  # the head of 1000 classes has 1000 · (width + 1) parameters
        ("vit-b/16", 86, (12, 768, 3072, 12), 86_567_656, 85_798_656),
        ("vit-l/32", 307, (24, 1024, 4096, 16), 306_535_400, 305_510_400),
        ("vit-h/14", 632, (32, 1280, 5120, 16), 632_045_800, 630_764_800),
    ],
)
def test_table_of_sizes(
    name: str, says: int, row: tuple[int, ...], with_head: int, without_head: int
) -> None:
    """Decks 001 and 004: Base 86M, Large 307M, Huge 632M."""
    config = config_of(name)
    assert (config.depth, config.width, config.mlp_width, config.heads) == row
    assert parameters(name, classes=1000) == with_head
    assert parameters(name, classes=0) == without_head == with_head - 1000 * (config.width + 1)
    assert says in {round(with_head / 1e6), round(without_head / 1e6)}


def parameters(name: str, **changes: int) -> int:
    with torch.device("meta"):
        model = build("vit", config_of(name, **changes))
    return sum(parameter.numel() for parameter in model.parameters())


def test_only_one_patch_size_gives_the_tables_figure() -> None:
    """Base is B/16 without its head (B/32: 88 and 87), Large is L/32 with it (L/16: 304 and 303)."""
    figures = {
        name: [round(parameters(name, classes=classes) / 1e6) for classes in (1000, 0)]
        for name in ("vit-b/16", "vit-b/32", "vit-l/16", "vit-l/32")
    }
    assert figures == {
        "vit-b/16": [87, 86],
        "vit-b/32": [88, 87],
        "vit-l/16": [304, 303],
        "vit-l/32": [307, 306],
    }


def by_deck_001(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The deck's formula: masked scores are -1e9."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ value


def test_minus_a_thousand_million_is_not_minus_infinity() -> None:
    """Deck 001 masks with -1e9: exact for a row that sees something, an average of what is hidden
    for a row that sees nothing, and no number of float16."""
    q, k, v = (torch.randn(4, 8) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(q, k, v, mask=mask), by_deck_001(q, k, v, mask))
    assert torch.tensor([0.0, -1e9]).softmax(0).tolist() == [1.0, 0.0]  # "Softmax(-1e9) ≈ 0"

    mask[0] = False
    torch.testing.assert_close(by_deck_001(q, k, v, mask)[0], v.mean(0))
    assert torch.equal(attend(q, k, v, mask=mask)[0], torch.zeros(8))
    with pytest.raises(RuntimeError, match="overflow"):
        by_deck_001(q.half(), k.half(), v.half(), mask)


# --- Deck 003: flattened patches ---


def unfolded(images: Tensor, patch: int, order: tuple[int, ...]) -> Tensor:
    """Deck 003: unfold rows, unfold columns, permute, and flatten to (batch, patches, numbers)."""
    cut = images.unfold(2, patch, patch).unfold(3, patch, patch)
    count = (images.shape[-1] // patch) * (images.shape[-2] // patch)
    return cut.permute(order).reshape(len(images), count, -1)


def test_deck_003_flattens_stripes_not_patches() -> None:
    """Unfolding twice gives (batch, channels, rows, columns, height, width): 0 2 3 1 4 5 gathers
    patches. The slide's 0 2 4 1 3 5 would fit another order of dimensions."""
    images = torch.arange(4 * 3 * 32 * 32).view(4, 3, 32, 32)
    patches = unfolded(images, 16, (0, 2, 3, 1, 4, 5))
    assert torch.equal(patches[0, 0], images[0, :, :16, :16].flatten())
    assert torch.equal(patches[0, 1], images[0, :, :16, 16:].flatten())
    slide = unfolded(images, 16, (0, 2, 4, 1, 3, 5))
    assert slide.shape == patches.shape == (4, 4, 768)
    # Its first token is the top eight rows of the whole picture.
    assert torch.equal(slide[0, 0].sort().values, images[0, :, :8].flatten().sort().values)


def test_patches_are_flattened_patches_times_a_matrix() -> None:
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    embed = nn.Linear(768, 768).double()
    ours = Patches(3, 768, (16, 16)).double()
    with torch.no_grad():
        ours.projection.weight.copy_(embed.weight.view(768, 3, 16, 16))
        ours.projection.bias.copy_(embed.bias)  # type: ignore[union-attr]
    found = ours(images)
    torch.testing.assert_close(found.values, embed(unfolded(images, 16, (0, 2, 3, 1, 4, 5))))
    assert found.values.shape == (4, 4, 768)
    wrong = embed(unfolded(images, 16, (0, 2, 4, 1, 3, 5)))
    assert (found.values - wrong).abs().max() > 0.1


def test_pixels_have_no_position_of_their_own() -> None:
    """Deck 003: "every pixel of the original image has its own positional embedding value". There are
    4 · 768 values for 32 · 32 · 3 numbers only because a patch of 16 has 768 too; they are added to
    tokens, and pixels that change places within a patch bring about no other change than without."""
    assert 4 * 768 == 32 * 32 * 3
    smaller = config_of("vit-ti/16", image_size=32)
    assert math.prod(smaller.grid) * smaller.width == 768 != 32 * 32 * 3
    patches = Patches(3, 768, (16, 16))
    positions = torch.randn(1, 4, 768)
    images = torch.randn(1, 3, 32, 32)
    flipped = torch.cat([images[..., :16].flip(-1), images[..., 16:]], -1)
    with_positions = patches(flipped).values + positions - (patches(images).values + positions)
    torch.testing.assert_close(
        with_positions, patches(flipped).values - patches(images).values, atol=1e-5, rtol=0
    )
