"""`plan`: its cuts are those of real windows, its bytes those of counted collectives, its rules those of papers."""

import ctypes
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distaccum import plan
from distaccum.law import cut_evenly, steps_for
from distaccum.tools.cli import main
from distaccum.tools.plan import scaled_learning_rate
from tests.support.counting import Counting
from tests.support.engines import wrappers
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, run_window

LAYERS, WIDTH = 4, 24  # even, so that two ranks halve a layer's weight
NUMBERS = LAYERS * WIDTH * WIDTH


def policy(forecast, name):
    return next(row for row in forecast.policies if row["policy"] == name)


@pytest.mark.parametrize(("batch", "micro", "ranks"), [(1000, 32, 8), (101, 50, 1), (3, 1, 8), (64, 64, 1), (97, 7, 5)])
def test_planned_cut_equals_the_librarys(batch, micro, ranks):
    forecast = plan(batch_size=batch, micro_batch_size=micro, ranks=ranks)
    assert forecast.steps == steps_for(batch, micro, ranks)
    assert plan(batch_size=str(batch), micro_batch_size=float(micro), ranks=str(ranks), nodes=1.0) == forecast
    assert forecast.windows.samples == forecast.steps * micro * ranks >= batch
    sizes = [one.samples for one in forecast.split.ranks for _ in range(one.ranks)]
    assert sum(sizes) == batch and len(sizes) == ranks and max(sizes) - min(sizes) <= 1
    for one in forecast.split.ranks:
        parts = [size for times, size in one.micro_batches for _ in range(times)]
        assert parts == cut_evenly(one.samples, largest=micro)


def sent_here(engine, sync, steps):
    """Bytes that a ring sends for the large collectives that one update makes."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    net = wrappers.ddp(net) if engine == "DDP" else wrappers.fully_sharded(net, net)
    _, accumulator = accumulating(net, 0.1, steps=steps, sync=sync)
    num, sent = dist.get_world_size(), []
    for _ in range(2):  # DDP rebuilds its buckets after the first window
        window = accumulator.window(torch.randn(steps, 2, WIDTH))
        with Counting() as counting:
            run_window(window, net).step()
        sent.append(0.0)
        for name, numbers in counting.take():
            if numbers < WIDTH * WIDTH // 2:
                continue  # the plan and the record
            whole = numbers if "allreduce" in name else numbers * num / (num + 1)  # all ranks, and one part more
            rounds = 2 if "allreduce" in name else 1
            sent[-1] += 4 * rounds * (num - 1) / num * whole
    return sent[-1]


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_planned_bytes_equal_those_of_counted_collectives(world):
    forecast = plan(batch_size=3 * world, micro_batch_size=1, ranks=world, parameters=NUMBERS)
    for engine, policies in (("DDP", ("last", "every")), ("FSDP2", ("last", "every", "gathered"))):
        for sync in policies:
            sent = sent_here(engine, sync, 3)
            assert sent == pytest.approx(policy(forecast, f"{engine}, {sync}")["bytes_per_update"]), (engine, sync)


def test_bytes_of_each_policy_add_up():
    def sent(name):
        return policy(plan(parameters=4000, dtype="bfloat16", ranks=4, nodes=2), name)

    assert sent("ZeRO 1 and 2, last")["bytes_once"] == 3 * 3 * 8000 // 4
    hybrid = sent("FSDP2 hybrid, replicas")
    assert hybrid["bytes_per_micro_step"] == 3 * 4000 and hybrid["bytes_once"] == 4000  # a shard, to the other replica


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is Linux's")
@on_ranks(2)
def test_planned_bytes_are_those_that_a_rank_holds_at_its_peak():
    """By resident memory, as launch/bench/memory.py measures it, with a glibc that gives back what is freed."""
    sys.path.append(str(Path(__file__).parents[2] / "launch" / "bench"))
    import memory
    from contenders import CONTENDERS, as_torchrun, be_quiet

    be_quiet()
    as_torchrun()
    memory.WIDTH, memory.STEPS, memory.UPDATES = 1408, 2, 2
    libc = ctypes.CDLL(None)
    assert libc.mallopt(-3, 65536) and libc.mallopt(-1, 65536)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    numbers = memory.DEPTH * memory.WIDTH**2
    forecast = plan(parameters=numbers, layers=memory.DEPTH, optimizer="sgd", ranks=2, memory="4GB")
    of_policy = {"DDP": "DDP, last", "ZeRO 1": "ZeRO 1 and 2, last"}
    for name in ("DDP", "ZeRO 1", "ZeRO 2, every", "ZeRO 3, every", "FSDP2, last", "FSDP2, gathered", "FSDP2, every"):
        contender = next(one for one in CONTENDERS if one.engine == name and one.name == "distaccum")
        memory.of_micro_batch(contender, 2, 1)  # loads what libraries load once
        found = memory.of_parameters(contender)
        wanted = policy(forecast, of_policy.get(name, name))["bytes"] / memory.MIB
        assert max(found["first"], found["fifth"]) == pytest.approx(wanted, rel=0.05), name


def test_first_line_says_what_fits(capsys):
    assert main(["plan", "--parameters", "7b", "--ranks", "8", "--memory", "80GB"]) == 0
    text = " ".join(capsys.readouterr().out.split()).partition(" plan for")[0]
    assert text == (
        "DDP does not fit in 80 GB: it takes 168 GB and activations on each rank. FSDP2 with sync=gathered fits with "
        "67.38 GB and activations, and sends the least."
    )
    of_gpt2 = plan(parameters="gpt2", memory="24GB").answer
    assert of_gpt2 == "A plain module fits in 24 GB: it takes 2.489 GB and activations on each rank."
    assert plan(parameters="llama-70b", ranks=2, memory="24GB").answer.endswith(
        "Nothing else does; take more ranks, a smaller dtype or offloading."
    )
    halves = plan(parameters="7b", dtype="bfloat16", ranks=8)
    assert policy(halves, "ZeRO 2, every")["optimizer"] == 12 * 7 * 10**9 // 8  # masters and Adam's in float32


def test_one_of_a_thing_is_singular():
    text = str(plan(batch_size=1, micro_batch_size=1, parameters=1))
    assert "plan for 1 rank on 1 node" in text and "1 micro-step per rank and update, for 1 sample in" in text
    assert not re.search(r"\b1 \w+s\b", text)


def test_learning_rates_follow_their_rules():
    sgd = scaled_learning_rate(32, 0.1, "sgd", "mean")
    assert sgd["lr"] == pytest.approx(3.2)  # Goyal et al.: 0.1 for 256, 3.2 for 8k
    assert "1706.02677" in sgd["advice"][0] and "warm-up of 5 epochs" in sgd["advice"][0]
    adam = scaled_learning_rate(4, 1e-3, "adam", "mean")
    assert adam["lr"] == pytest.approx(2e-3) and adam["eps_times"] == pytest.approx(0.5)
    assert "2205.10287" in adam["advice"][0] and "1 - beta x 4" in adam["advice"][0]
    # An SGD step on the sum at a fixed rate equals one on the mean at the linearly scaled rate.
    summed = scaled_learning_rate(4, 0.1, "sgd", "sum")
    assert summed["lr"] == pytest.approx(0.1) and "has grown by 4 already" in summed["advice"][0]
    summed = scaled_learning_rate(4, 1e-3, "adam", "sum")
    assert summed["lr"] == pytest.approx(2e-3) and summed["eps_times"] == pytest.approx(2.0)  # 4 of the sum, / sqrt(4)


def test_missing_arguments_leave_parts_out_and_are_requested():
    forecast = plan(ranks=8, nodes=2, parameters="350M")
    assert forecast.steps is None and policy(forecast, "DDP, last")["bytes_once"] == 2 * 7 * 1_400_000_000 // 8
    asked = "; ".join(forecast.missing)
    for flag in ("--batch-size", "--base-batch-size"):
        assert flag in asked
    assert "--parameters" not in asked and "--batch-size and --micro-batch-size for the steps" in str(forecast)
    with pytest.raises(ValueError, match="ranks=None, expected a whole number of at least 1"):
        plan(ranks=None)


RUN = "--batch-size 1000 --micro-batch-size 32 --ranks 8 --nodes 2 --parameters 11.7M"


def test_command_prints_text_and_json(capsys):
    words = ["plan", *RUN.split(), "--base-batch-size", "256", "--lr", "0.1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("4 micro-steps per rank", "DDP, last", "1706.02677", "2205.10287"):
        assert part in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 4 and found["windows"]["samples"] == 1024
    rows = {row["policy"]: row for row in found["policies"]}
    assert rows["DDP, every"]["bytes_per_update"] == 4 * rows["DDP, last"]["bytes_per_update"]
