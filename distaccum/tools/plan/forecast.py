"""`plan`: the cut of a batch, its bytes and learning rate, before a run is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any, get_args

from ...law import REDUCTIONS, Reduction, cut_evenly, steps_for, whole_number
from .report import Alike, Cut, Forecast
from .rules import Optimizer, bytes_sent, scaled_learning_rate

AMOUNTS = ("batch_size", "micro_batch_size", "base_batch_size", "parameters")


def plan(
    *,
    batch_size: int | str | None = None,
    micro_batch_size: int | str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    parameters: float | str | None = None,
    dtype_bytes: int | None = None,
    model: tuple[Any, Any, Callable[[Any], Any]] | None = None,
    base_batch_size: int | str | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    reduction: Reduction = "mean",
) -> Forecast:
    """Steps, cut and bytes of a run, and its learning rate, as far as the arguments determine them.

    Whole numbers may be texts such as "512", "7e9" or "350M". What is left out is None in the result, whose `missing`
    says what to give for it.

    Args:
        batch_size: Samples per update over all ranks.
        micro_batch_size: The most samples of one forward on one rank.
        ranks: Data-parallel ranks of the job; a multiple of `nodes`. Ranks that share samples count as one.
        nodes: Machines, with as many ranks on each.
        parameters: Trained parameters of the model.
        dtype_bytes: Bytes of one number of the gradient; 4 by default, or the model's own with `model`.
        model: A model, a batch and a `loss_fn` (micro-batch -> loss): its parameters are counted, and the micro-batch
            that fits on this machine is tried.
        base_batch_size: The batch size that `lr` was chosen for.
        lr: The learning rate at `base_batch_size`.
        optimizer: `"sgd"` or `"adam"`; None gives the rules of both.
        reduction: The criterion's, as the Accumulator's. `"sum"` has scaled SGD's step with the batch already.

    Example:
        >>> forecast = plan(batch_size=1000, micro_batch_size=32, ranks=8)
        >>> forecast.steps, forecast.windows.samples, str(forecast.split)
        (4, 1024, '1,000 samples (8 ranks: 125 = 3 x 31 + 1 x 32)')
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "model"}
    for name, value in given.items():
        if value is not None and name in (*AMOUNTS, "ranks", "nodes", "dtype_bytes"):
            given[name] = amount(name, value)
    if ranks % nodes:
        raise ValueError(f"ranks={ranks} on nodes={nodes}, expected as many ranks on each node")
    if lr is not None and not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr}, expected a number above 0")
    for name, known in {"optimizer": get_args(Optimizer), "reduction": REDUCTIONS}.items():
        if given[name] is not None and given[name] not in known:
            raise ValueError(f"{name}={given[name]!r}, expected one of {', '.join(known)}")
    notes: tuple[str, ...] = ()
    of_model = None  # bytes of its gradient
    if model is not None:
        from .fitting import fit  # imports torch, which takes seconds

        found = fit(*model, micro_batch_size=given["micro_batch_size"])
        notes = (found.summary,)
        given["micro_batch_size"] = found.micro_batch_size  # as asked, or as much of it as fits
        if given["parameters"] is None:
            given["parameters"], of_model = found.parameters, found.gradient_bytes
    batch, micro, base, numbers = (given[name] for name in AMOUNTS)
    gradient_bytes = None if numbers is None else numbers * (dtype_bytes or 4)
    if of_model is not None and dtype_bytes is None:
        gradient_bytes = of_model
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
    if gradient_bytes is not None and ranks > 1:
        rows = tuple(bytes_sent(numbers, gradient_bytes, ranks, nodes, steps))
    if batch is not None and base is not None:
        rate = scaled_learning_rate(batch / base, lr, optimizer, reduction)
    wanted = {  # what to give, and what for
        "--batch-size and --micro-batch-size for the steps and the cut": steps is None,
        "--parameters for the bytes per update": numbers is None,
        "--ranks above 1 for what is sent between them": numbers is not None and ranks == 1,
        "--base-batch-size for the learning rate": base is None,
    }
    missing = tuple(text for text, is_missing in wanted.items() if is_missing)
    return Forecast(given, gradient_bytes, steps, windows, split, rows, rate, notes, missing)


SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def amount(name: str, value: object) -> int:
    """A whole number of at least 1, from a number or a text.

    >>> amount("parameters", "11.7M"), amount("parameters", "7e9"), amount("samples", "1_281_167")
    (11700000, 7000000000, 1281167)
    """
    if isinstance(value, int):
        return whole_number(name, value)
    text = str(value).strip()
    times = SUFFIXES.get(text[-1:].upper(), 1)
    try:
        number = Decimal(text[:-1] if times > 1 else text) * times
        if number >= 1 and number == int(number):
            return int(number)
    except ArithmeticError:  # it is no number
        pass
    raise ValueError(f"{name}={value!r}, expected a whole number of at least 1, such as 512, 7e9, 7b, 350M or 11.7M")
