"""Evaluation on held-out data, over all ranks."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import Config
from .job import Job
from .tasks import Task, to_device


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, config: Config, job: Job) -> dict[str, float]:
    """The mean loss, with accuracy or perplexity; every held-out sample counts once.

    All ranks run as many forwards, since those of a sharded model communicate; one that has no samples left runs
    one that is not counted. Of ranks that share samples each measures a part, or one all, or each all of them.
    """
    number = len(task.held_out)  # type: ignore[arg-type]
    mine = range(job.data_rank, number, job.data_ranks)
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for at in range(0, -(-number // job.data_ranks), config.micro_batch_size):
        indices = mine[at : at + config.micro_batch_size]
        batch = to_device(task.collate([task.held_out[i] for i in indices or [0]]), job.device)
        with job.autocast():
            measured = task.measure(model, batch)
        if indices:
            sums += measured.double().cpu()
    model.train()
    count, loss, right = job.sum(sums).tolist()
    mean = loss / count
    if task.unit == "tokens":
        return {"loss": mean, "perplexity": math.exp(min(mean, 100.0))}
    return {"loss": mean, "accuracy": right / count}
