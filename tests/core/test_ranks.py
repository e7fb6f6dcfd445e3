"""What ranks tell each other is on the host, whatever the default device."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.problems import gradient_of_trunk, join, micro_batches_of, trunk
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, gradient, loss_of, run_window


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
