"""`distaccum audit` on whole scripts: right ones, and each with one mistake put in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

LOOPS = Path(__file__).parent / "loops"
RIGHT = {
    "plain_tokens": 1,
    "plain_samples": 1,
    "gan": 1,
    "scaled": 1,
    "parts": 1,
    "compiled": 1,
    "ddp_tokens": 2,
    "ddp_samples": 2,
    "ddp_by_hand": 2,
    "fsdp2_tokens": 2,
    "accelerated": 2,
    "windows plain": 1,
    "windows ddp": 2,
    "windows fsdp": 2,
}


class Mutation(NamedTuple):
    name: str
    script: str
    old: str | tuple[str, ...]
    new: str | tuple[str, ...]
    kind: str
    says: str  # a part of the finding
    at: str = ""  # a part of the line that it names; without: the first that was put in


MUTATIONS = [
    Mutation(
        "mean of means",
        "plain_tokens",
        'labels.flatten(), reduction="sum") / total',
        "labels.flatten()) / len(window)",
        "weights",
        "tokens of different micro-batches weigh 0.0147 to 0.0357 (2.43 to 1)",
    ),
    Mutation(
        "divided by its own tokens", "plain_tokens", "/ total", "/ (labels != -100).sum() / steps", "weights", "tokens"
    ),
    Mutation(
        "no token counts",
        "plain_tokens",
        'labels.flatten(), reduction="sum") / total',
        "labels.flatten() if first else torch.full_like(labels.flatten(), -100)) / 4",
        "nan",
        "NaN",
    ),
    Mutation(
        "sum that nothing divides",
        "plain_tokens",
        'reduction="sum") / total',
        'reduction="sum")',
        "divisor",
        "nothing divides this sum",
    ),
    Mutation(
        "short last window",
        "plain_samples",
        "/ length",
        "/ steps",
        "window",
        "2 micro-batches, and weighs 0.5 of the others",
    ),
    Mutation(
        "no division",
        "plain_samples",
        "criterion(model(x), y) / length",
        "criterion(model(x), y)",
        "divisor",
        "nothing divides by the 4 micro-batches: the gradient is 4 times",
    ),
    Mutation(
        "two divisions",
        "plain_samples",
        "loss.backward()",
        "(loss / length).backward()",
        "divisor",
        "the 4 micro-batches divide twice: the gradient is 0.25 times",
        "criterion(model(x), y) / length",
    ),
    Mutation(
        "tail dropped at each epoch's end",
        "plain_samples",
        ("    model.train()\n", " or i + 1 == len(loader):"),
        ("    model.train()\n    optimizer.zero_grad()\n", ":"),
        "tail",
        "clears 2 micro-batches at an epoch's end",
        "optimizer.zero_grad()",
    ),
    Mutation(
        "tail dropped at the end",
        "plain_samples",
        " or i + 1 == len(loader):",
        " or i + 1 == len(loader) and not _epoch:",
        "tail",
        "the run's last 2 micro-batches",
        "loss.backward()",
    ),
    Mutation(
        "tail carried into the next epoch",
        "plain_samples",
        "/ length\n        loss.backward()\n        if (i + 1) % steps == 0 or i + 1 == len(loader):",
        "/ steps\n        loss.backward()\n        if (i + 1) % steps == 0:",
        "window",
        "6 micro-batches, and weighs 1.5 of the others",
        "/ steps",
    ),
    Mutation(
        "cleared in each micro-step",
        "plain_samples",
        "    loss = criterion",
        "    optimizer.zero_grad()\n        loss = criterion",
        "cleared",
        "clears 14 backwards",
        "optimizer.zero_grad()",
    ),
    Mutation(
        "cleared by hand",
        "plain_samples",
        "        loss.backward()\n",
        "        if i % steps == 2:\n            model[0].bias.grad = None\n        loss.backward()\n",
        "lost",
        "0.bias: 2 of 4 backwards are lost",
        "        loss.backward()",
    ),
    Mutation(
        "never cleared",
        "plain_samples",
        "            optimizer.zero_grad()\n",
        "",
        "stale",
        "still holds that of the update before",
        "optimizer.step()",
    ),
    Mutation(
        "schedule per micro-step",
        "plain_tokens",
        "loss.backward()\n",
        "loss.backward()\n            scheduler.step()\n",
        "schedule",
        "in the middle of a window",
        "            scheduler.step()",
    ),
    Mutation(
        "clipping per micro-step",
        "plain_tokens",
        "loss.backward()\n",
        "loss.backward()\n            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
        "clip",
        "clips in the middle of a window",
        "model.parameters(), 0.1",
    ),
    Mutation("left in eval", "plain_samples", "    model.train()\n", "", "eval", "eval mode", "loss.backward()"),
    Mutation(
        "schedule by hand per rank",
        "plain_tokens",
        "        scheduler.step()\n",
        "        for rank in range(2):\n            scheduler.step()\n",
        "schedule",
        "2 times per update",
        "scheduler.step()",
    ),
    Mutation(
        "scaler unscales per micro-step",
        "scaled",
        ").backward()\n        scaler",
        ").backward()\n            if rows is window[0][0]:\n                scaler",
        "unscale",
        "unscales in the middle",
        "                scaler.unscale_",
    ),
    Mutation(
        "one loss of two is a mean of means",
        "parts",
        'labels, reduction="sum", label_smoothing=0.1) / total',
        "labels, label_smoothing=0.1) / len(window)",
        "weights",
        "tokens of different micro-batches",
    ),
    Mutation(
        "each rank counts alone",
        "ddp_tokens",
        "    dist.all_reduce(total)\n",
        "    total = total * world\n",
        "weights",
        "tokens of different ranks weigh",
        "loss = cross_entropy",
    ),
    Mutation(
        "world forgotten",
        "ddp_tokens",
        "loss * world / total",
        "loss / total",
        "divisor",
        "the 2 ranks divide twice",
        "loss = cross_entropy",
    ),
    Mutation(
        "no_sync around the backward alone",
        "ddp_tokens",
        "        with nullcontext() if i + 1 == len(window) else model.no_sync():\n            logits = model(rows)\n",
        "        logits = model(rows)\n        with nullcontext() if i + 1 == len(window) else model.no_sync():\n",
        "traffic",
        "4 reductions of 0.00175 MiB per update",
        "loss.backward()",
    ),
    Mutation(
        "last forward in no_sync",
        "ddp_tokens",
        "if i + 1 == len(window) else",
        "if i > len(window) else",
        "not reduced",
        "was not reduced",
        "loss.backward()",
    ),
    Mutation(
        "reduces on the first instead of the last",
        "ddp_samples",
        "(i + 1) % steps == 0\n        loss",
        "i % steps == 0\n        loss",
        "uneven",
        "backwards count differently",
        "loss.backward()",
    ),
    Mutation(
        "a parameter outside of DDP",
        "ddp_samples",
        ("torch.optim.SGD(model.parameters(), lr=0.1)", "model(x), y"),
        ("torch.optim.SGD([*model.parameters(), extra := nn.Parameter(torch.ones(4))], lr=0.1)", "model(x) * extra, y"),
        "not reduced",
        "was not reduced",
        "loss.backward()",
    ),
    Mutation(
        "reduces in each micro-step",
        "ddp_samples",
        "(i + 1) % steps == 0\n        loss",
        "True\n        loss",
        "traffic",
        "4 reductions",
        "loss.backward()",
    ),
    Mutation(
        "added up over ranks",
        "ddp_by_hand",
        "            parameter.grad /= tokens\n",
        "            parameter.grad /= tokens / 2\n",
        "divisor",
        "",
        "criterion(model(rows)",
    ),
    Mutation(
        "one parameter is not reduced",
        "ddp_by_hand",
        "            dist.all_reduce(parameter.grad)\n",
        "            if parameter.ndim > 1:\n                dist.all_reduce(parameter.grad)\n",
        "not reduced",
        "was not reduced",
        "criterion(model(rows)",
    ),
    Mutation(
        "ranks drift apart",
        "ddp_by_hand",
        "            dist.all_reduce(parameter.grad)\n",
        "",
        "apart",
        "and not at the end",
        "optimizer.step()",
    ),
    Mutation(
        "FSDP2 keeps the last micro-batch alone",
        "fsdp2_tokens",
        "sync(i + 1 == len(window))",
        "sync(i == 0)",
        "lost",
        "are lost",
        "loss.backward()",
    ),
    Mutation(
        "FSDP2 mean of means",
        "fsdp2_tokens",
        'labels.flatten(), reduction="sum") * world / total',
        "labels.flatten()) / steps",
        "weights",
        "tokens of different micro-batches",
    ),
    Mutation(
        "Accelerate divides too",
        "accelerated",
        "loss * steps * accelerator.num_processes / total",
        "loss * accelerator.num_processes / total",
        "divisor",
        "",
        "loss = cross_entropy",
    ),
    Mutation(
        "window with the wrong count",
        "windows ddp",
        'count=count_tokens("labels"), ',
        "",
        "weights",
        "tokens of different",
        "loss = cross_entropy",
    ),
]


@pytest.fixture
def audited(programs, tmp_path):
    def run(script: str, text: str, ranks: int):
        name, *arguments = script.split()
        shutil.copy(LOOPS / "data.py", tmp_path)
        (tmp_path / f"{name}.py").write_text(text)
        result = tmp_path / "result.json"
        done = programs.run(
            "distaccum",
            "audit",
            "--json",
            result,
            tmp_path / f"{name}.py",
            *arguments,
            ranks=ranks,
            OMP_NUM_THREADS="1",
        )
        return done, json.loads(result.read_text()) if result.exists() else None

    return run


@pytest.mark.parametrize("script", RIGHT)
def test_right_script_has_no_finding(audited, script):
    done, found = audited(script, (LOOPS / f"{script.split()[0]}.py").read_text(), RIGHT[script])
    assert done.status == 0 and found["findings"] == [], done.text
    assert found["ranks"] == RIGHT[script] and found["updates"] > 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_mistake_is_named_with_its_line(audited, mutation):
    script = LOOPS / f"{mutation.script.split()[0]}.py"
    text = script.read_text()
    olds, news = ([one] if isinstance(one, str) else one for one in (mutation.old, mutation.new))
    for old, new in zip(olds, news, strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    done, found = audited(mutation.script, text, RIGHT[mutation.script])
    assert done.status == 1, done.text
    named = [one for one in found["findings"] if one["kind"] == mutation.kind and mutation.says in one["text"]]
    assert named, done.text
    at = mutation.at or news[0].strip().splitlines()[0]
    lines = [f"{script.stem}.py:{i}" for i, line in enumerate(text.splitlines(), start=1) if at in line]
    assert any(one["where"].endswith(tuple(lines)) for one in named), (lines, done.text)
