"""The README's code runs and prints the output in its comments.

Each python block runs in its own namespace, on the number of ranks in its fence (```python ranks=2). A block that makes
no model gets one, with an optimizer and data. The comment after a print is the expected output; ` | ` separates
outputs of several calls. Blocks fenced as ```python run=no are not run; they must be valid Python, and their calls
must be tested elsewhere.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import pytest
import torch
from engines import import_deepspeed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from distaccum import Accumulator

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python(?: ranks=(\d+))?\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def printed_by(code):
    warnings.simplefilter("error")
    out = io.StringIO()
    names = {} if "import torch" in code or "from distaccum" in code else made()
    if "import deepspeed" in code:
        import_deepspeed()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if "import Accelerator" in code:
            os.environ.pop(name, None)  # another library's test leaves these; they would look like a launcher
    if "import Fabric" in code:
        warnings.simplefilter("ignore")  # lightning's own
    with redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), names)
    return out.getvalue().strip().splitlines()


def made():
    model = DistributedDataParallel(nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "Accumulator": Accumulator,
        "clip_grad_norm_": nn.utils.clip_grad_norm_,
        "criterion": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(torch.randn(48, 20), torch.randint(0, 2, (48,))), batch_size=8),
        "model": model,
        "network": (network := nn.Linear(20, 2)),
        "sgd": torch.optim.SGD(network.parameters(), lr=0.1),
        "nullcontext": nullcontext,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "steps": 4,
    }


@pytest.mark.parametrize(("num", "code"), BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
def test_block_prints_what_its_comments_say(ranks, num, code):
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    expected = [line.strip() for comment in comments for line in comment.split(" | ")]
    for printed in ranks(int(num)).run(printed_by, code) if num else [printed_by(code)]:
        assert [line.strip() for line in printed] == expected


def test_readme_has_blocks():
    assert len(BLOCKS) > 5


SHOWN = re.findall(r"^```python run=no\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_blocks_that_are_not_run_are_python_and_tested_elsewhere():
    for code in SHOWN:
        compile(code, "README.md", "exec")
    tested = (Path(__file__).parent / "test_choosing.py").read_text()
    engines = [code for code in SHOWN if "class SummingEngine" in code]
    assert len(engines) == 1 and engines[0].strip() in tested


def test_links_into_the_repository_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
