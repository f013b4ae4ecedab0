"""The command line: `vitrail COMMAND …`. Commands import what they need, so that help comes at once."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vitrail

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models import Model

# As vitrail.weights and vitrail.learn have them, who import torch.
FORMATS = ("vitrail", "transformers", "timm", "torchvision", "npz")
DEVICES = ("auto", "cpu", "cuda", "mps")
MOST, MOST_THREADS = 10**9, 1024

# What vitrail.weights.convert takes beside fields of the configuration.
NO_FIELDS = {"source", "target", "to", "labels", "revision", "cache_dir", "token"}

# What torch and its allocators say when memory is used up, or when more is asked for than there can be.
OUT_OF_MEMORY = re.compile(
    "out of memory|allocate memory|Invalid buffer size|ALLOC_FAILED|calculation overflowed|Overflow when"
)
LESS_MEMORY = (
    "memory ran out; it takes less with a smaller batch (or accumulate=N, a batch in N parts), with "
    "checkpoint_blocks=true, a smaller image_size, or a smaller model"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 when it worked, 2 when what was given does not work, 130 when interrupted."""
    parser = _parser()
    found, rest = parser.parse_known_args(arguments)
    options = vars(found)
    # argparse takes words only up to the next option; pictures and changes may come after it too.
    if "words" in options and not any(word.startswith("-") for word in rest):
        options["words"] += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    command = options.pop("command")
    warnings.showwarning = _say_warning
    try:
        code: int = command(**options) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:  # a run that was stopped says how to go on
        _complain(error if error.args else "interrupted")
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `vitrail models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else error)
    except UnicodeEncodeError as error:
        word = error.object[: error.end].split()[-1]
        _complain(f"{word!a} is of a name that is no text in UTF-8; give that file or folder another")
    except (ValueError, ImportError) as error:
        _complain(error)
    except (MemoryError, RuntimeError, TypeError) as error:
        if not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
            raise
        _complain(LESS_MEMORY)
    return 2


def _complain(text: object) -> None:
    print(f"vitrail: {text}", file=sys.stderr)


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    _complain(message)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitrail",
        description="Attention models: train, judge, convert, look inside.",
        epilog="`vitrail COMMAND --help` tells more of a command.",
    )
    parser.add_argument("--version", action="version", version=f"vitrail {vitrail.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[..., int | None], what: str, more: str, *examples: str) -> Any:
        """A command with its help: a line in the list of all, a paragraph, and what people type."""
        command = commands.add_parser(
            name,
            help=what,
            description=textwrap.fill(more, 79),
            epilog="\n  ".join(
                ["examples:", *(f"vitrail {name} {example}".rstrip() for example in examples)]
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=run)
        return command

    train = add(
        "train",
        train_on,
        "from pictures to a trained model and a report",
        "Trains on labelled pictures and leaves a run folder with the best model, its figures on pictures "
        "kept apart, and report.html. What is not said is chosen, and told. Pictures: a folder with a folder "
        "for each class, a table (.csv, .parquet), IDX files, an .npz, tar shards, a folder of datasets; "
        "without any, handwritten digits. Fields: those of a run's recipe.toml.",
        "photos/",
        "photos/ epochs=30 model=vit-ti/4 image_size=160 augment.flip=0",
        "photos/ --from MODEL minutes=10 --out runs/mine",
        "photos/ device=cpu --dry-run",
        "--resume --out runs/mine epochs=60",
    )
    train.add_argument("words", nargs="*", metavar="PICTURES|RECIPE.toml|FIELD=VALUE", help="in any order")
    train.add_argument("--from", dest="start", metavar="MODEL", help="fine-tune a folder, file or hub id")
    train.add_argument("--out", type=Path, metavar="DIR", help="the run folder (default: a new one in runs/)")
    train.add_argument("--resume", action="store_true", help="go on in the run folder, by default the latest")
    train.add_argument("--strict", action="store_true", help="refuse pictures that cannot be read")
    train.add_argument("--dry-run", action="store_true", help="only say what would happen, and how long")

    evaluate = add(
        "evaluate",
        evaluate_on,
        "the figures of a model on labelled pictures",
        "Accuracy with its interval, figures of each class, confusion and calibration.",
        "runs/mine",
        "runs/mine new/ --json --report new.html",
        "MODEL photos/ --split val",
    )
    evaluate.add_argument("source", metavar="MODEL", help="a run folder, a folder, a file, or a hub id")
    evaluate.add_argument(
        "place", nargs="?", metavar="PICTURES", help="as for train (default: those a run kept apart)"
    )
    evaluate.add_argument("--split", help="test, val or train (default: the first of them that there is)")
    evaluate.add_argument("--report", type=Path, metavar="FILE", help="also write the report, as HTML")
    evaluate.add_argument("--json", dest="as_json", action="store_true", help="the figures as JSON")

    predict = add(
        "predict",
        predict_of,
        "answers for any pictures, in their order",
        "Answers for pictures, written while they come. A file that cannot be read gets a row that says why, "
        "and the exit code 2.",
        "runs/mine a.jpg b.jpg",
        "MODEL photos/ --top 1 --out answers.parquet",
    )
    predict.add_argument("source", metavar="MODEL", help="a run folder, a folder, a file, or a hub id")
    predict.add_argument("pictures", nargs="+", metavar="PICTURES", help="files, or folders of them")
    predict.add_argument(
        "--out", default="-", metavar="FILE", help="a .csv, .jsonl or .parquet (default: CSV, printed)"
    )
    predict.add_argument(
        "--top", type=_count, default=5, metavar="N", help="how many classes of each (default: %(default)s)"
    )

    probe = add(
        "probe",
        probe_on,
        "what a model's features are worth on pictures of one's own",
        "Nearest neighbours and a linear probe on frozen features: what the model knows without being "
        "trained further.",
        "MODEL photos/",
        "MODEL photos/ --json --device cpu",
    )
    probe.add_argument("source", metavar="MODEL", help="a run folder, a folder, a file, or a hub id")
    probe.add_argument("place", metavar="PICTURES", help="labelled ones, as for train")
    probe.add_argument("--json", dest="as_json", action="store_true", help="all figures as JSON")

    for judging in (evaluate, predict, probe):
        judging.add_argument(
            "--batch",
            type=_count,
            default=64,
            metavar="N",
            help="pictures at a time, in each process (default: %(default)s)",
        )
        judging.add_argument(
            "--workers",
            type=_threads,
            metavar="N",
            help="threads that decode (default: one for each core)",
        )
        judging.add_argument(
            "--device",
            choices=DEVICES,
            default="auto",
            help="where it is computed (default: CUDA where there is one, else the CPU)",
        )

    models = add(
        "models",
        list_models,
        "list the models by name, with what they cost",
        "Lists every model by its paper's name, with its parameters, the multiply-adds (1 MAC is 2 FLOPs) of "
        "one image, its tokens, and the memory that all of its attention matrices take in float32 where "
        "they are kept.",
        "",
        "vit-b/16 vit-s/7 --image-size 224x320 --json",
    )
    models.add_argument("names", nargs="*", metavar="NAME", help="only these (any patch size works)")
    models.add_argument("--image-size", type=_size, metavar="N|HxW", help="instead of the papers'")
    models.add_argument("--json", dest="as_json", action="store_true", help="one JSON object a line")

    convert = add(
        "convert",
        convert_weights,
        "rewrite weights in the form of another library",
        "Reads weights of any form that vitrail.load reads and writes them for another library, with "
        "configuration, preprocessing and labels. Nothing is dropped: what the other form cannot say is "
        "refused, unless a field of the configuration is changed on the way.",
        "runs/mine out --to transformers",
        "google/vit-base-patch16-224 vit.pth --to torchvision norm_eps=1e-6",
    )
    convert.add_argument("source", metavar="IN", help="a run folder, a folder, a file, or a hub id")
    convert.add_argument("target", metavar="OUT", help="a new folder, or a file for torchvision, npz")
    convert.add_argument(
        "words", nargs="*", metavar="FIELD=VALUE", help="changes to the configuration, as vitrail.load takes"
    )
    convert.add_argument("--to", choices=FORMATS, default="vitrail", help="default: %(default)s")

    look = add(
        "look",
        look_at,
        "classify pictures and show what the model looks at",
        "Classifies pictures, prints the likeliest classes and where the last layer looks, and draws the "
        "attention of every layer over each picture.",
        "",
        "photos/ --model runs/mine --out looks",
        "goat.jpg --model MODEL --labels names.txt --top 3",
    )
    look.add_argument(
        "pictures", nargs="*", metavar="PICTURES", help="files or folders; without any, drawn shapes"
    )
    look.add_argument(
        "--model",
        default="vit-ti/16",
        metavar="MODEL",
        help="a run folder, a folder, a file, a hub id, or a name of `vitrail models` with random weights "
        "(default: %(default)s)",
    )
    look.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help="names of the classes, one a line, where the model has none",
    )
    look.add_argument(
        "--top", type=_count, default=5, metavar="N", help="how many classes to print (default: %(default)s)"
    )
    look.add_argument("--out", type=Path, default=Path("looks"), metavar="DIR", help="default: %(default)s")
    return parser


def _size(text: str) -> tuple[int, int]:
    """224 or 224x320 as (height, width)."""
    sides = [int(side) if side.isdecimal() else 0 for side in text.lower().split("x")]
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 224, or 224x320 (height first)")
    return sides[0], sides[-1]


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write 1 to {MOST}")
    return int(text)


def _threads(text: str) -> int:
    if _count(text) > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text} threads are too many; write up to {MOST_THREADS}")
    return int(text)


def train_on(
    words: Sequence[str], start: str | None, out: Path | None, resume: bool, strict: bool, dry_run: bool
) -> None:
    """`vitrail train`: one word may say what to train on, the others change the recipe."""
    from vitrail.learn.train import train

    sources = [word for word in words if "=" not in word or Path(word).exists()]
    if len(sources) > 1:
        raise ValueError(
            f"{' and '.join(sources)}: pictures or a recipe are one place; changes are written field=value"
        )
    train(
        sources[0] if sources else None,
        [word for word in words if word not in sources],
        start=start,
        out=out,
        resume=resume,
        strict=strict,
        dry_run=dry_run,
    )


def evaluate_on(
    source: str,
    place: str | None,
    split: str | None,
    report: Path | None,
    as_json: bool,
    batch: int,
    workers: int | None,
    device: str,
) -> None:
    """`vitrail evaluate`: figures, as a table or JSON."""
    from vitrail.learn.evaluate import evaluate
    from vitrail.learn.measure import table

    figures = evaluate(source, place, split=split, batch=batch, workers=workers, device=device, report=report)
    if figures is not None:
        print(json.dumps(figures.to_dict()) if as_json else table(figures))


def predict_of(
    source: str,
    pictures: Sequence[str],
    out: str,
    top: int,
    batch: int,
    workers: int | None,
    device: str,
) -> int:
    """`vitrail predict`: a row for each picture."""
    from vitrail.learn.predict import predict

    unread = predict(source, pictures, out, top=top, batch=batch, workers=workers, device=device)
    if unread:
        _complain(f"{unread:,} of the pictures could not be read; their rows say why, as error")
    return 2 if unread else 0


def probe_on(source: str, place: str, as_json: bool, batch: int, workers: int | None, device: str) -> None:
    """`vitrail probe`: what frozen features are worth."""
    from vitrail.learn.probe import probe

    found = probe(source, place, batch=batch, workers=workers, device=device)
    if found is not None:
        print(json.dumps(found.to_dict()) if as_json else found)


def list_models(names: Sequence[str], image_size: tuple[int, int] | None, as_json: bool) -> None:
    """`vitrail models`: a row for each name."""
    from vitrail import models

    changes = {"image_size": image_size} if image_size else {}
    configs = {name: models.config_of(name, **changes) for name in names or models.names()}
    if not as_json:
        print(
            f"{'name':<18}{'image':>10}{'parameters':>16}{'GMACs':>10}{'GFLOPs':>10}{'tokens':>8}"
            f"{'attention':>12}"
        )
    for name, config in configs.items():
        try:
            cost = models.costs(config)
        except (RuntimeError, TypeError):
            size = "{}x{}".format(*config.image_size)
            raise ValueError(f"{name} at {size} is larger than torch can count; make it smaller") from None
        if as_json:
            print(json.dumps({"name": name, "image_size": config.image_size, **cost._asdict()}))
            continue
        print(
            f"{name:<18}{'{}x{}'.format(*config.image_size):>10}{cost.parameters:>16,}"
            f"{cost.macs / 1e9:>10,.2f}{2 * cost.macs / 1e9:>10,.2f}{cost.tokens:>8,}"
            f"{_bytes(cost.attention_bytes):>12}",
            flush=True,
        )
    if not as_json and not names:
        print("\nFor scale: attention matrices of 48 layers and 16 heads, one picture, with a token for")
        for what, tokens in (
            ("each of 14x14 patches", 14**2),
            ("each of 16x16 patches", 16**2),
            ("every pixel of 128x128", 128**2),
        ):
            memory = models.attention_memory(tokens, layers=48, heads=16)
            print(f"  {what:<24}{_bytes(memory):>12}")


def convert_weights(source: str, target: str, words: Sequence[str], to: str) -> None:
    """`vitrail convert`: weights in, weights out; the words change the configuration."""
    from vitrail.learn.recipe import changes
    from vitrail.weights import convert

    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or name in NO_FIELDS:
            raise ValueError(
                f"{word!r} is no change to a configuration; write field=value, as in norm_eps=1e-6"
            )
    convert(source, target, to=to, **changes(words))
    print(f"{source} → {target} ({to})")


def look_at(pictures: Sequence[str], model: str, labels: Path | None, top: int, out: Path) -> int:
    """`vitrail look`: what a model says of pictures, and what it looks at."""
    import torch

    from vitrail.data.pictures import PictureError
    from vitrail.data.readers.found import expanded, reading
    from vitrail.data.samples import shapes
    from vitrail.look import as_text, overlay, record, sheet

    net, random = _model(model)
    net.eval()
    images: dict[str, Any] = {path: path for path in expanded(pictures)} or shapes()
    print(f"{model}: {sum(p.numel() for p in net.parameters()):,} parameters")
    if labels:
        with reading(labels):
            net.labels = tuple(labels.read_text(encoding="utf-8").splitlines())
        if len(net.labels) != net.config.classes:
            raise ValueError(
                f"{labels} has {len(net.labels)} lines; the model has {net.config.classes} classes"
            )
    if random:
        print("Its weights are random, so the answers mean nothing: give trained ones as --model.")
    elif net.config.classes and not net.labels:
        print("It does not name its classes; give the names as --labels.")
    out.mkdir(parents=True, exist_ok=True)
    unread = 0
    for number, (name, source) in enumerate(images.items(), 1):
        try:
            inputs = net.preprocess(source)
        except PictureError as error:  # one bad file does not stop the rest
            _complain(error)
            unread += 1
            continue
        with torch.inference_mode(), record(net, "blocks.*") as seen:
            answer = net(inputs[None])[0]
        maps = {layer: call.map()[0].mean(0) for layer, call in seen.items()}
        last = list(maps.values())[-1]
        answers = _answers(net, answer, top) if net.config.classes else []
        print(f"\n{name}" + (f"  ({number} of {len(images)})" if len(images) > 1 else ""))
        for line, said in zip_longest(as_text(last), answers, fillvalue=""):
            print(f"  {line:<{2 * last.shape[1]}}  {said}".rstrip())
        print(f"  what the last layer looks at, a patch: {last.min():.2%} to {last.max():.2%} (█)")
        picture = net.preprocess.picture(inputs)
        drawn = [("what it was given", picture)]
        drawn += [
            (
                f"{layer.removesuffix('.attention')}  {seen.min():.1%} to {seen.max():.1%}",
                overlay(picture, seen, patch=net.config.patch),
            )
            for layer, seen in maps.items()
        ]
        file = out / f"{number:03}-{Path(name).stem}.png"
        sheet("   ".join([Path(name).name, *answers[:1]]), drawn).save(file)
        print(f"  every layer: {file}")
    return 2 if unread else 0


def _answers(model: Model, logits: Tensor, top: int) -> list[str]:
    """The likeliest classes, a line each, from logits (classes,)."""
    best = logits.softmax(-1).topk(min(top, len(logits)))
    return [
        f"{chance:6.1%}  {model.labels[index] if model.labels else f'class {index}'}"
        for chance, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _model(name: str) -> tuple[Model, bool]:
    """The model of that name or place, and whether its weights are random."""
    from vitrail import models

    if not Path(name).exists() and name.rpartition("/")[0].lower() in models.TABLE:
        return models.create(name), True
    return vitrail.load(name), False


def _bytes(count: int) -> str:
    """Binary units, as the memory of a machine is told."""
    step = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**step:,.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"
