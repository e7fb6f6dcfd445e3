"""The command `distaccum`.

Torch takes seconds to import, so each subcommand imports what it needs: help, usage errors and `plan` need no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from .. import NO_TORCH, __version__
from ..law import whole_number
from .plan import plan

CHECK = """
examples:
  distaccum check train.py:setup          a third of the batch per micro-batch, unless setup gives a size
  torchrun --nproc-per-node 2 -m distaccum check my_training:setup          setup starts the group and wraps the model

my_training.py:
  def setup():
      model, batch = Net(), next(iter(loader))
      loss_fn = lambda part: criterion(model(part["x"]), part["y"])
      return model, batch, loss_fn   # or a dict of them, with options of the Accumulator such as count=

exit status: 0 equivalent, 1 not equivalent, 2 the check could not run
"""
PLAN = """
examples:
  distaccum plan --parameters 7b --ranks 8 --memory 80GB      does it fit, and how
  distaccum plan --batch-size 1024 --micro-batch-size 32 --ranks 8 --base-batch-size 256 --lr 0.1 --optimizer sgd

exit status: 0 planned, 2 the plan failed
"""
AUDIT = """
examples:
  distaccum audit --updates 20 -m package.train --lr 0.1      a module with its own arguments, up to its 20th update
  torchrun --nproc-per-node 2 -m distaccum audit train.py     on ranks; also under accelerate launch, deepspeed, srun

exit status: 0 right, 1 something is wrong, 2 it could not run or nothing could be judged, 3 nothing wrong was seen but
not everything was judged; the script's own where it is not 0
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(prog="distaccum", description="Gradient accumulation that is exact.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in (_add_plan, _add_check, _add_audit):
        add(commands)
    # The deepspeed launcher adds a word, which is for the program.
    launcher = [word for word in words[:1] if word.startswith("--local_rank=")]
    given = parser.parse_args(words[len(launcher) :], argparse.Namespace(launcher=launcher))
    if given.command is None:
        parser.print_help()
        return 0
    try:
        return int(given.run(given))
    except Exception as error:
        if given.traceback:
            raise
        message = " ".join(str(error).split()) or "no message"
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            message = NO_TORCH
        where = f"distaccum {given.command}: {type(error).__name__}"
        print(f"{where}: {message} (--traceback shows where)", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, epilog: str) -> Any:
    """The parser of a subcommand; an option that is not given is None."""
    raw = argparse.RawDescriptionHelpFormatter
    description = f"{about[0].upper()}{about[1:]}."
    parser = commands.add_parser(name, formatter_class=raw, help=about, description=description, epilog=epilog)
    to_file = {"metavar": "FILE", "help": "write the whole result to it, as JSON"}
    flag = {"action": "store_true", "help": "print the whole result as JSON"}
    parser.add_argument("--json", **(to_file if name == "audit" else flag))
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def _add_check(commands: Any) -> None:
    about = "compare the accumulated gradient of a model with that of the big batch, and explain a difference"
    parser = _command(commands, "check", _check, about, CHECK)
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="a function that returns model, batch and loss_fn")


def _check(given: argparse.Namespace) -> int:
    model, batch, loss_fn, options = _made_by(given.factory)
    import torch.distributed as dist

    from ..accumulator import Accumulator
    from ..batch import Columns

    columns = {name: options.pop(name) for name in ("length", "whole") if name in options}
    if not options.keys() & {"steps", "micro_batch_size"}:
        options["micro_batch_size"] = max(1, Columns(**columns).length_of(batch) // 3)
    accumulator = Accumulator(model, options.pop("optimizer", None), **options)
    report = accumulator.check(batch, loss_fn, **columns)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        # A gloo thread may abort the process at exit, so no group may be alive then.
        del model, batch, loss_fn, options, accumulator
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    if is_first:
        print(json.dumps(dataclasses.asdict(report), indent=2) if given.json else report)
    return 0 if report.equivalent else 1


def _made_by(factory: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Calls the factory; returns model, batch, loss_fn, and the Accumulator's options."""
    module, _, name = factory.rpartition(":")
    if not module or not name:
        script = f"; a whole script is for distaccum audit {factory}" if factory.endswith(".py") else ""
        raise ValueError(f"{factory!r}, expected MODULE:FACTORY, such as my_training:setup or train.py:setup{script}")
    make = getattr(_imported(module, name), name, None)
    if not callable(make):
        raise ValueError(f"{module} has no function {name}")
    # On stdout there is nothing but the report.
    with redirect_stdout(sys.stderr):
        made = make()
    if isinstance(made, tuple) and len(made) == 3:
        made = dict(zip(("model", "batch", "loss_fn"), made, strict=True))
    if not isinstance(made, Mapping) or not made.keys() >= {"model", "batch", "loss_fn"}:
        raise TypeError(f"{factory} gave a {type(made).__name__}, expected model, batch and loss_fn, or a dict of them")
    options = dict(made)
    return options.pop("model"), options.pop("batch"), options.pop("loss_fn"), options


def _imported(module: str, name: str) -> Any:
    """Imports a file, or a module by its name as `python -m` finds it from here."""
    path = Path(module)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ValueError(f"{module} is not there, expected a file that has a function {name}")
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    try:
        return importlib.import_module(path.stem if is_file else module)
    except SystemExit as ended:
        raise ValueError(
            f"{module} ended as it was imported (status {ended.code}), expected one whose import only defines {name}: "
            "put its command line and its training under if __name__ == '__main__'"
        ) from None


def _add_plan(commands: Any) -> None:
    about = "work out what fits, and steps, cut, bytes and learning rate of a run before it starts"
    parser = _command(commands, "plan", _plan, about, PLAN)
    # The options are the function's arguments, in its own words.
    meanings = dict(re.findall(r"^ +(\w+): (.*)$", str(plan.__doc__).replace("`", ""), re.MULTILINE))
    for name in inspect.signature(plan).parameters:
        option = f"--{name.replace('_', '-')}"
        kind = float if name == "lr" else str
        parser.add_argument(option, type=kind, metavar="VALUE", help=meanings.get(name))


def _plan(given: argparse.Namespace) -> int:
    options = {name: getattr(given, name) for name in inspect.signature(plan).parameters}
    forecast = plan(**{name: value for name, value in options.items() if value is not None})
    print(json.dumps(forecast.as_dict(), indent=2) if given.json else forecast)
    return 0


def _add_audit(commands: Any) -> None:
    about = "run a training script unchanged, and say what its gradient accumulation does"
    parser = _command(commands, "audit", _audit, about, AUDIT)
    parser.add_argument("--updates", type=int, metavar="N", help="end the script after N updates of each optimizer")
    parser.add_argument("--folder", metavar="DIR", help="folder that all nodes share, if there are several")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _audit(given: argparse.Namespace) -> int:
    if given.updates is not None:
        whole_number("--updates", given.updates, "; leave it out to run the script to its end")
    from ..auditing.run import run

    return run(given)
