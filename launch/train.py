"""Train a model with exact gradient accumulation: one loop for one process, several, and several nodes.

    python launch/train.py
    torchrun --nproc-per-node 2 launch/train.py --config configs/ddp-cpu.toml
    python launch/train.py --help

The loop is in `train`; what is around it is in `training/`. The seed alone decides the order of the data, whatever the
number of ranks, so that every way to start a run ends with the same weights.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from training.checkpoints import Checkpoints, save_weights
from training.config import Config, failures_in_a_line, read_config, refusals_in_a_line, stop
from training.data import Order, micro_batches
from training.job import Job
from training.report import Report, listed, plan
from training.signals import Signals
from training.tasks import Batch, Task, loss_of, make_task, measure, to_device, train_mode, try_model
from training.wrapping import Wrapped, change_blocks, wrap

from distaccum import Accumulator
from distaccum.extensions import NoiseScale


def train(config: Config, job: Job) -> int:
    """Trains, and returns the exit status."""
    task = make_task(config, job.local_rank == 0, job.wait_for_all)
    order = Order(len(task.train), config.batch_size, config.seed)
    steps = math.ceil(config.batch_size / (job.data_ranks * config.largest))
    is_auto = config.micro_batch_size == "auto"  # then the loader yields a rank's whole part of an update
    if is_auto and 0 < order.num_samples % config.batch_size < job.data_ranks:
        stop("micro_batch_size = 'auto' and no sample for some rank in an epoch's last update; change batch_size")
    updates = config.updates or config.epochs * order.updates_per_epoch
    job.say(plan(config, job, task, order, steps, updates))
    if job.is_planned:
        return 0
    change_blocks(task.model, config)
    try_model(task, config, job.device)

    with refusals_in_a_line():
        wrapped = wrap(task.model, config, job, updates)
        signals = Signals(job, wrapped.mesh and wrapped.mesh["tensor"])
        accumulator = Accumulator(
            wrapped.model,
            wrapped.optimizer,
            steps=None if is_auto else steps,
            micro_batch_size="auto" if is_auto else None,
            count=task.count,
            max_norm=config.max_norm or None,
            scheduler=wrapped.schedule,
            scaler=wrapped.scaler,
            accelerator=wrapped.accelerator,
            sync=config.sync,
            on_nonfinite=config.on_nonfinite,
            extensions=[signals, NoiseScale()] if config.measure_noise else [signals],
        )
    checkpoints = Checkpoints(config, job, wrapped, accumulator, order.num_samples)
    signals.is_save_due = checkpoints.overdue
    torch.manual_seed(config.seed + 1 + job.rank)  # weights are the same on all ranks, dropout is not
    if config.resume:
        checkpoints.resume()
    if config.evaluate_only:
        job.say(f"held out: {listed(evaluate(wrapped, task, job, accumulator))}")
        return 0
    is_written = job.is_first and (Path(config.out) / "weights.pt").exists()
    if accumulator.index >= updates and job.largest(is_written)[0]:
        job.say(f"nothing left to do: {accumulator.index} updates are done, and this run asks for {updates}")
        return 0

    def loss_fn(batch: Batch) -> Tensor:
        with job.autocast():
            return loss_of(wrapped.model(batch["inputs"]), batch["labels"])

    measured: dict[str, float] = {}
    stopped = 0
    with signals, Report(config, job, task.unit, updates, accumulator.index) as report:
        while accumulator.index < updates and not stopped:  # an epoch, or the rest of one
            loader = DataLoader(
                task.train,
                batch_sampler=micro_batches(order, accumulator.index, updates, steps, job.data_rank, job.data_ranks),
                collate_fn=task.collate,
                num_workers=config.workers,
                pin_memory=job.device.type == "cuda",
                generator=torch.Generator(),  # its own, so that a resumed run draws no extra number
            )
            window: Any
            for window in loader if is_auto else accumulator.windows(loader):
                for batch in () if is_auto else window:
                    window.backward(loss_fn(to_device(batch, job.device)))
                    report.progress(accumulator.index, window.num_done)
                lr = wrapped.lr
                update = accumulator.update(to_device(window, job.device), loss_fn) if is_auto else window.step()
                stopped, is_save_asked = signals.asked(update)
                report.update(update, lr)
                done = accumulator.index
                report.progress(done, 0)
                if not stopped and (done % (config.evaluate_every or order.updates_per_epoch) == 0 or done == updates):
                    measured = evaluate(wrapped, task, job, accumulator)
                    report.evaluation(done, measured)
                    if config.best and measured["loss"] < checkpoints.best:
                        checkpoints.best = measured["loss"]
                        save_weights(config, job, wrapped, "best")
                is_periodic = config.checkpoint_every and done % config.checkpoint_every == 0
                if is_save_asked or is_periodic or done == updates:
                    report.flush(to_disk=True)  # otherwise a kill would lose an update from the log
                    checkpoints.save()
                if stopped:
                    break
        if accumulator.index < updates:
            name = signal.Signals(stopped).name
            job.say(f"stopped by {name} after {accumulator.index} updates, and saved; --resume goes on")
            return 128 + stopped
        save_weights(config, job, wrapped)
        report.summary(measured or evaluate(wrapped, task, job, accumulator))
    return 0


@torch.no_grad()
def evaluate(wrapped: Wrapped, task: Task, job: Job, accumulator: Accumulator) -> dict[str, float]:
    """The mean loss, with accuracy or perplexity; every held-out sample counts once.

    All ranks run equally many forwards, since those of a sharded model communicate; a rank without samples left runs
    one that is not counted. Each of the ranks that share samples measures them.
    """
    config = job.config
    number = len(task.held_out)
    size = accumulator.state_dict()["fit"]["size"] or min(config.largest, -(-config.batch_size // job.data_ranks))
    mine = range(job.data_rank, number, job.data_ranks)
    sums = torch.zeros(3, dtype=torch.float64)
    wrapped.model.eval()
    for at in range(0, -(-number // job.data_ranks), size):
        indices = mine[at : at + size]
        batch = to_device(task.collate([task.held_out[i] for i in indices or [0]]), job.device)
        with job.autocast():
            scores = wrapped.model(batch["inputs"])
        if indices:
            sums += measure(scores, batch["labels"])
    train_mode(wrapped.model, config)
    count, loss, right = job.reduce(sums).tolist()
    if config.task == "language":
        return {"loss": loss / count, "perplexity": math.exp(min(loss / count, 100.0))}
    return {"loss": loss / count, "accuracy": right / count}


def main(arguments: Sequence[str] | None = None) -> int:
    with failures_in_a_line():
        config, planned_ranks = read_config(arguments)
        with Job.find(config, planned_ranks) as job:
            return train(config, job)


if __name__ == "__main__":
    raise SystemExit(main())
