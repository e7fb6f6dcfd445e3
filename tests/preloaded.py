"""What takes long to import and what is made once, for the processes that tests fork: ranks and programs.

A process that has imported this is forked in the place of a start: torch takes 3 seconds, DeepSpeed with what
`deepspeed.initialize` brings in 6 more, and so on for each rank of each file of tests.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed asks when it is imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import accelerate
    import deepspeed
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    with suppress(ImportError):  # an optimizer that deepspeed.initialize asks for, and that compiles on import
        import deepspeed.runtime.zero.muon.muon_optimizer

import distaccum.accumulator

torch.set_num_threads(1)
LOADED = (accelerate, deepspeed, torch, distaccum)
