"""The report: one page that needs no other file, with the figures, the pictures and what led to them."""

from __future__ import annotations

import base64
import math
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.data.sources import Pictures
from vitrail.learn.charts import curves, reliability
from vitrail.learn.measure import Case, Figures, OfClass, Rate, confusions
from vitrail.learn.progress import clock
from vitrail.learn.state import DATA, METRICS, RECIPE, read_data, read_lines
from vitrail.look import attention_layers, overlay, record
from vitrail.models import Model
from vitrail.weights.errors import SaveError, explained
from vitrail.weights.writing import replacing

NUMBERED = 25  # classes up to which the cells of the confusion matrix show their numbers
DRAWN = 100  # classes up to which there is one
OFTEN = 10  # confusions that are listed
SIDE = 192  # pixels that a picture in the page is high or wide at least
ROWS = 60  # of a table of validations

Cells = Sequence[str]


def write_report(file: Path, model: Model, pictures: Pictures, figures: Figures, *, run: Path) -> None:
    """Writes the page about a model's figures on pictures.

    run: the run folder that the model is of, whose metrics, recipe and findings are told as far as they are
    there; else what the model was loaded from.
    """
    lines = read_lines(run, 10**9)
    sections = [
        _header(run.name, model, figures, lines),
        _findings(run, figures),
        _learning(lines),
        _classes(figures),
        _confusion(figures),
        _calibration(figures),
        _cases("Surest mistakes", "Wrong, and most sure of it.", figures.mistakes, model, pictures),
        _cases("Surest hits", "Right: the surest of each class.", figures.hits, model, pictures),
        _origin(run),
    ]
    style = files("vitrail.learn").joinpath("report.css").read_text(encoding="utf-8")
    page = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} · Vitrail</title>\n<style>\n{style}</style>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )
    with explained(SaveError, f"{file} cannot be written"), replacing(file, folder=False) as new:
        new.write_text(page, encoding="utf-8")


def _header(name: str, model: Model, figures: Figures, lines: Sequence[dict[str, Any]]) -> str:
    low, high = figures.top1.interval
    parameters = sum(parameter.numel() for parameter in model.parameters())
    height, width = model.preprocess.size
    tiles = [("accuracy", f"{figures.top1.share:.1%}", f"95 % interval {low:.1%} to {high:.1%}")]
    if len(figures.classes) > 5:
        tiles.append(("among the first 5", f"{figures.top5.share:.1%}", "top-5 accuracy"))
    tiles += [
        ("mean over classes", f"{figures.balanced:.1%}", "balanced accuracy"),
        ("calibration error", f"{figures.ece:.1%}", "confidence against accuracy"),
        ("model", _short(parameters), f"parameters; sees {height}×{width}"),
    ]
    trained = _seconds(lines)
    if trained:
        idle = sum(line["idle"] * spent for line, spent in trained) / sum(spent for _, spent in trained)
        total = clock(sum(spent for _, spent in trained))
        tiles.append(("training", total, f"{idle:.0%} of it waiting for pictures"))
    return (
        f"<header><h1>{escape(name)}</h1>"
        f'<p class="headline">Of {figures.top1.of:,} pictures (<em>{escape(figures.of)}</em>) '
        f"<strong>{figures.top1.hits:,} are named right</strong>. "
        f"On other pictures of the same kind expect between {low:.1%} and {high:.1%}.</p>"
        '<dl class="tiles">'
        + "".join(f"<div><dt>{a}</dt><dd>{b}<small>{c}</small></dd></div>" for a, b, c in tiles)
        + "</dl></header>\n"
    )


def _seconds(lines: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """The lines of training, each with how long its steps took."""
    training = [line for line in lines if line["part"] == "train"]
    before = [0, *(line["step"] for line in training)]
    return [
        (line, line["seconds_per_step"] * (line["step"] - step))
        for line, step in zip(training, before, strict=False)
    ]


def _findings(run: Path, figures: Figures) -> str:
    """What was found wrong with the pictures."""
    notes = list(read_data(run).notes) if (run / DATA).is_file() else []
    notes += [f"{name} cannot be read: {why}" for name, why in figures.bad.items()]
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return _section("What to know of the pictures", f'<ul class="findings">{items}</ul>')


def _learning(lines: Sequence[dict[str, Any]]) -> str:
    parts = {part: [line for line in lines if line["part"] == part] for part in ("train", "val")}
    if not parts["val"] or not parts["train"]:
        return ""
    charts = []
    for title, names, told in (
        ("loss", {"training": "train", "validation": "val"}, "{:.3g}".format),
        ("accuracy", {"training": "train", "validation": "val"}, "{:.1%}".format),
        ("rate", {"rate": "train"}, "{:.2g}".format),
    ):
        key = "lr" if title == "rate" else title
        drawn = {
            name: [(line["epoch"], line[key]) for line in parts[part] if key in line]
            for name, part in names.items()
        }
        if all(drawn.values()):
            charts.append(
                f'<figure class="chart"><h3>{title.capitalize()}</h3>'
                f"{curves(title, drawn, 'epoch', told)}</figure>"
            )
    best = max(parts["val"], key=lambda line: (line.get("accuracy", 0.0), -line["loss"]))
    step = -(-len(parts["val"]) // ROWS)
    rows = [
        (f"{line['epoch']:g}", f"{line['loss']:.4f}", f"{line.get('accuracy', math.nan):.2%}")
        for line in (*parts["val"][:-1:step], parts["val"][-1])
    ]
    return _section(
        "Learning",
        f"<p>The best of {len(parts['val'])} validations was at epoch {best['epoch']:g}; its weights are "
        'the ones judged here. <span class="soft">Training pictures are varied and sometimes mixed, which '
        "makes them harder than those of the validation.</span></p>"
        f'<div class="charts">{"".join(charts)}</div>'
        + _details("The validations in numbers", _table(("epoch", "loss", "accuracy"), rows)),
    )


def _classes(figures: Figures) -> str:
    taken: dict[str, str] = {}
    for count, truth, answer in confusions(figures):
        taken.setdefault(truth, f"{escape(answer)} ({count})")

    def weakness(each: OfClass) -> tuple[bool, float]:
        return not each.recall.of, each.recall.share if each.recall.of else 0.0

    rows = [
        (
            escape(each.name),
            f"{each.recall.of:,}",
            _rate(each.recall),
            _rate(each.precision),
            "–" if math.isnan(each.f1) else f"{each.f1:.2f}",
            taken.get(each.name, "–"),
        )
        for each in sorted(figures.of_class, key=weakness)
    ]
    heads = (
        "class",
        "pictures",
        "found (recall)",
        "right when said (precision)",
        "F1",
        "most often taken for",
    )
    return _section(
        "Class by class",
        "<p>The weakest first. The bar is the 95 % interval: where the true share may well lie, given so "
        f'many pictures.</p><div class="wide">{_table(heads, rows)}</div>',
    )


def _rate(rate: Rate) -> str:
    low, high = rate.interval
    if not rate.of:
        return "–"
    return (
        f'{rate.share:.1%} <span class="soft">({100 * low:.0f}–{100 * high:.0f})</span>'
        f'<span class="range" style="--l:{low:.3f};--h:{high:.3f};--p:{rate.share:.3f}"><i></i><b></b></span>'
    )


def _confusion(figures: Figures) -> str:
    often = [
        (escape(truth), escape(answer), f"{count:,}") for count, truth, answer in confusions(figures)[:OFTEN]
    ]
    listed = _table(("class", "taken for", "pictures"), often) if often else "<p>There is no mistake.</p>"
    if len(figures.classes) > DRAWN:
        return _section("What is taken for what", f'<div class="scroll">{listed}</div>')
    return _section(
        "What is taken for what",
        "<p>Rows are true classes, columns are answers. The deeper the colour, the more of a row:"
        '<span class="legend right"></span>right,<span class="legend wrong"></span>'
        f'wrong.</p><div class="wide">{_matrix(figures)}</div>'
        + _details("The most frequent mistakes", f'<div class="scroll">{listed}</div>'),
    )


def _matrix(figures: Figures) -> str:
    """The confusion matrix as a table, whose cells are coloured by their share of the row."""
    names = [escape(name) for name in figures.classes]
    heads = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
    rows = []
    for number, (name, counts) in enumerate(zip(names, figures.confusion.tolist(), strict=True)):
        total = sum(counts)
        cells = "".join(
            _cell(count, total, number == column, f"{count:,} of {total:,} {name} taken for {names[column]}")
            for column, count in enumerate(counts)
        )
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>\n')
    kind = "matrix" if len(names) <= NUMBERED else "matrix dense"
    head = f"<thead><tr><td></td>{heads}</tr></thead>"
    return f'<table class="{kind}">{head}<tbody>{"".join(rows)}</tbody></table>'


def _cell(count: int, total: int, right: bool, told: str) -> str:
    if not count:
        return "<td></td>"
    depth = 0.15 + 0.85 * count / total
    kind = ("r" if right else "w") + (" deep" if depth > 0.6 else "")
    return f'<td class="{kind}" style="--v:{depth:.2f}" title="{told}">{count}</td>'


def _calibration(figures: Figures) -> str:
    sure = sum(bin.confidence * bin.right.of for bin in figures.bins) / figures.top1.of
    verdict = "more sure than right" if sure > figures.top1.share else "more right than sure"
    rows = [
        (
            f"{bin.low:.0%} to {bin.high:.0%}",
            f"{bin.right.of:,}",
            f"{bin.confidence:.1%}",
            escape(str(bin.right)),
        )
        for bin in figures.bins
    ]
    return _section(
        "Can its confidence be believed?",
        f"<p>On average it is {sure:.1%} sure and {figures.top1.share:.1%} right: {verdict}. Where a bar "
        "ends below the dashed line, the model is too sure; lines are 95 % intervals, grey is how many "
        f'pictures there are.</p><figure class="chart narrow">{reliability(figures.bins)}</figure>'
        + _details("In numbers", _table(("confidence", "pictures", "expected", "right"), rows)),
    )


def _cases(title: str, text: str, cases: Sequence[Case], model: Model, pictures: Pictures) -> str:
    """Pictures as the model saw them, and beside each where its last layer looked."""
    if not cases:
        return ""
    inputs = torch.stack([model.preprocess(pictures.data(case.picture)) for case in cases])
    device = next(model.parameters()).device
    last = list(attention_layers(model))[-1:]
    with torch.inference_mode(), record(model, last) as seen:
        model(inputs.to(device))
    maps = [seen[layer].map().mean(1).cpu() for layer in last]  # of one layer or none: (cases, rows, columns)
    shown = []
    for row, case in enumerate(cases):
        picture = _enlarged(model.preprocess.picture(inputs[row]))
        times = picture.width // inputs.shape[-1]
        patch = (model.config.patch[0] * times, model.config.patch[1] * times)
        name = escape(case.name)
        images = [(picture, f"{name}, a {escape(case.truth)}")]
        images += [
            (
                overlay(picture, each[row], patch=patch),
                f"The attention of the last layer, most of it {_where(each[row])}",
            )
            for each in maps
        ]
        drawn = "".join(
            f'<img src="{_jpeg(image)}" width="{image.width}" height="{image.height}" alt="{alt}">'
            for image, alt in images
        )
        truth, answer = escape(case.truth), escape(case.answer)
        told = (
            f"<strong>{truth}</strong>, {case.confidence:.1%} sure"
            if case.truth == case.answer
            else f"<strong>{truth}</strong> ({case.of_truth:.1%}) taken for <strong>{answer}</strong> "
            f"({case.confidence:.1%})"
        )
        short = escape(Path(case.name).name)
        shown.append(
            f'<figure><div class="pair">{drawn}</div><figcaption>{told}<br>'
            f'<span title="{name}">{short}</span></figcaption></figure>\n'
        )
    beside = " Beside each picture, as the model sees it, is where its last layer looks." if last else ""
    return _section(title, f'<p>{text}{beside}</p><div class="pictures">{"".join(shown)}</div>')


def _enlarged(picture: Image.Image) -> Image.Image:
    """Large enough to be looked at; pixels stay squares."""
    times = -(-SIDE // max(picture.size))
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def _jpeg(picture: Image.Image) -> str:
    buffer = BytesIO()
    picture.save(buffer, "JPEG", quality=80, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _where(seen: Tensor) -> str:
    """The part of a map (rows, columns) in which its greatest value is."""
    row, column = divmod(int(seen.argmax()), seen.shape[1])
    up = ("at the top", "in the middle", "at the bottom")[3 * row // seen.shape[0]]
    return f"{up}, {('left', 'centre', 'right')[3 * column // seen.shape[1]]}"


def _origin(run: Path) -> str:
    """The recipe, and on what it ran."""
    versions = {
        "Vitrail": vitrail.__version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    told = " · ".join(f"{name} {escape(value)}" for name, value in versions.items())
    recipe = run / RECIPE
    parts = [f'<p class="soft">{told}</p>']
    if recipe.is_file():
        again = f"vitrail train {recipe}"
        parts.append(f"<p>Once more: <code>{escape(again)}</code></p>")
        text = escape(recipe.read_text(encoding="utf-8"))
        parts.append(_details("The whole recipe", f"<pre>{text}</pre>"))
    if (run / METRICS).is_file():
        parts.append(f'<p class="soft">Every line of the curves is in {escape(str(run / METRICS))}.</p>')
    return _section("Where it comes from", "".join(parts))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>\n"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _table(heads: Cells, rows: Iterable[Cells]) -> str:
    """A table, the first column naming its rows."""
    first, *others = heads
    head = f'<th scope="col" class="left">{first}</th>'
    head += "".join(f'<th scope="col">{name}</th>' for name in others)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'
        for name, *cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _short(count: int) -> str:
    """5717416 as 5.7 M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)
