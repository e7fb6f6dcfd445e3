"""Tasks: data, a model, and the loss of a batch. A task knows nothing of ranks and windows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from distaccum import count_samples, count_tokens
from distaccum.batchnorm import freeze, to_groupnorm

from .config import BrokenFileError, Config, a_line, read_text, stop
from .data import Keyed
from .gpt import GPT

HELD_OUT = 5  # one sample in five is held out if the data has no split of its own
IGNORED = -100  # the label of a token without a next one; cross_entropy leaves it out
Batch = dict[str, Tensor]  # "inputs" of the model, and "labels" for its scores


@dataclass(frozen=True)
class Task:
    model: nn.Module
    title: str  # of model and data
    train: Keyed
    held_out: Any  # a sequence of samples
    collate: Callable[[list[Any]], Batch]
    count: Callable[[Any], Any]  # what the loss is a mean over
    unit: str  # that `count` counts
    per_sample: float = 1.0  # units in a sample, on average


def loss_of(scores: Any, labels: Tensor, reduction: str = "mean") -> Tensor:
    scores = getattr(scores, "logits", scores)  # Hugging Face's models wrap them
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction=reduction, ignore_index=IGNORED)


def measure(scores: Any, labels: Tensor) -> Tensor:
    """Sums over a batch: the number that the loss is a mean over, the loss, and the right answers."""
    total = loss_of(scores, labels, "sum")
    right = getattr(scores, "logits", scores).argmax(-1) == labels
    return torch.stack([labels.ne(IGNORED).sum(), total, right.sum()]).double().cpu()


def make_task(config: Config, is_first_here: bool = True, wait: Callable[[], None] = lambda: None) -> Task:
    """Makes the task. `is_first_here`: this process downloads for its machine; `wait` makes the others wait for it."""
    torch.manual_seed(config.seed)
    task = _vision(config, is_first_here, wait) if config.task == "vision" else _language(config)
    if not len(task.train) or not len(task.held_out):
        sizes = f"{len(task.train)} samples to train on and {len(task.held_out)} held out"
        stop(f"{config.data} has {sizes}, expected some of both")
    if config.weights:
        task = replace(task, title=task.title + _load_weights(task.model, Path(config.weights)))
    if config.precision == "float64":
        task.model.double()
    train_mode(task.model, config)  # a Hugging Face model comes without dropout, as from_pretrained leaves it
    return task


def train_mode(model: nn.Module, config: Config) -> None:
    model.train()
    if config.norm == "frozen":
        freeze(model)


def _load_weights(model: nn.Module, path: Path) -> str:
    """Loads a `state_dict()`; at most one layer may differ or be missing, and is made anew. Returns what it did."""
    own: dict[str, Any] = model.state_dict()
    given: dict[str, Any] = {}
    try:
        given = torch.load(path, map_location="cpu", weights_only=True)
        given = given.get("model", given)  # of torchvision's own program
        fits = {name: one for name, one in given.items() if name in own and one.shape == own[name].shape}
    except Exception as error:  # of as many kinds as there are ways to break a file
        reason = a_line(error) if isinstance(error, OSError) else type(error).__name__
        stop(f"weights = '{path}' cannot be read as weights by their names ({reason})")
    anew = sorted({name.rpartition(".")[0] for name in own.keys() - fits.keys()})
    statistics = ("running_mean", "running_var", "num_batches_tracked")  # GroupNorm has none
    unknown = sorted(name for name in given.keys() - own.keys() if not name.endswith(statistics))
    if unknown or len(anew) > 1:
        layer = (anew[1:] or [unknown[0].rpartition(".")[0]])[0]
        stop(
            f"weights = '{path}' is of another model than this run's: layer {layer!r} is not the same in both (at most "
            "the last one may differ); give the model that made them"
        )
    model.load_state_dict(fits, strict=False)
    return f" from {path}" + (f" (but {anew[0]})" if anew else "")


def try_model(task: Task, config: Config, device: torch.device) -> None:
    """Stops if the model does not take the data; runs forward on two copies of a sample, without lasting effect."""
    task.model.to(device).eval()  # otherwise statistics and random numbers would change
    batch = to_device(task.collate([task.train[0]] * 2), device)
    try:
        with torch.no_grad():
            loss_of(task.model(batch["inputs"]), batch["labels"])
    except Exception as error:
        stop(f"{task.title}: the model does not take a sample of this data ({a_line(error)})")
    train_mode(task.model, config)


# Vision


def _vision(config: Config, is_first_here: bool, wait: Callable[[], None]) -> Task:
    train, held_out, classes = _images(config, is_first_here, wait)
    dtype = torch.float64 if config.precision == "float64" else torch.float32

    def collate(samples: list[Any]) -> Batch:
        images, labels = zip(*samples, strict=True)
        return {"inputs": torch.stack(images).to(dtype), "labels": torch.tensor([int(label) for label in labels])}

    model = _vision_model(config, classes)
    data = Keyed(train, config.seed, draws=config.augment)
    if config.norm == "group":
        model = to_groupnorm(model)
    return Task(model, f"{config.model} on {config.data}", data, held_out, collate, count_samples, "samples")


def _images(config: Config, is_first_here: bool, wait: Callable[[], None]) -> tuple[Any, Any, int]:
    """Images to train on, those held out, and the number of classes."""
    if config.data == "digits":
        if config.augment:
            stop("augment with digits, which come as tensors; it is for image datasets and folders")
        return (*_digits(config), 10)
    from torchvision import datasets
    from torchvision.transforms import v2

    to_tensor = [v2.ToImage(), v2.RGB(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    plain = v2.Compose([v2.Resize((config.image_size, config.image_size)), *to_tensor])
    crop = [v2.RandomResizedCrop(config.image_size, scale=(0.3, 1.0)), v2.RandomHorizontalFlip()]
    changed = v2.Compose([*crop, *to_tensor]) if config.augment else plain

    folder = Path(config.data)
    if folder.is_dir():
        has_split = (folder / "train").is_dir() or (folder / "val").is_dir()
        folders = [folder / "train", folder / "val"] if has_split else [folder, folder]
        try:
            train, test = (
                datasets.ImageFolder(one, transform, loader=_load_image)
                for one, transform in zip(folders, (changed, plain), strict=True)
            )
        except FileNotFoundError as error:
            stop(f"{folder} is no folder of images by class, nor one with train and val (class/image.png): {error}")
        if train.classes != test.classes or len(train.classes) < 2:
            stop(f"{folder} has images of {train.classes} and {test.classes}, expected the same two classes or more")
        if has_split:
            return train, test, len(train.classes)
        held_out, kept = _split(len(train), config.seed)
        return torch.utils.data.Subset(train, kept), torch.utils.data.Subset(test, held_out), len(train.classes)

    kind = getattr(datasets, config.data, None)
    if kind is None or "train" not in getattr(kind.__init__, "__annotations__", {}):
        stop(
            f"data = {config.data!r} is no folder here and no torchvision dataset with train=True, such as CIFAR10, "
            "CIFAR100, MNIST or FashionMNIST; give one of these, digits, or the path of a folder of images by class"
        )
    try:
        if is_first_here:
            kind(config.data_folder, train=True, download=True)
            kind(config.data_folder, train=False, download=True)
    except (RuntimeError, OSError) as error:
        stop(f"{config.data} is not in {config.data_folder} and could not be downloaded: {error}")
    wait()
    train, test = (
        kind(config.data_folder, train=which, transform=how) for which, how in ((True, changed), (False, plain))
    )
    return train, test, len(train.classes)


def _load_image(path: str) -> Any:
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except Exception as error:
        raise BrokenFileError(
            f"{path} is no image that can be read ({type(error).__name__}); mend or remove it"
        ) from error


def _digits(config: Config) -> tuple[TensorDataset, TensorDataset]:
    # `load_digits` reads this file; its import takes each rank three seconds.
    package = importlib.util.find_spec("sklearn")
    if package is None:
        stop("data = 'digits' needs scikit-learn; pip install scikit-learn, or give other data")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(numpy.loadtxt(file, delimiter=","))  # 64 pixels from 0 to 16, and the digit
    images = (rows[:, :-1] / 16).reshape(-1, 1, 8, 8)
    images = interpolate(images, size=(config.image_size, config.image_size), mode="bilinear").expand(-1, 3, -1, -1)
    labels = rows[:, -1].long()
    held_out, kept = _split(len(labels), config.seed)
    return TensorDataset(images[kept], labels[kept]), TensorDataset(images[held_out], labels[held_out])


def _split(number: int, seed: int) -> tuple[list[int], list[int]]:
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[: number // HELD_OUT], order[number // HELD_OUT :]


def _vision_model(config: Config, classes: int) -> nn.Module:
    if config.model == "cnn":
        return _cnn(classes)
    from torchvision import models

    if config.model not in models.list_models(module=models):
        stop(f"model = {config.model!r} is no torchvision model; there are resnet18, resnet50, vit_b_16 and others")
    more: dict[str, Any] = {"image_size": config.image_size} if config.model.startswith("vit_") else {}
    if config.model in ("googlenet", "inception_v3"):
        more.update(aux_logits=False, init_weights=True)  # this loss has no use for second outputs
    try:
        model: nn.Module = models.get_model(config.model, num_classes=classes, **more)
        return model
    except (ValueError, AssertionError) as error:
        stop(f"model = {config.model!r} with image_size = {config.image_size}: {a_line(error)}")


def _cnn(classes: int) -> nn.Module:
    """A network small enough for a laptop to train in seconds."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 4 * 4, classes))


# Language


def _language(config: Config) -> Task:
    if config.model == "gpt":
        model: nn.Module = GPT(config.width, config.layers, config.context)
        encode: Callable[[str], list[int]] = lambda text: list(text.encode())  # noqa: E731  # a token is a byte
        end: int | None = 0  # no text has it
    else:
        model, encode, end = _from_hugging_face(config)
    texts = [[*encode(text), *([] if end is None else [end])] for text in _texts(Path(config.data), config.field)]

    def rows_of(indices: list[int]) -> list[Tensor]:
        """Rows of tokens with labels: the next token, or none at the end of a text, since another may follow."""
        chosen = [torch.tensor([text, [*text[1:], IGNORED]]).T for i in sorted(indices) if (text := texts[i])]
        chosen = [torch.cat(chosen)] if config.pack and chosen else chosen
        rows = [row for text in chosen for row in torch.split(text, config.context)]
        return [row for row in rows if len(row) > 1]  # a single token has no next one

    held_out, kept = map(rows_of, _split(len(texts), config.seed))

    def collate(rows: list[Tensor]) -> Batch:
        """Pads at the end, which a causal model's earlier tokens do not see; a row's last token has no label."""
        labels = pad_sequence([row[:-1, 1] for row in rows], batch_first=True, padding_value=IGNORED)
        rows = [row[:, 0] for row in rows]
        return {"inputs": pad_sequence(rows, batch_first=True), "labels": pad(labels, (0, 1), value=IGNORED)}

    return Task(
        model,
        f"{config.model} on {Path(config.data).name}",
        Keyed(kept, config.seed, draws=False),
        held_out,
        collate,
        count_tokens("labels"),
        "tokens",
        sum(len(row) - 1 for row in kept) / max(1, len(kept)),
    )


def _texts(path: Path, field: str) -> list[str]:
    """The texts of a file or folder: a field of each JSON line, paragraphs, or lines if no line is empty."""
    files = (
        sorted(one for one in path.rglob("*") if one.suffix in (".txt", ".md", ".jsonl")) if path.is_dir() else [path]
    )
    texts: list[str] = []
    for file in files:
        try:
            whole = read_text(file).rstrip()
        except (OSError, UnicodeDecodeError) as error:
            reason = a_line(error.strerror if isinstance(error, OSError) else error)
            stop(f"{file} cannot be read as text ({reason}), expected a file or a folder of .txt, .md or .jsonl")
        lines = whole.split("\n")
        if file.suffix == ".jsonl":
            texts += [_of_json(line, f"{file}:{i}", field) for i, line in enumerate(lines, 1) if line.strip()]
        else:
            texts += whole.split("\n\n") if "\n\n" in whole else lines
    return [text.strip() for text in texts if text.strip()]


def _of_json(line: str, where: str, field: str) -> str:
    try:
        text: str = json.loads(line)[field].strip()
        return text
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # not JSON, no object, no such field, no text
        stop(f"{where} is no JSON object with a text as {field!r} ({a_line(error)}); --field names it")


def _from_hugging_face(config: Config) -> tuple[nn.Module, Callable[[str], list[int]], int | None]:
    """The model, a function from a text to its tokens, and the token that ends a text, if there is one."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        stop(f"model = {config.model!r} needs transformers; pip install transformers, or leave the model out for 'gpt'")
    if not Path(config.model).exists() and importlib.util.find_spec("torchvision"):
        from torchvision import models  # names that no hub shall be asked for

        if config.model in models.list_models(module=models):
            stop(f"model = {config.model!r} is a torchvision model; give task = 'vision', or a language model, as gpt")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, use_cache=False)
    except Exception as error:  # its type depends on what is missing or broken
        stop(f"model = {config.model!r} is no language model that transformers finds: {a_line(error)}")
    longest = getattr(model.config, "max_position_embeddings", config.context)
    if config.context > longest:
        stop(f"context = {config.context} and {config.model} takes {longest} tokens; give a context of at most that")
    return model, lambda text: list(tokenizer(text)["input_ids"]), tokenizer.eos_token_id


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves a batch without waiting for the copy."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The parts that a sharded model gathers one at a time: its repeated blocks, even of a Hugging Face model."""
    names = {"BasicBlock", "Bottleneck", "EncoderBlock", "Block"}
    names |= set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]
