"""What ranks tell each other is on the host, whatever the default device."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distaccum.law import LostRanksError
from distaccum.ranks import in_contact
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


NCCL = "NCCL error in: NCCLUtils.cpp:77, "
LOST = [
    f"{NCCL}remote process exited or there was a network error\nncclRemoteError: A call failed due to a network",
    f"{NCCL}unhandled system error\nncclSystemError: System call\nLast error:\nConnect failed: Connection refused",
    "[Rank 0] Watchdog caught collective operation timeout: it ran for 600 ms before timing out.",
]
OTHER = [
    f"{NCCL}unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 'out of memory'",
    f"{NCCL}invalid usage\nncclInvalidUsage: This usually reflects invalid usage.\nDuplicate GPU detected",
]


@on_ranks(2)
def test_error_of_nccl_names_a_lost_rank_only_where_one_was_lost():
    """The texts are torch's for NCCL, which needs GPUs; both kinds have its one type."""
    for text in (*LOST, *OTHER):
        error = dist.DistBackendError(text)
        with pytest.raises(RuntimeError) as raised, in_contact():
            raise error
        assert (type(raised.value) is LostRanksError) == (text in LOST), text
        assert text in OTHER or raised.value.__cause__ is error
