"""The slow imports, and objects that are made once, for the processes that tests fork: ranks and programs.

Forking a process that has imported this module replaces a start. For each rank of each file of tests, that saves 3
seconds for torch and 6 for DeepSpeed with the imports of `deepspeed.initialize`.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it on import

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import accelerate
    import deepspeed
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    with suppress(ImportError):  # deepspeed.initialize imports this optimizer, which compiles on import
        import deepspeed.runtime.zero.muon.muon_optimizer

import distaccum.accumulator

torch.set_num_threads(1)
LOADED = (accelerate, deepspeed, torch, distaccum)
