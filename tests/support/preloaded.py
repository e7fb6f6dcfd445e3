"""The slow imports (10 s of a core), made once by the server from which ranks and programs fork in 50 ms."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it on import
sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import accelerate
    import deepspeed
    import matplotlib
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    matplotlib.use("Agg")
    import matplotlib.pyplot
    import prove
    import torchvision
    import train

    with suppress(ImportError):  # deepspeed.initialize imports this optimizer, which compiles on import
        import deepspeed.runtime.zero.muon.muon_optimizer

import distaccum.accumulator
import distaccum.tools.cli

torch.set_num_threads(1)
LOADED = (accelerate, deepspeed, torch, torchvision, distaccum.accumulator, prove, train)
gc.collect()
gc.freeze()  # or each fork's first collection would copy all pages that it visits
