"""`plan`: what fits, how a batch is cut, bytes and learning rate, before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, get_args

from ...law import REDUCTIONS, Reduction, cut_evenly, steps_for
from .report import Alike, Cut, Forecast
from .rules import DTYPES, Optimizer, Sizes, policies_of, scaled_learning_rate

AMOUNTS = ("batch_size", "micro_batch_size", "base_batch_size", "parameters", "ranks", "nodes", "layers", "memory")
# Parameters, and equal layers.
MODELS = {"resnet50": (25_557_032, 16), "gpt2": (124_439_808, 12), "llama-7b": (6_738_415_616, 32)}
MODELS |= {"bert-base": (109_482_240, 12), "gpt2-xl": (1_557_611_200, 48), "llama-70b": (68_976_648_192, 80)}


def plan(
    *,
    batch_size: int | str | None = None,
    micro_batch_size: int | str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    parameters: float | str | None = None,
    dtype: str = "float32",
    layers: int | None = None,
    memory: float | str | None = None,
    model: tuple[Any, Any, Callable[[Any], Any]] | None = None,
    base_batch_size: int | str | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    reduction: Reduction = "mean",
) -> Forecast:
    """Works out the steps, cut, bytes and learning rate of a run, as far as the arguments determine them.

    Whole numbers may be strings such as "512", "7e9" or "350M". What cannot be worked out is None in the result, whose
    `missing` names the arguments to give.

    Args:
        batch_size: Samples per update over all ranks.
        micro_batch_size: The most samples in one forward on one rank.
        ranks: Data-parallel ranks of the job; a multiple of `nodes`. Ranks that share samples count as one.
        nodes: Machines, each with equally many ranks.
        parameters: Trained parameters of the model, or its name, such as `"gpt2"` or `"llama-7b"`; not beside `model`.
        dtype: The dtype of parameters and gradients; not beside `model`, which has its own.
        layers: Equal layers of the model, each wrapped by itself under FSDP2; by default the named model's, or 32.
        memory: Bytes of a device, such as `"80GB"`: shows which policies fit, the best first.
        model: A model, a batch and a `loss_fn` (micro-batch -> loss), which are measured on this machine.
        base_batch_size: The batch size that `lr` was chosen for.
        lr: The learning rate at `base_batch_size`.
        optimizer: `"sgd"`, `"momentum"` or `"adam"`; None gives the rules for SGD and Adam, and the bytes of Adam.
        reduction: As for the Accumulator. With `"sum"`, SGD's step already grows with the batch.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "model"}
    of_name = MODELS.get(str(parameters).lower())
    given["parameters"] = parameters if of_name is None else of_name[0]
    for name in AMOUNTS:
        if given[name] is not None or name in ("ranks", "nodes"):
            given[name] = amount(name, given[name])
    ranks, nodes = given["ranks"], given["nodes"]
    if ranks % nodes:
        raise ValueError(f"ranks={ranks} on nodes={nodes}, expected as many ranks on each node")
    if lr is not None and not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr}, expected a number above 0")
    choices = {"optimizer": get_args(Optimizer), "reduction": REDUCTIONS, "dtype": tuple(DTYPES)}
    for name, known in choices.items():
        if given[name] is not None and given[name] not in known:
            raise ValueError(f"{name}={given[name]!r}, expected one of {', '.join(known)}")
    sizes, given["measured"] = None, ""
    if model is not None:
        if parameters is not None or dtype != "float32":
            raise ValueError(f"{parameters=}, {dtype=} beside a model, which has its own; give one or the other")
        from .fitting import fit  # imports torch, which takes seconds

        asked = given["micro_batch_size"]
        sizes, given["micro_batch_size"], given["measured"] = fit(*model, micro_batch_size=asked)
    elif (numbers := given["parameters"]) is not None:
        sizes = Sizes(numbers, DTYPES[dtype] * numbers, DTYPES[dtype] * numbers, of_name[1] if of_name else 32)
    batch, micro, base = (given[name] for name in AMOUNTS[:3])
    steps = windows = split = rate = None
    if batch is not None and micro is not None:
        steps = steps_for(batch, micro, ranks)
        windows = Cut(steps * micro * ranks, (Alike(ranks, steps * micro, ((steps, micro),)),))
        dry = [Alike(ranks - batch, 0, ())] if batch < ranks else []
        alike = Counter(cut_evenly(batch, parts=ranks))
        parts = {size: Counter(cut_evenly(size, largest=micro)) for size in alike}
        cut = (Alike(n, size, tuple((times, one) for one, times in parts[size].items())) for size, n in alike.items())
        split = Cut(batch, (*dry, *cut))
    rows: tuple[dict[str, Any], ...] = ()
    if sizes is not None:
        sizes = sizes._replace(layers=given["layers"] or sizes.layers)
        given |= sizes._asdict() | {"parameters": sizes.numbers}
        rows = tuple(policies_of(sizes, optimizer or "adam", ranks, nodes, steps, given["memory"]))
    if batch is not None and base is not None:
        rate = scaled_learning_rate(batch / base, lr, optimizer, reduction)
    wanted = {  # what to give, and what for
        "--batch-size and --micro-batch-size for the steps and the cut": steps is None,
        "--parameters for the bytes": sizes is None,
        "--memory, such as 80GB, for what fits": given["memory"] is None,
        "--measure MODULE:FACTORY for the activations": sizes is not None and sizes.activations is None,
        "--batch-size and --base-batch-size for the learning rate": rate is None,
    }
    missing = tuple(text for text, is_missing in wanted.items() if is_missing)
    return Forecast(given, steps, windows, split, rows, rate, missing)


SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def amount(name: str, value: object) -> int:
    """A whole number of at least 1, from a number or a string.

    >>> amount("parameters", "11.7M"), amount("parameters", "7e9"), amount("samples", "1_281_167")
    (11700000, 7000000000, 1281167)
    """
    text = str(value).strip().upper()
    least, such = {"memory": (10**6, "80GB"), "parameters": (1, "7e9, 7b, 350M or 11.7M")}.get(name, (1, "8 or 512"))
    text = text.removesuffix("B") if name == "memory" else text  # 80GB: 80 G
    times = SUFFIXES.get(text[-1:], 1)
    try:
        number = Decimal(text[:-1] if times > 1 else text) * times
        if number >= least and number == int(number):
            return int(number)
    except ArithmeticError:  # not a number
        pass
    models = f"; or one of {', '.join(MODELS)}" if name == "parameters" else ""
    raise ValueError(f"{name}={value!r}, expected a whole number of at least {least:,}, such as {such}{models}")
