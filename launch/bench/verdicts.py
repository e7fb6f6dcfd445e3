"""What `check` says of models that others wrote: right ones, and ones with a fault put in, against what it should say.

    python launch/bench/verdicts.py --list                             which models and cases, and what is expected
    python launch/bench/verdicts.py --only resnet18                    one model, with its reports
    python launch/bench/verdicts.py --out launch/results/verdicts      all; writes .md and .json

Models of torchvision and Hugging Face, with random weights and made small; needs both, and no network. What is expected
follows from what each model is declared to have (see `expected`), never from what check() says. The exit status is 1
where a verdict is another one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torchvision
import torchvision.models as vision
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from distaccum import Accumulator, Report, count_samples, count_tokens
from distaccum.batchnorm import batchnorms, freeze, to_groupnorm

Batch = dict[str, Tensor]
Count = Callable[[Batch], Any]
# What the criterion counts: samples; tokens with a label; or tokens with a label but the first of a row, which the
# model shifts away.
Counts = Literal["samples", "tokens", "next tokens"]
SAMPLES, MICRO_BATCH, CLASSES, WORDS, WIDTH = 7, 3, 5, 50, 12
DROPOUT = 0.3


# The cases

CASES = {
    "clean": "BatchNorm frozen or GroupNorm, no dropout, the right count and reduction",
    "wrong count": "count says samples (or 7, always) and the criterion averages over something else",
    "shift forgotten": "count_tokens('labels') without shift=True, and the model shifts",
    "a sum said to be a mean": "the criterion sums, and reduction='mean'",
    "a mean said to be a sum": "the criterion averages, and reduction='sum'",
    "dropout on": f"p={DROPOUT} in all layers that have one, two at least",
    "BatchNorm on": "in training mode",
}


@dataclass(frozen=True)
class Kind:
    """A model, and what it is declared to have; the cases that apply follow from that."""

    name: str
    make: Callable[[float], nn.Module]  # of the probability of dropout
    batch: Callable[[], Batch]
    counts: Counts = "samples"
    is_hugging_face: bool = False
    has_batchnorm: bool = False
    has_dropout: bool = False  # two random layers at least: one alone may draw the masks of the big batch
    norm: Literal["freeze", "group"] = "freeze"  # what the clean case makes of BatchNorm
    # Of a criterion over samples: it leaves some labels out, it weighs classes, or count is 7 always.
    wrong: Literal["ignored", "weighted", "constant"] = "ignored"


def expected(kind: Kind, case: str) -> str | None:
    """The verdict, "equivalent" or the one cause; None where the case does not apply."""
    if case == "clean":
        return "equivalent"
    if case == "wrong count":
        return "count"
    if case == "shift forgotten":
        return "count" if kind.counts == "next tokens" else None
    if case in ("a sum said to be a mean", "a mean said to be a sum"):
        return "reduction"
    if case == "dropout on":
        return "dropout" if kind.has_dropout else None
    return "batchnorm" if kind.has_batchnorm else None


# Where this table was wrong at first, and not the library: (model, case) -> what it said, and why that was wrong.
WRONG_AT_FIRST: dict[tuple[str, str], str] = {}


# Batches


def images(pixels: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        labels = torch.randint(0, CLASSES, (SAMPLES,))
        return {"pixel_values": torch.randn(SAMPLES, 3, pixels, pixels), "labels": labels}

    return batch


def texts() -> Batch:
    """Rows of other lengths, filled up at the right."""
    lengths = torch.tensor([3, 4, 9, 5, 12, 7, 4])
    words = torch.randint(3, WORDS, (SAMPLES, WIDTH))
    mask = torch.arange(WIDTH) < lengths[:, None]
    return {"input_ids": words.where(mask, 0), "attention_mask": mask.long()}


def texts_to_go_on_with() -> Batch:
    """The words are the labels; in some rows, not in all, the first has none."""
    batch = texts()
    labels = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
    labels[[0, 2, 5], 0] = -100
    return {**batch, "labels": labels}


def texts_with_gaps() -> Batch:
    """Of each row the first word and some others have a label."""
    batch = texts()
    keep = torch.rand(SAMPLES, WIDTH) < 0.5
    keep[:, 0] = True
    keep &= batch["attention_mask"] == 1
    return {**batch, "labels": batch["input_ids"].where(keep, -100)}


def texts_with_tags() -> Batch:
    batch = texts()
    tags = torch.randint(0, CLASSES, (SAMPLES, WIDTH))
    return {**batch, "labels": tags.where(batch["attention_mask"] == 1, -100)}


def texts_with_classes() -> Batch:
    return {**texts(), "labels": torch.randint(0, CLASSES, (SAMPLES,))}


def texts_to_translate() -> Batch:
    """The labels are rows of 8, of other lengths."""
    lengths = torch.tensor([2, 3, 8, 4, 5, 8, 6])
    words = torch.randint(3, WORDS, (SAMPLES, 8))
    return {**texts(), "labels": words.where(torch.arange(8) < lengths[:, None], -100)}


# Models of torchvision, of 5 classes


def efficientnet(p: float) -> nn.Module:
    from torchvision.models.efficientnet import MBConvConfig

    # of each stage: expansion, kernel, stride, channels in and out, layers, and multipliers of these
    stages = [MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(4, 3, 2, 16, 24, 2), MBConvConfig(4, 5, 2, 24, 40, 2)]
    return vision.EfficientNet(stages, dropout=p, stochastic_depth_prob=p, num_classes=CLASSES, last_channel=96)


def regnet(p: float) -> nn.Module:
    from torchvision.models.regnet import BlockParams

    blocks = BlockParams.from_init_params(depth=6, w_0=24, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return vision.RegNet(blocks, num_classes=CLASSES)


def densenet(p: float) -> nn.Module:
    return vision.DenseNet(
        growth_rate=8, block_config=(2, 2, 2), num_init_features=16, drop_rate=p, num_classes=CLASSES
    )


def googlenet(p: float) -> nn.Module:
    return vision.GoogLeNet(num_classes=CLASSES, aux_logits=False, init_weights=False, dropout=p)


def alexnet(p: float) -> nn.Module:
    """With narrow linear layers, which hold most of the weights."""
    model = vision.AlexNet(num_classes=CLASSES, dropout=p)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier[1], model.classifier[4], model.classifier[6] = (
        nn.Linear(256, 64),
        nn.Linear(64, 64),
        nn.Linear(64, CLASSES),
    )
    return model


def vgg_bn(p: float) -> nn.Module:
    """Likewise, and of fewer layers."""
    features = vision.vgg.make_layers([16, "M", 32, "M", 64, "M"], batch_norm=True)
    model = vision.VGG(features, num_classes=CLASSES, init_weights=False, dropout=p)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier[0], model.classifier[3], model.classifier[6] = (
        nn.Linear(64, 64),
        nn.Linear(64, 64),
        nn.Linear(64, CLASSES),
    )
    return model


def convnext(p: float) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig

    blocks = [CNBlockConfig(24, 48, 2), CNBlockConfig(48, None, 2)]
    return vision.ConvNeXt(blocks, stochastic_depth_prob=p, num_classes=CLASSES)


def vision_transformer(p: float) -> nn.Module:
    return vision.VisionTransformer(
        *(16, 4),
        num_layers=2,
        num_heads=2,
        hidden_dim=24,
        mlp_dim=48,
        dropout=p,
        attention_dropout=p,
        num_classes=CLASSES,
    )


def swin(p: float) -> nn.Module:
    return vision.SwinTransformer(
        [4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=[4, 4],
        dropout=p,
        attention_dropout=p,
        stochastic_depth_prob=p,
        num_classes=CLASSES,
    )


TORCHVISION = [
    Kind("resnet18", lambda p: vision.resnet18(num_classes=CLASSES), images(32), has_batchnorm=True, norm="group"),
    Kind(
        "mobilenet_v2",  # one Dropout
        lambda p: vision.mobilenet_v2(width_mult=0.35, num_classes=CLASSES, dropout=p),
        images(32),
        has_batchnorm=True,
        wrong="weighted",
    ),
    Kind(
        "mobilenet_v3_small",  # one Dropout
        lambda p: vision.mobilenet_v3_small(width_mult=0.5, num_classes=CLASSES, dropout=p),
        images(32),
        has_batchnorm=True,
        norm="group",
        wrong="constant",
    ),
    Kind(
        "squeezenet1_1",  # one Dropout
        lambda p: vision.squeezenet1_1(num_classes=CLASSES, dropout=p),
        images(32),
    ),
    Kind(
        "shufflenet_v2_x0_5",
        lambda p: vision.shufflenet_v2_x0_5(num_classes=CLASSES),
        images(32),
        has_batchnorm=True,
        wrong="weighted",
    ),
    Kind(
        "mnasnet0_5",  # one Dropout
        lambda p: vision.mnasnet0_5(num_classes=CLASSES, dropout=p),
        images(32),
        has_batchnorm=True,
        wrong="constant",
    ),
    Kind("efficientnet", efficientnet, images(32), has_batchnorm=True, has_dropout=True),
    Kind("regnet", regnet, images(32), has_batchnorm=True, norm="group", wrong="weighted"),
    Kind("densenet", densenet, images(32), has_batchnorm=True, has_dropout=True, norm="group", wrong="constant"),
    Kind("googlenet", googlenet, images(32), has_batchnorm=True),  # one Dropout
    Kind("alexnet", alexnet, images(63), has_dropout=True, wrong="weighted"),
    Kind("vgg_bn", vgg_bn, images(16), has_batchnorm=True, has_dropout=True, wrong="constant"),
    Kind("convnext", convnext, images(32), has_dropout=True),
    Kind("vision_transformer", vision_transformer, images(16), has_dropout=True, wrong="weighted"),
    Kind("swin", swin, images(32), has_dropout=True, wrong="constant"),
]


# Models of Hugging Face


def gpt2(p: float) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=p,
        embd_pdrop=p,
        attn_pdrop=p,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


def llama(p: float) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=p,
    )
    return hf.LlamaForCausalLM(config)


def opt(p: float) -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=WORDS,
        hidden_size=24,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=24,
        dropout=p,
        attention_dropout=p,
    )
    return hf.OPTForCausalLM(config)


def small(p: float) -> dict[str, Any]:
    """Of BERT and those like it."""
    return {
        "vocab_size": WORDS,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout_prob": p,
        "attention_probs_dropout_prob": p,
        "num_labels": CLASSES,
    }


def distilbert(p: float) -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=WORDS,
        dim=24,
        hidden_dim=40,
        n_layers=2,
        n_heads=2,
        dropout=p,
        attention_dropout=p,
        seq_classif_dropout=p,
        num_labels=CLASSES,
    )
    return hf.DistilBertForSequenceClassification(config)


def t5(p: float) -> nn.Module:
    config = hf.T5Config(vocab_size=WORDS, d_model=24, d_kv=12, d_ff=40, num_layers=2, num_heads=2, dropout_rate=p)
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config)


def vit(p: float) -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, **small(p)))


def hf_resnet(p: float) -> nn.Module:
    config = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    return hf.ResNetForImageClassification(config)


HUGGING_FACE = [
    Kind("GPT-2", gpt2, texts_to_go_on_with, "next tokens", is_hugging_face=True, has_dropout=True),
    Kind("Llama", llama, texts_to_go_on_with, "next tokens", is_hugging_face=True, has_dropout=True),
    Kind("OPT", opt, texts_to_go_on_with, "next tokens", is_hugging_face=True, has_dropout=True),
    Kind(
        "BERT, masked words",
        lambda p: hf.BertForMaskedLM(hf.BertConfig(**small(p))),
        texts_with_gaps,
        "tokens",
        is_hugging_face=True,
        has_dropout=True,
    ),
    Kind(
        "BERT, tags",
        lambda p: hf.BertForTokenClassification(hf.BertConfig(**small(p))),
        texts_with_tags,
        "tokens",
        is_hugging_face=True,
        has_dropout=True,
    ),
    Kind("DistilBERT, classes", distilbert, texts_with_classes, is_hugging_face=True, has_dropout=True),
    Kind("T5", t5, texts_to_translate, "tokens", is_hugging_face=True, has_dropout=True),
    Kind("ViT", vit, images(16), is_hugging_face=True, has_dropout=True, wrong="weighted"),
    Kind("ResNet", hf_resnet, images(32), is_hugging_face=True, has_batchnorm=True, norm="group"),
]
KINDS = TORCHVISION + HUGGING_FACE


# Running a case


def model_of(kind: Kind, case: str) -> nn.Module:
    torch.manual_seed(0)
    model = kind.make(DROPOUT if case == "dropout on" else 0.0)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a head of zeros hands no gradient on
            nn.init.normal_(parameter, std=0.02)
    if case != "BatchNorm on" and kind.norm == "group":
        to_groupnorm(model)
    model.train()
    if kind.has_batchnorm and case != "BatchNorm on" and kind.norm == "freeze":
        run_in(model, kind.batch())
        freeze(model)
    return model


def run_in(model: nn.Module, batch: Batch) -> None:
    """Running statistics as after some training; those of a fresh model let a deep one's activations fade away."""
    layers = [layer for _, layer in batchnorms(model)]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    with torch.no_grad():
        model(batch["pixel_values"])
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def batch_of(kind: Kind, case: str) -> Batch:
    torch.manual_seed(1)
    batch = kind.batch()
    if kind.counts == "samples":
        batch["labels"][:3] = torch.tensor([0, 1, 2])  # weighted alike they would not matter
        if case == "wrong count" and kind.wrong == "ignored":
            batch["labels"][[1, 4, 5]] = -100
    return batch


def count_of(kind: Kind, case: str) -> Count:
    if case == "wrong count":
        return (lambda batch: 7) if kind.counts == "samples" and kind.wrong == "constant" else count_samples
    if kind.counts == "samples":
        return count_samples
    return count_tokens("labels", shift=kind.counts == "next tokens" and case != "shift forgotten")


def loss_of(kind: Kind, case: str, model: nn.Module) -> Callable[[Batch], Tensor]:
    """Of Hugging Face the model's own, where it has it; it always averages."""
    how = "sum" if case == "a sum said to be a mean" else "mean"
    is_weighted = case == "wrong count" and kind.counts == "samples" and kind.wrong == "weighted"

    def loss(batch: Batch) -> Tensor:
        labels = batch["labels"]
        if not kind.is_hugging_face:
            outputs = model(batch["pixel_values"])
        else:
            made = model(**batch)
            if how == "mean" and not is_weighted:
                return made.loss
            outputs = made.logits
        if kind.counts == "next tokens":
            outputs, labels = outputs[:, :-1], labels[:, 1:]
        weight = torch.linspace(1, 3, CLASSES, dtype=outputs.dtype) if is_weighted else None
        return cross_entropy(outputs.flatten(0, -2), labels.flatten(), weight, reduction=how)

    return loss


def report_of(kind: Kind, case: str) -> Report:
    model, batch = model_of(kind, case), batch_of(kind, case)
    accumulator = Accumulator(
        model,
        SGD(model.parameters(), lr=0.1),
        micro_batch_size=MICRO_BATCH,
        count=count_of(kind, case),
        reduction="sum" if case == "a mean said to be a sum" else "mean",
    )
    return accumulator.check(batch, loss_of(kind, case, model))


@dataclass(frozen=True)
class Row:
    model: str
    case: str
    expected: str
    given: str
    is_right: bool
    seconds: float
    error: float
    dtype: str
    causes: tuple[str, ...]
    notes: tuple[str, ...]


def given(report: Report) -> str:
    """The same words as `expected`: both the verdict and all causes have to be right."""
    if report.equivalent:
        return ", ".join(["equivalent", *report.causes])
    return ", ".join(cause.split(":")[0] for cause in report.causes) or "NOT equivalent, no cause"


def run(kind: Kind, case: str, say: bool) -> Row:
    should, began = expected(kind, case), time.perf_counter()
    assert should is not None
    try:
        report = report_of(kind, case)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Row(
            kind.name, case, should, f"an error ({text})", False, time.perf_counter() - began, math.nan, "", (), ()
        )
    seconds, verdict = time.perf_counter() - began, given(report)
    if say:
        print(f"\n{kind.name}, {case}:\n{report}\n")
    return Row(
        *(kind.name, case, should, verdict, verdict == should, seconds),
        error=report.worst,
        dtype=report.dtype,
        causes=report.causes,
        notes=report.notes,
    )


# Telling


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"CPU ({name}, {os.cpu_count()} cores, shared), {torch.get_num_threads()} thread"


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    is_changed = git("status", "--porcelain", "--untracked-files=no", "--", "distaccum")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if is_changed else "")


def facts(arguments: argparse.Namespace) -> dict[str, str]:
    words = [word for name in arguments.only or [] for word in ("--only", repr(name))]
    return {
        "command": " ".join(
            ["python launch/bench/verdicts.py", *words, *(["--out", str(arguments.out)] if arguments.out else [])]
        ),
        "commit": commit(),
        "hardware": machine(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": hf.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def totals(rows: Sequence[Row]) -> str:
    right = sum(row.is_right for row in rows)
    return f"{right} right, {len(rows) - right} wrong, of {len(rows)} verdicts."


def page(rows: Sequence[Row], about: dict[str, str]) -> str:
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "torchvision", "transformers"))
    lines = [
        "# What check() says of models that others wrote",
        "",
        f"`{about['command']}`",
        "",
        f"commit {about['commit']}, {versions}, Python {about['python']}, {about['hardware']}, {about['date']}",
        "",
        f"Random weights, made small, a batch of {SAMPLES} in micro-batches of at most {MICRO_BATCH}. A verdict is "
        "right where it is the expected one with the expected cause and no other. What is expected was written down "
        "before, from what each model is declared to have:",
        "",
        *(f"- **{case}**: {what}" for case, what in CASES.items()),
        "",
        "| case | right | wrong | does not apply to | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    models = {row.model for row in rows}
    for case in CASES:
        of_case = [row for row in rows if row.case == case]
        right = sum(row.is_right for row in of_case)
        lines.append(
            f"| {case} | {right} | {len(of_case) - right} | {len(models) - len(of_case)} | "
            f"{sum(row.seconds for row in of_case):.0f} |"
        )
    lines += [
        "",
        "| model | case | expected | given | seconds | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shown = row.given if row.is_right else f"**{row.given}**"
        numbers = f"{row.seconds:.1f} | {row.error:.1e} ({row.dtype})"
        lines.append(f"| {row.model} | {row.case} | {row.expected} | {shown} | {numbers} |")
    told = [(row, WRONG_AT_FIRST[row.model, row.case]) for row in rows if (row.model, row.case) in WRONG_AT_FIRST]
    if told:
        lines += ["", "Where the table was wrong at first, and not the library:", ""]
        lines += [f"- {row.model}, {row.case}: {text}" for row, text in told]
    return "\n".join([*lines, "", totals(rows)]) + "\n"


def show_list() -> None:
    for kind in KINDS:
        print(f"{kind.name}:")
        for case in CASES:
            print(f"  {case:<24} {expected(kind, case) or 'does not apply'}")


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a model or a case by its name; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="models, cases and what is expected; runs nothing")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="writes PATH.md and PATH.json")
    arguments = parser.parse_args(words)
    unknown = set(arguments.only or []) - {kind.name for kind in KINDS} - set(CASES)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such model or case; --list shows them")
    return arguments


def chosen(only: Sequence[str]) -> list[tuple[Kind, str]]:
    """Names of models and of cases each narrow it down."""
    models, cases = [one for one in only if one not in CASES], [one for one in only if one in CASES]
    return [
        (kind, case)
        for kind in KINDS
        for case in CASES
        if expected(kind, case) and kind.name in (models or [kind.name]) and case in (cases or [case])
    ]


def main(words: Sequence[str] | None = None) -> int:
    arguments = arguments_of(words)
    if arguments.list:
        show_list()
        return 0
    torch.set_num_threads(arguments.threads)
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for kind, case in chosen(arguments.only or []):
        rows.append(row := run(kind, case, bool(arguments.only)))
        mark = "right" if row.is_right else "WRONG"
        print(
            f"{mark}  {row.model:<20} {row.case:<24} {row.expected:<10} {row.given:<24} "
            f"{row.seconds:6.1f} s  {row.error:.1e}",
            flush=True,
        )
        if arguments.out is not None:
            write(arguments.out, rows, facts(arguments))
    print(totals(rows))
    return int(not all(row.is_right for row in rows))


def write(path: Path, rows: Sequence[Row], about: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(page(rows, about))
    right = sum(row.is_right for row in rows)
    everything = {**about, "right": right, "wrong": len(rows) - right, "verdicts": [asdict(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
