"""The programs of launch/bench: the compared loops are correct, and a mistake prints one line."""

import gc
import json
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum.extensions import NoiseScale
from tests.support.programs import ROOT, Programs
from tests.support.windows import accumulating, error, gradient_of, loss_of, run_window, set_weights, weights

pytestmark = pytest.mark.long


def run(programs: Programs, program: str, *options: object) -> None:
    programs.run(str(ROOT / "launch/bench" / program), *options, status=0)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batches_of(index: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(8, 16, generator=generator) for _ in range(3)]


def errors_of_loops() -> dict[str, float]:
    """By loop of one process: the error of the change of the weights in two updates."""
    sys.path.append(str(ROOT / "launch" / "bench"))
    from contenders import CONTENDERS, Task, be_quiet

    be_quiet()
    plain, found = make_net().double(), {}
    for index in range(2):  # big batches
        plain.zero_grad()
        set_weights(plain, weights(plain) - gradient_of(plain, torch.cat(batches_of(index)).double()))
    for contender in CONTENDERS:
        if str(contender).startswith("plain"):
            net = make_net()
            before = weights(net)
            loop = contender.set_up(Task(net, loss_of, partial(SGD, lr=1.0), 3, layers=(net[0], net[2])))
            for index in range(2):
                loop.run(batches_of(index))
            found[str(contender)] = error(loop.weights() - before, weights(plain) - before)
    return found


def test_compared_loops_give_the_gradient_of_big_batches(programs):
    code = "import json; from tests.launch import test_bench; print(json.dumps(test_bench.errors_of_loops()))"
    done = programs.start("-c", code, own_stderr=True).wait()
    assert done.status == 0, done.text + done.errors
    found = json.loads(done.text.splitlines()[-1])
    assert len(found) >= 10 and max(found.values()) <= 1e-5


@pytest.mark.parametrize("way", ["window", "update", "contrast"])
def test_windows_leave_nothing_behind(way):
    options = {"micro_batch_size": 3, "max_norm": 1.0, "extensions": [NoiseScale()]}
    model, accumulator = accumulating(make_net(), 1e-3, **options)

    def updates(number: int) -> dict[str, int]:
        """Objects of each type that are alive after so many more."""
        for i in range(number):
            batch = torch.randn(2 + i % 7, 16)
            if way == "update":
                accumulator.update(batch, lambda rows: loss_of(model, rows))
            elif way == "contrast":
                accumulator.contrast(batch, lambda rows: (model(rows),), lambda rows: rows.square().mean())
            else:
                run_window(accumulator.split(batch), model).step()
        gc.collect()
        return Counter(type(one).__name__ for one in gc.get_objects())

    early, late, later = updates(60), updates(300), updates(300)
    grown = (late - early) & (later - late)  # both times: other tests' objects come and go once
    assert max(grown.values(), default=0) < 30, grown


def test_token_means_are_wrong_in_the_hand_written_loop_and_exact_here(programs, tmp_path):
    out = tmp_path / "law"
    options = "--libraries", "hand", "distaccum", "--cases", "tokens2", "clip", "--out", out
    run(programs, "law.py", *options)
    cells = json.loads(out.with_suffix(".json").read_text())["cells"]
    verdicts = {name: [cell["verdict"] for cell in row.values()] for name, row in cells.items()}
    assert verdicts == {"hand": ["wrong", "wrong"], "distaccum": ["exact", "exact"]}
    assert "| by hand (plain, DDP) | **wrong**, " in out.with_suffix(".md").read_text()


PROGRAMS = [
    ("audit.py", ("--rounds", 1, "--updates", 17, "--ranks", 1, "--shapes", "36 tensors"), "36 tensors"),
    ("memory.py", ("--only", "plain, by", "--batch-size", 2, "--sizes", 1), "plain, by hand"),
    ("pace.py", ("--rounds", 1, "--cases", 1), "1, 2, 8, 10"),
    ("overhead.py", ("--rounds", 2, "--steps", 1, 4, "--ranks", 1), "by hand"),
    ("gpu.py", ("--device", "cpu", "--small"), "tiny, 2"),
]


@pytest.mark.parametrize(("program", "options", "row"), PROGRAMS)
def test_other_programs_run_small_to_their_end(programs, tmp_path, program, options, row):
    run(programs, program, *options, "--out", tmp_path / "page")
    assert f"\n| {row} |" in (tmp_path / "page.md").read_text()
