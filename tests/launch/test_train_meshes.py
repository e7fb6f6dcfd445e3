"""launch/train.py on a mesh: tensor-parallel ranks end as data ranks alone do."""

from pathlib import Path

import pytest

from tests.launch.test_train import log_of, proven, trained
from tests.support.programs import ROOT

pytestmark = pytest.mark.long

# 30 samples are 15 on each of two data ranks: micro-batches of 3 and 4. An epoch of 48 has a window of 18.
SMALL = ("--width", 64, "--layers", 2, "--context", 48, "--batch-size", 30, "--warmup", 0)


@pytest.fixture
def text(tmp_path) -> Path:
    """Rows of many lengths."""
    path = tmp_path / "text.md"
    path.write_text("\n\n".join(f"paragraph {i} has " + "some words " * (i % 7 + 1) for i in range(60)))
    return path


def test_config_ends_as_data_ranks_alone(programs, tmp_path, text):
    config = ("--config", ROOT / "configs" / "tensor.toml", *SMALL, "--data", text, "--epochs", 2)
    printed = trained(programs, tmp_path / "mesh", *config, ranks=4)
    trained(programs, tmp_path / "data", *config, "--tp", 1, "--engine", "ddp", ranks=2)
    assert "4 ranks, FSDP2, 2 data ranks x 2 " in printed and "30 samples: 2 x 4 micro-batches of 4 or fewer" in printed
    mesh, data = log_of(tmp_path / "mesh"), log_of(tmp_path / "data")
    assert [one["counts"] for one in mesh] == [one["counts"] for one in data]
    for key in ("loss", "grad_norm"):
        assert [one[key] for one in mesh] == pytest.approx([one[key] for one in data], rel=1e-4)
    held_out = [(tmp_path / run / "evaluation.jsonl").read_text() for run in ("mesh", "data")]
    losses = [[float(word.split()[1]) for word in run.split(",") if "loss" in word] for run in held_out]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    proven(programs, tmp_path / "mesh", 1e-4)


ADAMW = (*SMALL, "--task", "language", "--optimizer", "adamw", "--lr", 1e-3, "--schedule", "constant")


def test_run_goes_on_cut_otherwise(programs, tmp_path, text):
    """Each start ends with the state of the optimizer, too, or the weights would differ from there."""
    options = (*ADAMW, "--data", text, "--precision", "float64", "--micro-batch-size", 4, "--resume")
    for done, (ranks, cut) in enumerate([(4, 2), (2, 1), (2, 2)]):
        printed = trained(programs, tmp_path / "run", *options, "--tp", cut, "--updates", done + 1, ranks=ranks)
        assert not done or f"goes on with update {done}" in printed
    assert len(log_of(tmp_path / "run")) == 3
    proven(programs, tmp_path / "run", 1e-10)
