"""Scripts that do to their process what an audit must live with; each says the status and a part of the report."""

from pathlib import Path

import pytest

BEGIN = """import io, os, sys, torch
import torch.nn.functional as F
torch.manual_seed(0); net = torch.nn.Linear(8, 3)
adam = torch.optim.AdamW(net.parameters())
def train(updates=6, divisor=4):
    for _ in range(updates):
        for _ in range(4):
            x, y = torch.randn(4, 8, device="cpu"), torch.randint(3, (4,), device="cpu")
            (F.cross_entropy(net(x), y) / divisor).backward()
        adam.step(); adam.zero_grad()
"""
SCRIPTS = [block.split("\n", 1) for block in Path(__file__).with_name("robust.txt").read_text().split("### ")[1:]]


@pytest.mark.parametrize(("head", "text"), SCRIPTS, ids=[head.split(" |")[0] for head, _ in SCRIPTS])
def test_audit_lives_with_a_script_that_has(programs, tmp_path, head, text):
    _, options, status, says = (part.strip() for part in head.split("|"))
    (tmp_path / "train.py").write_text(BEGIN + text)
    done = programs.run("distaccum", "audit", *options.split(), tmp_path / "train.py")
    assert done.status == int(status) and says in " ".join(done.text.split()), done.text
