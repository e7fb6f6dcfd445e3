"""Prints how far off windows are whose batches XLA's compiler shards over two devices of this process (SPMD)."""

import numpy
import torch_xla.runtime
from torch_xla.distributed import spmd

from tests.support.problems import Batch, trunk

if __name__ == "__main__":
    torch_xla.runtime.use_spmd()  # before that module asks for the device
    from tests.device.test_xla import accumulating, there, windows_off

    mesh = spmd.Mesh(numpy.arange(2), (2,), ("data",))
    model = there(trunk())

    def placed(batch: Batch) -> Batch:
        sharded: Batch = there(batch)
        spmd.mark_sharding(sharded["x"], mesh, ("data", None, None))
        return sharded

    print(windows_off(model, accumulating(model), make=trunk, place=placed))
