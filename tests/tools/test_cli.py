"""The command `distaccum`, run in its own process as by a user."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distaccum import __version__
from distaccum.tools.cli import main

FACTORIES = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def good():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    batch = {"x": torch.randn(12, 6), "labels": torch.randint(0, 4, (12,))}
    batch["labels"][[1, 2, 5, 8]] = -100
    return model, batch, lambda part: cross_entropy(model(part["x"]), part["labels"])

def counted(**options):
    given = dict(zip(("model", "batch", "loss_fn"), good()))
    return {**given, "count": lambda b: (b["labels"] >= 0).sum(), **options}

in_five = lambda: counted(steps=5)
in_no_size = lambda: counted(micro_batch_size=0)
summed = lambda: counted(reduction="sum")
incomplete = lambda: {"model": 1}

def on_ranks():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model, batch, _ = good()
    model = nn.parallel.DistributedDataParallel(model)
    mine = {key: value[dist.get_rank() :: 2] for key, value in batch.items()}
    return counted(model=model, batch=mine, loss_fn=lambda part: cross_entropy(model(part["x"]), part["labels"]))

def fails():
    raise KeyError("a bug")

def talks():
    print("noise")
    return counted()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "more").mkdir()
    for name in ("factories.py", "more/of_mine.py"):
        (tmp_path / name).write_text(FACTORIES)
    (tmp_path / "parses.py").write_text("import argparse; argparse.ArgumentParser().parse_args(['--lr'])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("factories", None)
    return tmp_path


BIN = Path(sys.executable).parent


VERDICTS = [
    ("factories:in_five", 0, "in 5 micro-batches, one batch of 12: equivalent"),
    ("more/of_mine.py:counted", 0, "in 3 micro-batches"),
    ("factories:good", 1, "count_tokens('labels')"),
    ("factories:summed", 1, "reduction: the criterion averages"),
]


@pytest.mark.parametrize(("factory", "status", "text"), VERDICTS)
def test_check_prints_the_report_and_exits_with_its_status(folder, capsys, factory, status, text):
    assert main(["check", factory]) == status
    assert text in capsys.readouterr().out


def test_check_prints_a_traceback_or_json_on_request(folder, capsys):
    with pytest.raises(KeyError):
        main(["check", "factories:fails", "--traceback"])
    main(["check", "factories:talks", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["equivalent"] and report["samples"] == 12 and len(report["parameters"]) == 4


MISTAKES = {
    "check factories": "'factories', expected MODULE:FACTORY, such as",
    "check nowhere:good": "ModuleNotFoundError: No module named 'nowhere'",
    "check nowhere.py:good": "nowhere.py is not there, expected a file that has a function good",
    "check parses.py:good": "parses.py ended as it was imported (status 2), expected one whose import only defines",
    "check parses.py": "or train.py:setup; a whole script is for distaccum audit parses.py",
    "check factories:missing": "factories has no function missing",
    "check factories:incomplete": "gave a dict, expected model, batch and loss_fn, or a dict of them",
    "check factories:fails": "KeyError: 'a bug' (--traceback shows where)",
    "plann": "distaccum: argument COMMAND: invalid choice: 'plann'",
    "plan --bath-size 8": "distaccum: unrecognized arguments: --bath-size 8 (distaccum --help lists the options)",
    "plan --lr x": "distaccum plan: argument --lr: invalid float value: 'x' (distaccum plan --help lists",
    "plan --memory 0": "memory='0', expected a whole number of at least 1,000,000, such as 80GB",
    "plan --memory 80": "memory='80', expected a whole number of at least 1,000,000, such as 80GB",
    "plan --lr 0": "lr=0.0, expected a number above 0",
    "plan --ranks x": "ranks='x', expected a whole number of at least 1, such as 8 or 512",
    "plan --ranks 6 --nodes 4": "ranks=6 on nodes=4, expected as many ranks on each node",
    "plan --parameters many": "such as 7e9, 7b, 350M or 11.7M; or one of resnet50, gpt2, llama-7b",
    "plan --nodes 1.5": "nodes='1.5', expected a whole number of at least 1",
    "plan --optimizer lion": "optimizer='lion', expected one of sgd, momentum, adam",
    "plan --dtype int8": "dtype='int8', expected one of float32, bfloat16, float16",
    "audit nowhere.py": "nowhere.py is not there, expected a script, or a module after -m",
    "audit --updates 0 train.py": "--updates=0, expected a whole number of at least 1; leave it out to run the script",
    "audit --updates -3 train.py": "--updates=-3, expected a whole number of at least 1",
    "check factories:in_no_size": "micro_batch_size=0, expected a whole number of at least 1",
}
AMOUNTS = ("batch-size", "micro-batch-size", "base-batch-size", "parameters", "ranks", "nodes", "layers")
MISTAKES |= {f"plan --{one} {n}": "expected a whole number of at least 1, such as" for one in AMOUNTS for n in (0, -1)}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_print_one_line_and_exit_with_status_2(folder, capsys, words):
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = ended.code
    seen = capsys.readouterr()
    *others, line = seen.err.splitlines()
    assert status == 2 and MISTAKES[words] in line and not seen.out
    assert not others or "parses.py" in words, others  # whose own parser has said more


@pytest.mark.parametrize("command", [[BIN / "distaccum"], [sys.executable, "-m", "distaccum"]], ids=["installed", "-m"])
def test_command_and_module_print_the_version(command):
    done = subprocess.run([*command, "--version"], text=True, stdout=subprocess.PIPE)
    assert done.stdout == f"distaccum {__version__}\n"


def test_check_prints_one_report_of_two_ranks(folder, programs):
    words = ("distaccum", "check", "factories:on_ranks")
    done = programs.run(*words, ranks=2, status=0, PYTHONPATH=str(folder))
    assert done.of_all.count("in 3 + 3 micro-batches, one batch of 12: equi") == 1
