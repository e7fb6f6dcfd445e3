"""What ranks tell each other: rows, sums that nobody waits for, and what is lost with a rank."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import DistaccumError
from tests.support.problems import gradient_of_trunk, join, micro_batches_of, trunk
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, gradient, loss_of, run_window


@on_ranks(2)
def test_accumulator_refuses_to_be_copied():
    ddp, accumulator = accumulating(DistributedDataParallel(trunk()))
    for copied in (copy.deepcopy, pickle.dumps):
        copied((ddp, SGD(ddp.parameters(), lr=0.1)))  # which torch can
        with pytest.raises(DistaccumError, match="whose process group cannot be copied; copy model and optimizer"):
            copied((ddp, accumulator))


@on_ranks(2)
def test_default_device_changes_nothing():
    """Where tensors that do not say their device have no numbers."""
    rank = dist.get_rank()
    ddp, accumulator = accumulating(DistributedDataParallel(trunk()), micro_batch_size=2)
    mine = [micro_batches_of([[2, 3], [4, 1]], 0, one) for one in range(2)]
    batch, exact = join(mine[rank]), gradient_of_trunk([*mine[0], *mine[1]])
    with torch.device("meta"):
        window = run_window(accumulator.window(mine[rank]), ddp)
        assert error(gradient(ddp), exact) <= 1e-12
        loss = window.step().loss
        assert accumulator.update(batch, partial(loss_of, ddp)).loss == pytest.approx(loss, rel=1e-12)
        assert accumulator.check(batch, partial(loss_of, ddp)).equivalent
