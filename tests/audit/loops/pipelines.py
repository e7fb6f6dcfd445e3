"""torchtitan#2972 and #1733, DeepSpeed#7773 on 2 ranks, a stage each: sums, a division twice, and none."""

import sys

import torch
import torch.distributed as dist
from data import language_model, texts
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, name, chunks = dist.get_rank(), sys.argv[1], 4
whole = language_model()
module = whole[:2] if rank == 0 else whole[2:]


def loss_fn(logits, labels):
    return cross_entropy(  # wrong
        logits.flatten(0, 1), labels.flatten(), reduction="sum" if name == "torchtitan_2972" else "mean"
    )


schedule = ScheduleGPipe(
    PipelineStage(module, rank, 2, torch.device("cpu")), chunks, loss_fn, scale_grads=name == "torchtitan_1733"
)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
for i, (rows, labels) in enumerate(texts(64, batch_size=8)):
    if name != "torchtitan_2972":
        labels = rows
    if rank == 0:
        schedule.step(rows)
    else:
        losses = []
        schedule.step(target=labels, losses=losses)  # uneven
        print(sum(losses).item() / (labels != -100).sum().item())
    if name != "torchtitan_1733" or i % 2:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
