"""`save` and `load`: a file of all ranks' states, whole at any time. tests/launch/test_minimal.py kills and resumes."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distaccum import Accumulator, load, save
from tests.support.ranks import on_ranks


def parts():
    network = nn.Linear(4, 2)
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    optimizer = torch.optim.AdamW(network.parameters())
    return {"model": model, "optimizer": optimizer, "accumulator": Accumulator(model, optimizer, steps=2)}


@on_ranks(2)
def test_file_holds_every_ranks_state_and_fails_on_all_ranks_or_none():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    file, rank = Path(folder[0]) / "run.pt", dist.get_rank()
    saved = parts()
    torch.manual_seed(rank)
    for window in saved["accumulator"].windows([torch.randn(3, 4)] * 2):
        for x in window:
            window.backward(saved["model"](x).square().mean())
        window.step()
    save(file, **saved)
    following = torch.rand(1)
    state = torch.load(file)
    assert {"rank 0", "rank 1"} <= state["accumulator"].keys() and [*state["model"]] == ["weight", "bias"]

    loaded = parts()
    load(file, **loaded)
    assert loaded["accumulator"].index == 1
    assert torch.equal(loaded["model"].module.weight, saved["model"].module.weight)
    list(loaded["accumulator"].windows([]))
    assert torch.equal(torch.rand(1), following)  # each rank has random numbers of its own

    before, broken = file.read_bytes(), nn.Linear(4, 2) if rank else 1
    with pytest.raises(Exception, match=r"save\(\) failed on rank 0: Attr|^'int' object has no attribute 'state_dict'"):
        save(file, model=saved["model"], broken=broken)
    missing = file.parent / "nowhere" / "run.pt"
    with pytest.raises(Exception, match=r"could not write on rank 0|does not exist"):
        save(missing, **saved)
    with pytest.raises(ValueError, match="model is sharded over ranks"):
        save(file, model=fully_shard(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"has no ema, expected names among model, optimizer, accumulator"):
        load(file, ema=nn.Linear(4, 2))
    assert file.read_bytes() == before and [*file.parent.iterdir()] == [file]


def test_one_process_loads_some_parts(tmp_path):
    saved, loaded = parts(), parts()
    save(tmp_path / "run.pt", **saved)
    load(tmp_path / "run.pt", model=loaded["model"])
    assert torch.equal(loaded["model"].weight, saved["model"].weight)
