"""ms-swift#10165 on 2 ranks: the Jensen-Shannon divergence is a mean over the tokens of each micro-batch."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import language_model, texts
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def jsd(student, teacher, mask, beta=0.5):
    student, teacher = student[mask].log_softmax(-1), teacher[mask].log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([student, teacher]), dim=0) - torch.log(torch.tensor(2.0))
    of_teacher = functional.kl_div(mixture, teacher, reduction="none", log_target=True)  # wrong
    of_student = functional.kl_div(mixture, student, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum() / mask.sum()


dist.init_process_group("gloo")
steps, student, teacher = 4, DistributedDataParallel(language_model()), language_model()
teacher.load_state_dict({name: 0.9 * one for name, one in teacher.state_dict().items()})
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for i, (rows, labels) in enumerate(texts(32, seed=dist.get_rank())):
    is_last = (i + 1) % steps == 0
    with torch.no_grad():
        goal = teacher(rows)
    with nullcontext() if is_last else student.no_sync():
        (jsd(student(rows), goal, labels != -100) / steps).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
