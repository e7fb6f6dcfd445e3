"""The command `distaccum`.

Torch takes seconds to import, so each subcommand imports what it needs: help, usage errors and `plan` need no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from .. import __version__
from ..law import REDUCTIONS, whole_number
from .plan.forecast import MODELS, plan
from .plan.rules import DTYPES, Optimizer

if TYPE_CHECKING:
    from ..cutting import Count


CHECK = """
examples:
  distaccum check my_training:setup                          a third of the batch per micro-batch
  distaccum check train.py:setup --count tokens:labels:shift --reduction mean
  torchrun --nproc-per-node 2 -m distaccum check my_training:setup   (setup wraps the model, and starts the group)

my_training.py:
  def setup():
      model, batch = Net(), next(iter(loader))
      def loss_fn(micro_batch):
          return criterion(model(micro_batch["x"]), micro_batch["y"])
      return model, batch, loss_fn          # or a dict of these and of the Accumulator's options

exit status: 0 equivalent, 1 not equivalent, 2 the check could not run
"""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python complains as it exits
        return 128 + signal.SIGPIPE  # as if the signal had ended the program


def _run(arguments: Sequence[str] | None) -> int:
    parser = _Parser(prog="distaccum", description="Gradient accumulation that is exact.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_plan(commands)
    _add_check(commands)
    _add_audit(commands)
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    launcher = [word for word in words[:1] if word.startswith("--local_rank=")]  # deepspeed adds it, for the program
    given = parser.parse_args(words[len(launcher) :], argparse.Namespace(launcher=launcher))
    if given.command is None:
        parser.print_help()
        return 0
    try:
        status: int = given.run(given)
    except Exception as error:
        if given.traceback or isinstance(error, BrokenPipeError):
            raise
        message = " ".join(str(error).split()) or "no message"
        where = f"distaccum {given.command}: {type(error).__name__}"
        print(f"{where}: {message} (--traceback shows where)", file=sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, epilog: str, **json: Any
) -> Any:
    """The parser of a subcommand, with the common options; `json`: how to declare --json if it is not a flag."""
    raw, description = argparse.RawDescriptionHelpFormatter, f"{about[0].upper()}{about[1:]}."
    parser = commands.add_parser(name, formatter_class=raw, help=about, description=description, epilog=epilog)
    parser.add_argument("--json", **json or {"action": "store_true", "help": "print the whole result as JSON"})
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def _add_check(commands: Any) -> None:
    about = "compare the accumulated gradient of a model with that of the big batch, and explain a difference"
    parser = _command(commands, "check", _check, about, CHECK)
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="a function that returns model, batch and loss_fn")
    parser.add_argument("--micro-batch-size", type=int, metavar="N", help="samples per micro-batch")
    parser.add_argument("--steps", type=int, metavar="N", help="number of micro-batches, instead of their size")
    parser.add_argument("--reduction", choices=REDUCTIONS, help="the reduction of the criterion (default: mean)")
    parser.add_argument("--count", metavar="COUNT", help="samples (the default), tokens:KEY or tokens:KEY:shift")


def _check(given: argparse.Namespace) -> int:
    count = None if given.count is None else _count(given.count)
    model, batch, loss_fn, options = _made_by(given.factory)
    import torch.distributed as dist

    from ..accumulator import Accumulator
    from ..cutting import Columns

    if (given.steps, given.micro_batch_size) != (None, None):  # the command line wins
        options |= {"steps": None, "micro_batch_size": None}
    chosen = {"steps": given.steps, "micro_batch_size": given.micro_batch_size, "reduction": given.reduction}
    options |= {name: value for name, value in {**chosen, "count": count}.items() if value is not None}
    said = {name: options.pop(name) for name in ("length", "whole") if name in options}
    if options.get("steps") is None and options.get("micro_batch_size") is None:
        options["micro_batch_size"] = max(1, Columns(**said).length_of(batch) // 3)
    report = Accumulator(model, options.pop("optimizer", None), **options).check(batch, loss_fn, **said)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():  # a gloo thread may abort the process at exit, so no group may be alive then
        del model, batch, loss_fn, options
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    if is_first:
        print(json.dumps(dataclasses.asdict(report), indent=2) if given.json else report)
    return 0 if report.equivalent else 1


def _made_by(factory: str, *, on_meta: bool = False) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Calls the factory; returns model, batch, loss_fn, and the Accumulator's options."""
    module, _, name = factory.rpartition(":")
    if not module or not name:
        script = f"; a whole script is for distaccum audit {factory}" if factory.endswith(".py") else ""
        raise ValueError(f"{factory!r}, expected MODULE:FACTORY, such as my_training:setup or train.py:setup{script}")
    path = Path(module)  # a file, or a module name found from here, as with `python -m`
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ValueError(f"{module} is not there, expected a file that has a function {name}")
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            found = getattr(importlib.import_module(path.stem if is_file else module), name, None)
    except SystemExit as ended:
        raise ValueError(
            f"{module} ended as it was imported (status {ended.code}), expected one whose import only defines {name}: "
            "put its command line and its training under if __name__ == '__main__'"
        ) from None
    except BaseException:
        print(said.getvalue(), end="", file=sys.stderr)
        raise
    print(said.getvalue(), end="", file=sys.stderr)
    if not callable(found):
        raise ValueError(f"{module} has no function {name}")
    import torch

    with redirect_stdout(sys.stderr), torch.device("meta") if on_meta else nullcontext():  # stdout is for the report
        made = found()
    if isinstance(made, tuple) and len(made) == 3:
        made = dict(zip(("model", "batch", "loss_fn"), made, strict=True))
    if not isinstance(made, Mapping) or not made.keys() >= {"model", "batch", "loss_fn"}:
        raise TypeError(f"{factory} gave a {type(made).__name__}, expected model, batch and loss_fn, or a dict of them")
    options = dict(made)
    return options.pop("model"), options.pop("batch"), options.pop("loss_fn"), options


def _count(text: str) -> Count:
    found = re.fullmatch(r"samples|tokens:([^:]+)(:shift)?", text)
    if found is None:
        raise ValueError(f"--count {text!r}, expected samples, tokens:KEY or tokens:KEY:shift")
    from ..cutting import count_samples, count_tokens

    if text == "samples":
        return count_samples
    return count_tokens(int(found[1]) if found[1].isdigit() else found[1], shift=found[2] is not None)


PLAN = """
examples:
  distaccum plan --parameters 7b --ranks 8 --memory 80GB      does it fit, and how
  distaccum plan --measure my_training:setup --ranks 8 --memory 24GB --batch-size 4096
  distaccum plan --batch-size 1000 --micro-batch-size 32 --ranks 8
  distaccum plan --batch-size 1024 --base-batch-size 256 --lr 0.1 --optimizer sgd

A result whose arguments are missing is left out, and the text names them. --measure takes the function that check takes
(see distaccum check --help), counts its parameters and activations, and tries what fits on this machine; with --meta
the function makes the model and the batch on the meta device, which needs no memory.

exit status: 0 planned, 2 the plan failed
"""


def _add_plan(commands: Any) -> None:
    about = "work out what fits, and steps, cut, bytes and learning rate of a run before it starts"
    parser = _command(commands, "plan", _plan, about, PLAN)
    count = {"metavar": "N"}
    parser.add_argument("--batch-size", **count, help="samples wanted per update, over all ranks")
    parser.add_argument("--micro-batch-size", **count, help="samples that fit in one forward on one rank")
    parser.add_argument("--ranks", type=int, default=1, **count, help="number of data-parallel ranks (1)")
    parser.add_argument("--nodes", type=int, default=1, **count, help="nodes, with equal numbers of ranks (1)")
    parser.add_argument("--parameters", **count, help=f"such as 7b, 350M or 11.7M, or one of {', '.join(MODELS)}")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and gradients (float32)")
    parser.add_argument("--layers", **count, help="number of layers, gathered one by one (the named model's, or 32)")
    parser.add_argument("--memory", metavar="BYTES", help="memory of a device, such as 80GB: says what fits")
    parser.add_argument("--measure", metavar="MODULE:FACTORY", help="count this model instead, and try what fits here")
    parser.add_argument("--meta", action="store_true", help="measure on the meta device")
    parser.add_argument("--base-batch-size", **count, help="the batch size that --lr suits")
    parser.add_argument("--lr", type=float, help="the learning rate for --base-batch-size")
    parser.add_argument("--optimizer", choices=get_args(Optimizer), help="optimizer (adam, with advice on both)")
    parser.add_argument("--reduction", choices=REDUCTIONS, help="the reduction of the criterion (mean)")


def _plan(given: argparse.Namespace) -> int:
    unknown = ("command", "launcher", "run", "json", "traceback", "measure", "meta")
    options = {name: value for name, value in vars(given).items() if name not in unknown}
    if given.meta and given.measure is None:
        raise ValueError("--meta without --measure, expected a model to make on the meta device; give --measure too")
    if given.measure is not None:
        *made, others = _made_by(given.measure, on_meta=given.meta)
        options["model"] = tuple(made)
        for name in ("batch_size", "micro_batch_size", "reduction"):  # the command line wins
            if options[name] is None and isinstance(others.get(name), int | str) and others[name] != "auto":
                options[name] = others[name]
    options["reduction"] = options["reduction"] or "mean"
    forecast = plan(**options)
    print(json.dumps(forecast.as_dict(), indent=2) if given.json else forecast)
    return 0


AUDIT = """
examples:
  distaccum audit train.py --epochs 1                         a script, unchanged, with its own arguments
  distaccum audit --updates 20 -m package.train --lr 0.1      a module, up to its 20th update
  torchrun --nproc-per-node 2 -m distaccum audit train.py     on ranks; also under accelerate launch, deepspeed, srun

exit status: 0 right, 1 something is wrong, 2 it could not run or nothing could be judged, 3 nothing wrong was seen but
not everything was judged; the script's own where it is not 0
"""


def _add_audit(commands: Any) -> None:
    about = "run a training script unchanged, and say what its gradient accumulation does"
    to_file = {"metavar": "FILE", "help": "write the whole result to it, as JSON"}
    parser = _command(commands, "audit", _audit, about, AUDIT, **to_file)
    parser.add_argument("--updates", type=int, metavar="N", help="end the script after N updates of each optimizer")
    parser.add_argument("--plot", metavar="FILE", help="draw the weights of updates (needs matplotlib)")
    parser.add_argument("--folder", metavar="DIR", help="folder that all nodes share, if there are several")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def _audit(given: argparse.Namespace) -> int:
    if given.updates is not None:
        whole_number("--updates", given.updates, "; leave it out to run the script to its end")
    from ..auditing.run import run

    return run(given)
