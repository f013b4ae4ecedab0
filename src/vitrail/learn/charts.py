"""Charts as inline SVG, coloured by the style sheet of the page that they are in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from vitrail.learn.measure import Bin

Point = tuple[float, float]

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 34  # margins
MOST = 300  # points of a line; more cannot be told apart


def curves(
    title: str, lines: Mapping[str, Sequence[Point]], across: str, told: Callable[[float], str]
) -> str:
    """Lines by name over a common axis; told: how a height is written."""
    points = [point for line in lines.values() for point in line if all(map(math.isfinite, point))]
    (left, right), (low, high) = (_range([point[axis] for point in points]) for axis in (0, 1))
    x, y = _scale(left, right, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)
    drawn = [_grid(_ticks(left, right), _ticks(low, high), x, y, "{:g}".format, told, across)]
    summary = []
    for number, (name, line) in enumerate(lines.items()):
        step = -(-len(line) // MOST)
        some = [point for point in (*line[:-1:step], line[-1]) if all(map(math.isfinite, point))]
        if not some:
            continue
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in some)
        drawn.append(f'<polyline class="s{number}" points="{path}"/>')
        at = LEFT + 8 + 150 * number
        drawn.append(f'<line class="s{number}" x1="{at}" y1="12" x2="{at + 24}" y2="12"/>')
        drawn.append(f'<text x="{at + 30}" y="16">{escape(name)} {told(some[-1][1])}</text>')
        summary.append(f"{name} from {told(some[0][1])} to {told(some[-1][1])}")
    return _svg(f"{title}: {'; '.join(summary)}", drawn)


def reliability(bins: Sequence[Bin]) -> str:
    """The share of answers that is right, by how sure the model was, with 95 % intervals; below, how many."""
    x, y = _scale(0, 1, LEFT, WIDTH - RIGHT), _scale(0, 1, HEIGHT - BOTTOM, TOP)
    fifths = [number / 5 for number in range(6)]
    drawn = [_grid(fifths, fifths, x, y, "{:.0%}".format, "{:.0%}".format, "confidence")]
    total = sum(bin.right.of for bin in bins)
    for bin in bins:
        low, high = bin.right.interval
        middle = x((bin.low + bin.high) / 2)
        wide = x(bin.high) - x(bin.low) - 2
        told = (
            f"confidence {bin.low:.0%} to {bin.high:.0%}: {bin.right.of:,} pictures, {bin.right} right, "
            f"{bin.confidence:.1%} expected"
        )
        share = bin.right.of / total
        drawn += [
            f"<g><title>{told}</title>",
            _bar("bar", x(bin.low) + 1, wide, y(bin.right.share), y(0)),
            _bar("count", x(bin.low) + 1, wide, y(share * 0.2), y(0)),
            f'<line class="whisker" x1="{middle:.1f}" y1="{y(low):.1f}" '
            f'x2="{middle:.1f}" y2="{y(high):.1f}"/>',
            "</g>",
        ]
    drawn.append(f'<line class="ideal" x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}"/>')
    drawn.append(f'<text class="tick" x="{LEFT + 8}" y="16">share of the answers that is right</text>')
    return _svg("Share of right answers by confidence; the numbers are in the table below", drawn)


def _svg(label: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _bar(kind: str, left: float, width: float, top: float, bottom: float) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
    )


def _grid(
    across: Sequence[float],
    up: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
    told_across: Callable[[float], str],
    told_up: Callable[[float], str],
    name: str,
) -> str:
    """Lines at the ticks, with their numbers, and what is told from left to right."""
    parts = [
        f'<line class="grid" x1="{LEFT}" y1="{y(tick):.1f}" x2="{WIDTH - RIGHT}" y2="{y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{told_up(tick)}</text>'
        for tick in up
    ]
    parts += [
        f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
        f"{told_across(tick)}</text>"
        for tick in across
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{name}</text>')
    return "".join(parts)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From a little below to a little above; of one value alone, around it."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers in that range."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
