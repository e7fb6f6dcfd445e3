"""Verdicts of `check` on models that others wrote, right and with a planted fault, against the expected ones.

    python launch/bench/verdicts.py --list                             which models and cases, and what is expected
    python launch/bench/verdicts.py --only resnet18                    one model, with its reports
    python launch/bench/verdicts.py --out launch/results/verdicts      all; writes .md and .json

Models of torchvision and Hugging Face, with random weights and made small; needs both, and no network. What is expected
follows from what each model is declared to have (see `expected`), never from what check() says. The exit status is 1
where a verdict is another one.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torchvision
import torchvision.models as vision
import transformers as hf
from kit import CPU, Options, circumstances, header, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.regnet import BlockParams

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

P = object()  # stands for the probability of dropout
Make = Callable[[float], nn.Module]


def made(model: Callable[..., nn.Module], *arguments: Any, **options: Any) -> Make:
    def make(p: float) -> nn.Module:
        return model(*arguments, **{name: p if value is P else value for name, value in options.items()})

    return make


def torchvision_model(model: Callable[..., nn.Module], *arguments: Any, **options: Any) -> Make:
    return made(model, *arguments, num_classes=CLASSES, **options)


def narrow_head(make: Make, places: Sequence[int], channels: int) -> Make:
    """The linear layers, which hold most of the weights, with a width of 64."""

    def narrowed(p: float) -> nn.Module:
        model: Any = make(p)
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        widths = [channels, *[64] * (len(places) - 1), CLASSES]
        for place, width, after in zip(places, widths, widths[1:], strict=False):
            model.classifier[place] = nn.Linear(width, after)
        return model

    return narrowed


# Of each stage: expansion, kernel, stride, channels in and out, layers.
STAGES = [MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(4, 3, 2, 16, 24, 2), MBConvConfig(4, 5, 2, 24, 40, 2)]
VGG_LAYERS = [16, "M", 32, "M", 64, "M"]
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
VIT = {"num_layers": 2, "num_heads": 2, "hidden_dim": 24, "mlp_dim": 48}
DROPOUTS = {"dropout": P, "attention_dropout": P}


def regnet(p: float) -> nn.Module:
    blocks = BlockParams.from_init_params(depth=6, w_0=24, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return vision.RegNet(blocks, num_classes=CLASSES)


def densenet(p: float) -> nn.Module:
    return vision.DenseNet(8, (2, 2, 2), num_init_features=16, drop_rate=p, num_classes=CLASSES)


def vgg_bn(p: float) -> nn.Module:
    features = vision.vgg.make_layers(VGG_LAYERS, batch_norm=True)
    return vision.VGG(features, num_classes=CLASSES, init_weights=False, dropout=p)


def convnext(p: float) -> nn.Module:
    blocks = [CNBlockConfig(24, 48, 2), CNBlockConfig(48, None, 2)]
    return vision.ConvNeXt(blocks, stochastic_depth_prob=p, num_classes=CLASSES)


def kind(name: str, make: Make, pixels: int = 32, **options: Any) -> Kind:
    return Kind(name, make, images(pixels), **options)


BN = {"has_batchnorm": True}
MOBILE = torchvision_model(vision.mobilenet_v3_small, width_mult=0.5, dropout=P)
EFFICIENT = torchvision_model(vision.EfficientNet, STAGES, dropout=P, stochastic_depth_prob=P, last_channel=96)
GOOGLE = torchvision_model(vision.GoogLeNet, aux_logits=False, init_weights=False, dropout=P)
TORCHVISION = [
    kind("resnet18", torchvision_model(vision.resnet18), **BN, norm="group"),
    # The next five have one Dropout each.
    kind("mobilenet_v2", torchvision_model(vision.mobilenet_v2, width_mult=0.35, dropout=P), **BN, wrong="weighted"),
    kind("mobilenet_v3_small", MOBILE, **BN, norm="group", wrong="constant"),
    kind("squeezenet1_1", torchvision_model(vision.squeezenet1_1, dropout=P)),
    kind("shufflenet_v2_x0_5", torchvision_model(vision.shufflenet_v2_x0_5), **BN, wrong="weighted"),
    kind("mnasnet0_5", torchvision_model(vision.mnasnet0_5, dropout=P), **BN, wrong="constant"),
    kind("efficientnet", EFFICIENT, **BN, has_dropout=True),
    kind("regnet", regnet, **BN, norm="group", wrong="weighted"),
    kind("densenet", densenet, **BN, has_dropout=True, norm="group", wrong="constant"),
    kind("googlenet", GOOGLE, **BN),  # one Dropout
    kind(
        "alexnet",
        narrow_head(torchvision_model(vision.AlexNet, dropout=P), (1, 4, 6), 256),
        63,
        has_dropout=True,
        wrong="weighted",
    ),
    kind("vgg_bn", narrow_head(vgg_bn, (0, 3, 6), 64), 16, **BN, has_dropout=True, wrong="constant"),
    kind("convnext", convnext, has_dropout=True),
    kind(
        "vision_transformer",
        torchvision_model(vision.VisionTransformer, 16, 4, **VIT, **DROPOUTS),
        16,
        has_dropout=True,
        wrong="weighted",
    ),
    kind(
        "swin",
        torchvision_model(vision.SwinTransformer, [4, 4], **SWIN, **DROPOUTS, stochastic_depth_prob=P),
        has_dropout=True,
        wrong="constant",
    ),
]


# Models of Hugging Face

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SMALL, "vocab_size": WORDS, "intermediate_size": 40, "num_labels": CLASSES}
BERT |= {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
GPT2 = {"n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
GPT2 |= {"vocab_size": WORDS, "resid_pdrop": P, "embd_pdrop": P, "attn_pdrop": P}
LLAMA = {**SMALL, "vocab_size": WORDS, "intermediate_size": 40, "attention_dropout": P}
OPT = {
    **SMALL,
    **DROPOUTS,
    "vocab_size": WORDS,
    "ffn_dim": 40,
    "max_position_embeddings": 16,
    "word_embed_proj_dim": 24,
}
DISTILBERT = {"vocab_size": WORDS, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 2, "num_labels": CLASSES}
DISTILBERT |= {**DROPOUTS, "seq_classif_dropout": P}
T5 = {"vocab_size": WORDS, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2, "dropout_rate": P}
T5 |= {"decoder_start_token_id": 0}
RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": CLASSES,
}


def face(
    name: str, model: Any, config: Any, options: dict[str, Any], batch: Callable[[], Batch], *counts: Any, **more: Any
) -> Kind:
    make = made(lambda **given: model(config(**given)), **options)
    return Kind(name, make, batch, *counts, **{"is_hugging_face": True, "has_dropout": True, **more})


HUGGING_FACE = [
    face("GPT-2", hf.GPT2LMHeadModel, hf.GPT2Config, GPT2, texts_to_go_on_with, "next tokens"),
    face("Llama", hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA, texts_to_go_on_with, "next tokens"),
    face("OPT", hf.OPTForCausalLM, hf.OPTConfig, OPT, texts_to_go_on_with, "next tokens"),
    face("BERT, masked words", hf.BertForMaskedLM, hf.BertConfig, BERT, texts_with_gaps, "tokens"),
    face("BERT, tags", hf.BertForTokenClassification, hf.BertConfig, BERT, texts_with_tags, "tokens"),
    face(
        "DistilBERT, classes",
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig,
        DISTILBERT,
        texts_with_classes,
    ),
    face("T5", hf.T5ForConditionalGeneration, hf.T5Config, T5, texts_to_translate, "tokens"),
    face(
        "ViT",
        hf.ViTForImageClassification,
        hf.ViTConfig,
        {**BERT, "image_size": 16, "patch_size": 4},
        images(16),
        wrong="weighted",
    ),
    face(
        "ResNet",
        hf.ResNetForImageClassification,
        hf.ResNetConfig,
        RESNET,
        images(32),
        has_dropout=False,
        has_batchnorm=True,
        norm="group",
    ),
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


def given(report: Report) -> str:
    """The same words as `expected`: both the verdict and all causes have to be right."""
    if report.equivalent:
        return ", ".join(["equivalent", *report.causes])
    return ", ".join(cause.split(":")[0] for cause in report.causes) or "NOT equivalent, no cause"


def run(kind: Kind, case: str, say: bool) -> dict[str, Any]:
    began = time.perf_counter()
    row: dict[str, Any] = {"model": kind.name, "case": case, "expected": expected(kind, case)}
    try:
        report = report_of(kind, case)
    except Exception as error:
        row |= {"given": f"an error ({type(error).__name__}: {' '.join(str(error).split())[:200]})", "error": math.nan}
        row["dtype"] = "-"
    else:
        row |= {"given": given(report), "error": report.worst, "dtype": report.dtype}
        if say:
            print(f"\n{kind.name}, {case}:\n{report}\n")
    return {**row, "is_right": row["given"] == row["expected"], "seconds": time.perf_counter() - began}


# The page


def page(rows: Sequence[dict[str, Any]], about: dict[str, str]) -> list[str]:
    lines = header(
        "What check() says of models that others wrote",
        about,
        f"torchvision {torchvision.__version__}, transformers {hf.__version__}.",
        f"Random weights, made small, a batch of {SAMPLES} in micro-batches of at most {MICRO_BATCH}. A verdict is "
        "right where it is the expected one with the expected cause and no other. What is expected was written down "
        "before, from what each model is declared to have:",
    )
    lines += [*(f"- **{case}**: {what}" for case, what in CASES.items()), ""]
    models, by_case = {row["model"] for row in rows}, []
    for case in CASES:
        of_case = [row for row in rows if row["case"] == case]
        right = sum(row["is_right"] for row in of_case)
        seconds = sum(row["seconds"] for row in of_case)
        by_case.append((case, right, len(of_case) - right, len(models) - len(of_case), f"{seconds:.0f}"))
    lines += table(("case", "right", "wrong", "does not apply to", "seconds"), by_case)
    verdicts = []
    for row in rows:
        shown = row["given"] if row["is_right"] else f"**{row['given']}**"
        numbers = f"{row['seconds']:.1f}", f"{row['error']:.1e} ({row['dtype']})"
        verdicts.append((row["model"], row["case"], row["expected"], shown, *numbers))
    lines += table(("model", "case", "expected", "given", "seconds", "largest error"), verdicts)
    right = sum(row["is_right"] for row in rows)
    return [*lines, f"{right} right, {len(rows) - right} wrong, of {len(rows)} verdicts."]


def chosen(only: Sequence[str]) -> list[tuple[Kind, str]]:
    """Names of models and of cases each narrow it down."""
    models, cases = [one for one in only if one not in CASES], [one for one in only if one in CASES]
    return [
        (kind, case)
        for kind in KINDS
        for case in CASES
        if expected(kind, case) and kind.name in (models or [kind.name]) and case in (cases or [case])
    ]


def main() -> int:
    parser = Options(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="models or cases by their names")
    parser.add_argument("--list", action="store_true", help="models, cases and what is expected; runs nothing")
    options = parser.parse_args()
    if unknown := set(options.only) - {kind.name for kind in KINDS} - set(CASES):
        parser.error(f"--only {', '.join(sorted(unknown))}: no such model or case; --list shows them")
    if options.list:
        for kind, case in chosen(options.only):
            print(f"{kind.name:<20} {case:<24} {expected(kind, case)}")
        return 0
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for kind, case in chosen(options.only):
        rows.append(row := run(kind, case, bool(options.only)))
        print("right" if row["is_right"] else "WRONG", kind.name, case, row["given"], file=sys.stderr, flush=True)
    about = circumstances(CPU)
    write(options.out, "\n".join(page(rows, about)), {**about, "verdicts": rows})
    return int(not all(row["is_right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
