"""The options of a run: those of the command line, then those of a flat TOML file, then the defaults below."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from distaccum import DistaccumError

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    task: Literal["vision", "language"] = option("vision", "what is trained")
    model: str = option("", "vision: a torchvision name, or cnn; language: gpt, or a Hugging Face name or path")
    weights: str = option("", "a local file of weights to begin with (.pt, .pth); a last layer may differ")
    norm: Literal["group", "frozen", "batch"] = option(
        "group", "in BatchNorm's place; frozen: with its statistics kept"
    )
    data: str = option("", "digits, a torchvision dataset or images by class; texts or JSON lines, a file or a folder")
    data_folder: str = option("data", "where torchvision datasets are, or are downloaded to")
    image_size: int = option(32, "images are resized to this many pixels a side")
    augment: bool = option(False, "random crops and flips, for image datasets and folders")
    field: str = option("text", "of JSON lines, the one that holds the text")
    context: int = option(128, "tokens in the longest row of a text")
    pack: bool = option(True, "fill rows to the context with text after text; else a row is of one text")
    width: int = option(128, "of gpt")
    layers: int = option(4, "of gpt")

    batch_size: int = option(64, "samples (rows of text) per update, over all ranks")
    micro_batch_size: int | Literal["auto"] = option(8, "samples that one forward holds; auto: halved until it fits")
    epochs: int = option(5, "passes over the training data")
    updates: int = option(0, "updates to train for, instead of epochs; 0: epochs decides")

    optimizer: Literal["sgd", "adamw"] = option("sgd", "with lr, momentum (sgd) and weight_decay")
    lr: float = option(0.02, "the highest learning rate")
    momentum: float = option(0.9, "of sgd")
    betas: tuple[float, float] = option((0.9, 0.999), "of adamw, two numbers")
    weight_decay: float = option(0.0, "of either optimizer")
    base_batch_size: int = option(0, "the batch that lr is meant for, which scales it to batch_size; 0: it is for any")
    lr_scaling: Literal["linear", "sqrt"] = option("linear", "lr times batch_size / base_batch_size, or times its root")
    warmup: int = option(0, "updates until the learning rate reaches lr")
    schedule: Literal["cosine", "constant"] = option("cosine", "after the warm-up, counted in updates")
    min_lr: float = option(0.0, "the learning rate at the end of the cosine; it is scaled with lr")
    max_norm: float = option(1.0, "clip the gradient's norm; 0: do not")
    on_nonfinite: Literal["raise", "skip"] = option("raise", "reaction to a gradient with a NaN or an infinity")
    precision: Literal["float32", "bf16", "fp16", "float64"] = option("float32", "fp16 scales the loss")
    compile: bool = option(False, "torch.compile each block of the model, or the whole model where it has none")
    activation_checkpointing: bool = option(False, "keep a block's input alone, and run it again in backward")

    engine: Literal["auto", "plain", "ddp", "fsdp2", "deepspeed", "accelerate"] = option(
        "auto", "the wrapper of the model; auto: plain on one rank, ddp on several"
    )
    sync: Literal["last", "every", "gathered", "replicas"] = option("last", "when gradients are reduced")
    replicas: int = option(1, "fsdp2: groups of ranks that hold the whole model each (HSDP)")
    tp: int = option(1, "gpt on fsdp2: ranks that share the heads of each layer (tensor parallelism)")
    stage: int = option(2, "deepspeed: the ZeRO stage, 0 to 3, as in configs/deepspeed/")
    deepspeed_config: str = option("", "deepspeed: another JSON file; its stage is then the one used")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: GPUs if the machine has any")
    workers: int = option(0, "processes that load data, on each rank")
    seed: int = option(0, "of weights, data order and dropout")

    out: str = option("", "the run's folder; runs/ and the name of the config file (runs/train)")
    resume: bool = option(False, "continue from the newest checkpoint in the run's folder, if there is one")
    checkpoint_every: int = option(50, "updates between checkpoints; 0: only at the end and at a stop")
    checkpoint_minutes: float = option(0.0, "minutes between checkpoints; 0: none by the clock")
    keep: int = option(2, "checkpoints that stay")
    timeout: float = option(10.0, "minutes that ranks wait for each other before they give up")
    evaluate_every: int = option(0, "updates between evaluations; 0: after each epoch")
    evaluate_only: bool = option(False, "measure weights, or with resume the newest checkpoint, and stop")
    best: bool = option(False, "also keep the weights with the lowest loss on held-out data, as best.pt")
    progress_every: float = option(10.0, "seconds between lines of progress; 0: none")
    quiet: bool = option(False, "print only warnings and errors")
    measure_noise: bool = option(False, "measure the gradient noise scale")

    @property
    def largest(self) -> int:
        """The most samples in a forward on a rank, as far as known before any is tried."""
        return self.batch_size if self.micro_batch_size == "auto" else self.micro_batch_size


# A run can resume only a checkpoint made with the same values of these options.
LASTING = (
    "task", "model", "norm", "image_size", "augment", "context", "pack", "width", "layers", "batch_size", "optimizer",
    "momentum", "betas", "weight_decay", "base_batch_size", "lr_scaling", "max_norm", "precision", "seed",
)  # fmt: skip
# Each of these options does nothing unless another option has the given value.
NEEDS = {
    "stage": ("engine", "deepspeed"), "deepspeed_config": ("engine", "deepspeed"), "replicas": ("engine", "fsdp2"),
    "norm": ("task", "vision"), "image_size": ("task", "vision"), "augment": ("task", "vision"),
    "data_folder": ("task", "vision"), "context": ("task", "language"), "field": ("task", "language"),
    "pack": ("task", "language"), "width": ("model", "gpt"),
    "layers": ("model", "gpt"), "momentum": ("optimizer", "sgd"), "betas": ("optimizer", "adamw"),
    "min_lr": ("schedule", "cosine"),
}  # fmt: skip
ABOVE_0 = {
    "image_size", "context", "width", "layers", "batch_size", "micro_batch_size", "epochs", "lr", "replicas",
    "tp", "keep", "timeout",
}  # fmt: skip


def read_config(arguments: Sequence[str] | None = None) -> tuple[Config, int | None]:
    """The options, and the number of ranks that `--plan` names (0: this job's; None: train)."""
    parser = _Parser(
        description="Train a model with exact gradient accumulation, on whatever this is started with.",
        epilog="example: torchrun --nproc-per-node 2 launch/train.py --config configs/ddp-cpu.toml --updates 20",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these; the command line beats it")
    parser.add_argument("--plan", type=int, nargs="?", const=0, metavar="RANKS", help="print the run's plan, and stop")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from DeepSpeed's launcher
    kinds = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        kind = kinds[field.name]
        flag = f"--{field.name.replace('_', '-')}"
        text = field.metadata["help"] + (f" ({field.default})" if field.default not in ("", False) else "")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif get_origin(kind) is Literal:
            parser.add_argument(flag, choices=get_args(kind), help=text)
        elif get_origin(kind) is tuple:
            parser.add_argument(flag, type=float, nargs=2, metavar="X", help=text)
        else:
            metavar = {float: "X", str: "NAME"}.get(kind, "N")
            parser.add_argument(flag, type=kind if isinstance(kind, type) else int_or_auto, metavar=metavar, help=text)
    given = parser.read(arguments)
    path, plan = given.pop("config", None), given.pop("plan", None)
    in_file: dict[str, Any] = {}
    if path:
        parser.where = f"{path}: "
        values = _values_of(path)
        in_file = parser.read(_words(values))
        for name, value in values.items():  # words would hide a number in quotes
            read = in_file[name.replace("-", "_")]
            if value != (list(read) if isinstance(read, tuple) else read):
                stop(f"{path}: {name} = {value!r}, expected {read!r}")
    if "epochs" in given:  # it overrides the file, whose updates would override it
        in_file.pop("updates", None)
    config = Config(**{name: value for name, value in {**in_file, **given}.items() if name in kinds})
    model, data = {"vision": ("resnet18", "digits"), "language": ("gpt", str(ROOT / "docs"))}[config.task]
    config = dataclasses.replace(
        config,
        model=config.model or model,
        data=config.data or data,
        out=config.out or str(Path("runs") / (path.stem if path else "train")),
    )
    for name, (other, value) in NEEDS.items():
        if name in given and getattr(config, other) != value:
            stop(f"{name} does nothing unless {other} is {value!r}, and it is {getattr(config, other)!r}; leave it out")
    _check(config)
    if plan is None and not config.evaluate_only:
        _check_folder(Path(config.out), config.resume)
    elif plan is not None and plan < 0:
        stop(f"--plan {plan}, expected a number of ranks")
    return config, plan


def int_or_auto(word: str) -> int | str:
    if word != "auto" and not word.lstrip("-").isdigit():
        raise argparse.ArgumentTypeError(f"{word!r}, expected a whole number or auto")
    return word if word == "auto" else int(word)


def _values_of(path: Path) -> dict[str, Any]:
    """A file's options."""
    try:
        values: dict[str, Any] = tomllib.loads(read_text(path))
    except OSError as error:
        stop(f"{path} cannot be read ({error.strerror}), expected a TOML file such as those in configs/")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        stop(f"{path} is not TOML: {error}")
    for name, value in values.items():
        if isinstance(value, dict):
            stop(f"{path}: [{name}] is a table, expected flat options: name = value, above any [table]")
    return values


def _words(values: dict[str, Any]) -> list[str]:
    """Options as command-line words."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        if isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words.append(flag + ("" if isinstance(value, bool) else f"={value}"))
    return words


def read_text(path: Path) -> str:
    """Reads UTF-8 whatever the locale, without the byte-order mark that Windows editors write."""
    return path.read_text(encoding="utf-8-sig")


def _check(config: Config) -> None:
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, bool | str | tuple):
            continue
        if not math.isfinite(value) or value < 0 or (name in ABOVE_0 and value == 0):
            cure = "; updates= ends a run sooner" if name == "epochs" else ""
            stop(f"{name} = {value!r}, expected a number {'above' if name in ABOVE_0 else 'of at least'} 0{cure}")
    if not all(0 <= beta < 1 for beta in config.betas):
        stop(f"betas = {config.betas}, expected two numbers from 0 to below 1")
    if config.min_lr > config.lr:
        stop(f"min_lr = {config.min_lr} and lr = {config.lr}, expected a min_lr of at most lr")
    is_untrained = not (config.weights or config.resume) and (config.task == "vision" or config.model == "gpt")
    if config.evaluate_only and is_untrained:
        stop("evaluate_only of weights that nobody has trained; give weights, or resume")
    if config.activation_checkpointing and config.task == "vision" and config.norm == "batch":
        stop(
            "activation_checkpointing with norm = 'batch', whose statistics would count each forward twice; use 'group'"
        )
    if config.norm == "frozen" and not (config.weights or config.resume):
        stop("norm = 'frozen' keeps statistics that nobody has measured; give weights with some, or norm = 'group'")
    if config.engine == "deepspeed" and config.precision == "float64":
        stop("precision = 'float64' with DeepSpeed, which computes in float32 at most; use ddp or fsdp2")


def _check_folder(folder: Path, resume: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"{folder} cannot be made ({error.strerror}); give another --out")
    log = folder / "log.jsonl"
    if not resume and ((log.exists() and log.stat().st_size) or any(folder.glob("checkpoints/update-*"))):
        stop(f"{folder} holds a run already; go on with it by --resume, or give another --out")


def check_batch(config: Config, ranks: int) -> None:
    """Stops if the batch cannot be cut over data ranks: in an update all must get equally many micro-batches."""
    batch, micro = config.batch_size, config.largest
    steps = -(-batch // (ranks * micro))
    if batch // ranks < steps:
        stop(
            f"batch_size = {batch} on {ranks} ranks gives some rank fewer than {steps} micro-batches of {micro}; "
            f"give a batch_size that {ranks} divides, such as {max(1, round(batch / ranks)) * ranks}"
        )
    if ranks % config.replicas:
        stop(f"replicas = {config.replicas} on {ranks} ranks, expected a number that divides them")


class _Parser(argparse.ArgumentParser):
    where = ""  # the source being read, for errors

    def error(self, message: str) -> NoReturn:
        stop(f"{self.where}{message}")

    def read(self, words: Sequence[str] | None) -> dict[str, Any]:
        """Returns the options that were given."""
        read, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].split("=")[0]
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(name, flags, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            self.error(f"{name!r} is not known{meant}; --help lists the options")
        given: dict[str, Any] = {name: value for name, value in vars(read).items() if value is not None}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        if given.get("epochs") and given.get("updates"):
            self.error("both epochs and updates are given, expected one of them")
        return given


def stop(message: str, everywhere: bool = False, status: int = 2) -> NoReturn:
    """Prints one line, from one rank per machine, and exits with the status of a wrong call."""
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)


@contextmanager
def refusals_in_a_line() -> Iterator[None]:
    """Reports a refusal by the library or a wrapper like any other mistake in the options."""
    try:
        yield
    except (ValueError, TypeError, AssertionError, DistaccumError) as error:  # DeepSpeed asserts
        stop(" ".join(str(error).split()))


@contextmanager
def failures_in_a_line() -> Iterator[None]:
    """Reports a failure that ends a run but is not a bug of this program."""
    resume = "what was saved is whole, and --resume goes on from it"
    try:
        yield
    except BrokenFileError as error:
        stop(a_line(error), everywhere=True, status=1)
    except (DistaccumError, OSError) as error:
        stop(f"{a_line(error)}; {resume}", everywhere=True, status=1)
    except KeyboardInterrupt:
        stop(f"stopped by SIGINT before there was anything to save; {resume}", status=130)


def a_line(error: object) -> str:
    """An error's text in one line, or its type if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class BrokenFileError(OSError):
    """A data file that cannot be read. A loader's worker passes on a traceback, whose last line is kept."""

    def __init__(self, text: str) -> None:
        super().__init__(text.rstrip().splitlines()[-1].split(f"{type(self).__name__}: ")[-1])
