"""The output of a run: its plan, progress lines and a log while it runs, a summary and a picture at its end."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from distaccum import Update

from .config import DTYPES, Config
from .data import Order
from .job import Job
from .tasks import Task
from .wrapping import read_deepspeed

NAMES = {"plain": "a plain module", "deepspeed": "DeepSpeed", "accelerate": "Accelerate"}


def plan(config: Config, job: Job, task: Task, order: Order, steps: int, updates: int) -> str:
    """Describes ranks, steps and bytes, as they follow from the requested batch and what fits."""
    number = sum(parameter.numel() for parameter in task.model.parameters() if parameter.requires_grad)
    batch = config.batch_size
    largest = -(-batch // (job.data_ranks * steps))
    tail = order.num_samples % batch
    engine = NAMES.get(job.engine, job.engine.upper())
    if job.engine == "deepspeed":
        engine += f" ZeRO {read_deepspeed(config).get('zero_optimization', {}).get('stage', 0)}"
    if config.tp > 1:
        engine += f", {job.data_ranks} data ranks x {config.tp} tensor-parallel ranks,"
    if config.replicas > 1:
        engine += f", {config.replicas} replicas of {job.ranks // config.replicas} shards,"
    fit = "" if job.data_ranks * steps * largest == batch else " or fewer"
    if config.micro_batch_size == "auto":
        fit = ", halved until they fit"
    lines = [
        f"{task.title}: {number / 1e6:.2f} million parameters, {order.num_samples} samples to train on",
        f"{job.ranks} rank{'s' * (job.ranks > 1)}, {engine} on {job.device.type}, {config.precision}",
        f"an update is {batch} samples: {job.data_ranks} x {steps} micro-batches of {largest}{fit}"
        + (f"; about {batch * task.per_sample:.0f} {task.unit}" if task.unit != "samples" else ""),
        f"{updates} updates, {order.updates_per_epoch} per epoch" + (f", whose last is {tail} samples" if tail else ""),
    ]
    # Autocast and FSDP2's policy do not lower the gradient's precision; DeepSpeed's bf16 and fp16 do.
    dtype = config.precision if job.engine == "deepspeed" or config.precision == "float64" else "float32"
    each = f"in each of {steps} micro-steps" if steps > 1 else "in its one micro-step"
    often = {"every": each, "replicas": f"over shards {each}, and between replicas once per update"}
    when = often.get(config.sync, "once per update" + (f" and not {each}" if steps > 1 else ""))
    if job.ranks > 1:
        shared = f" over {config.tp} tensor-parallel ranks" if config.tp > 1 else ""
        lines.append(f"{number * DTYPES[dtype].itemsize / 1e6:.3g} MB of gradients{shared}, reduced {when}")
    if batch > order.num_samples:
        lines.append(f"no update is that large: an epoch has {order.num_samples} samples")
    if config.norm == "batch" and config.task == "vision":
        lines.append("norm 'batch' takes each micro-batch by itself: no update equals that of the big batch")
    return "\n".join(lines)


class Report:
    """Writes the log of updates, lines of progress and the rest, on rank 0 only.

    An update's numbers are read one update later, when they are available without waiting for the device.
    """

    def __init__(self, config: Config, job: Job, unit: str, updates: int, start: int) -> None:
        self._config, self._job, self._unit, self._updates, self._start = config, job, unit, updates, start
        self._folder = Path(config.out)
        self._last: tuple[Update, float, float] | None = None  # with its learning rate and the time of its end
        self._began = self._told = time.perf_counter()
        self._read: list[Update] = []
        self._counted = self._rate = 0.0  # `unit`s, and `unit`s per second
        if job.is_first:
            (self._folder / "weights.pt").unlink(missing_ok=True)  # from a shorter run that this one resumes
            (self._folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
            _cut(self._folder / "log.jsonl", "index", start - 1)
            _cut(self._folder / "evaluation.jsonl", "updates", start)
            self._log = (self._folder / "log.jsonl").open("a")

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:  # after an error, the last update's numbers may wait for lost ranks
            self.flush()
        if self._job.is_first:
            self._log.close()

    def update(self, update: Update, lr: float) -> None:
        self.flush()
        self._last = (update, lr, time.perf_counter())

    def flush(self, to_disk: bool = False) -> None:
        """Writes the update that has not been read yet."""
        if self._job.is_first and self._last is not None:
            update, lr, now = self._last
            self._last = None
            self._read.append(update)
            self._counted += _count(update)
            self._rate = self._counted / (now - self._began)
            pace = {f"{self._unit}_per_second": _count(update) / update.seconds, "peak_memory": self._job.peak_memory()}
            self._log.write(_json({**update.as_dict(), "lr": lr, **pace}) + "\n")
            self._log.flush()
            if not update.stepped:
                self._job.say(f"update {update.index} was skipped: {update.reason}")
        if self._job.is_first and to_disk:
            os.fsync(self._log.fileno())

    def progress(self, index: int, micro_batches: int) -> None:
        """Reports how many updates, and how many micro-batches of the next one, are finished."""
        now = time.perf_counter()
        if not 0 < self._config.progress_every <= now - self._told:
            return
        self.flush()
        self._told = now
        line = f"{index} of {self._updates} updates and {micro_batches} micro-batch{'es' * (micro_batches != 1)}"
        if self._read:
            line += f": loss {self._read[-1].loss:.4f}, {self._pace()}"
            seconds = (self._updates - index) * (now - self._began) / (index - self._start)
            line += f", {timedelta(seconds=round(seconds))} left"
        self._job.say(line)

    def _pace(self) -> str:
        return f"{self._rate:.0f} {self._unit}/s, peak {self._job.peak_memory() / 1e9:.2f} GB"

    def evaluation(self, updates: int, measured: dict[str, float]) -> None:
        if not self._job.is_first:
            return
        with (self._folder / "evaluation.jsonl").open("a") as file:
            file.write(_json({"updates": updates, **measured}) + "\n")
        self.flush()
        self._job.say(f"after {updates} updates: {listed(measured)}, {self._pace()}")

    def summary(self, measured: dict[str, float]) -> None:
        """Prints the summary, and writes it to summary.json, with a picture next to the log."""
        if not self._job.is_first:
            return
        self.flush()
        seconds = time.perf_counter() - self._began
        updates, say = self._read, self._job.say
        values = {
            "updates": self._start + len(updates),
            "seconds": seconds,  # since this start, including evaluation and checkpoints
            "seconds_per_update": sum(update.seconds for update in updates) / max(1, len(updates)),
            f"{self._unit}_per_second": self._counted / seconds,
            "peak_memory": self._job.peak_memory(),
            "ranks": self._job.ranks,
            "engine": self._job.engine,
            "loss": updates[-1].loss if updates else None,
            "held_out": measured,
        }
        say(f"{len(updates)} updates in {seconds:.1f} s, {self._counted / seconds:.0f} {self._unit} per second")
        if updates:
            say(f"loss {updates[0].loss:.4f} -> {updates[-1].loss:.4f}; held out: {listed(measured)}")
        noise = updates[-1].noise_scale if updates else None
        if noise is not None:  # at the last updates; it grows as the loss falls
            values["noise_scale"] = noise
            say(f"noise scale {noise:.0f} {self._unit}, the last batch {_count(updates[-1]):.0f}")
        (self._folder / "summary.json").write_text(_json(values, indent=1) + "\n")
        picture = draw(self._folder)
        say(f"in {self._folder}: log.jsonl, checkpoints/, weights.pt" + (f", {picture.name}" if picture else ""))


def _count(update: Update) -> float:
    """The size of an update, in the unit of the task."""
    return float(sum(update.counts.values()))


def draw(folder: Path) -> Path | None:
    """Draws the loss and the learning rate of a run, as curve.png next to its log."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = [(0, "log", "index", "loss", "an update's loss"), (1, "log", "index", "lr", "learning rate")]
    curves.insert(1, (0, "evaluation", "updates", "loss", "loss on held-out data"))
    figure, axes = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained")
    for place, name, x, y, label in curves:
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        axes[place].plot([line[x] for line in lines], [line[y] for line in lines], ".-", linewidth=1, label=label)
        axes[place].legend(frameon=False)
        axes[place].set_ylim(bottom=0)
        axes[place].grid(alpha=0.3)
    axes[1].set_xlabel("updates")
    path = folder / "curve.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _cut(path: Path, key: str, last: int) -> None:
    """Keeps the lines up to this `key`: a killed run may have logged updates that are in no checkpoint."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)[key] <= last]  # not half a line
    path.write_text("".join(kept))


def _json(value: Any, indent: int | None = None) -> str:
    """JSON, with null for NaN and the infinities."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)


def listed(measured: dict[str, float]) -> str:
    return ", ".join(
        f"{name} {value:.1%}" if name == "accuracy" else f"{name} {value:.4f}" for name, value in measured.items()
    )
