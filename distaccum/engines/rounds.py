"""Messages between ranks, as few after each other as their number has bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 0x6461  # of our messages, in a group that may be the caller's


def gather_in_rounds(row: list[float], group: dist.ProcessGroup, among: Sequence[int] | None = None) -> Tensor:
    """The rows of all ranks of `group`, or of those `among` them, in their order.

    In each round a rank passes on all that it has to one that lacks it: rows of 1, 2, 4, 8... ranks. gloo's own
    gathering sends them around a ring, a message for each rank, which is as many for two.
    """
    ranks = dist.get_process_group_ranks(group)
    here = dist.get_rank(group)
    if among is not None:
        ranks, here = [ranks[one] for one in among], among.index(here)
    num, known = len(ranks), 1
    rows = torch.empty(num, len(row), dtype=torch.float64)  # of this rank, and of those after it
    rows[0] = torch.tensor(row, dtype=torch.float64)
    while known < num:
        new = min(known, num - known)
        sender, receiver = ranks[(here + known) % num], ranks[here - known]
        coming = dist.irecv(rows[known : known + new], sender, group=group, tag=TAG)
        going = dist.isend(rows[:new], receiver, group=group, tag=TAG)
        assert coming is not None and going is not None  # which it is outside of the group
        coming.wait()
        going.wait()
        known += new
    return rows.roll(here, 0)
