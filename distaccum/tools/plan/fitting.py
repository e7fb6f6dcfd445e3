"""Tries which micro-batch of a model fits on this machine, and measures what it keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ...cutting import count_samples, cut_batch, tensors_in
from ...law import plural
from ...runs.memory import free, is_out_of_memory
from ...runs.snapshot import kept
from .report import bytes_text
from .rules import Sizes


def fit(
    model: Any, batch: Any, loss_fn: Callable[[Any], Any], micro_batch_size: int | None = None
) -> tuple[Sizes, int, str]:
    """The bytes of a model, the micro-batch that gets through forward and backward here, and a sentence about it.

    A micro-batch that runs out of memory is halved until it fits; none is larger than the batch. Gradients, buffers and
    random state are restored. On the meta device any micro-batch fits, and has the bytes of a real one.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    every = [p for one in models for p in one.parameters()]
    trained = [p for p in every if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient, expected one to train")
    length = count_samples(batch)
    size = asked = length if micro_batch_size is None else micro_batch_size
    if size > length:
        raise ValueError(f"micro_batch_size={size} and the model's batch has {length}; give a batch as long")
    saved: dict[Any, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[key_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with kept(models, trained):
        while True:
            saved.clear()
            try:
                with saved_tensors_hooks(note, lambda tensor: tensor):
                    loss = loss_fn(next(iter(cut_batch(batch, [size], length))) if size < length else batch)
                total: Any = sum(loss.values()) if isinstance(loss, Mapping) else loss
                total.backward()
                break
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
            finally:
                for parameter in trained:
                    parameter.grad = None
            size //= 2
            free()
    others = {*map(key_of, [*every, *(one for _, one in tensors_in(batch))])}
    activations = sum(num_bytes for key, num_bytes in saved.items() if key not in others)
    stacks = [one for model in models for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    layers = max([1, *(sum(any(True for _ in part.parameters()) for part in one) for one in stacks)])
    of_every, of_trained = (sum(p.nbytes for p in some) for some in (every, trained))
    sizes = Sizes(sum(p.numel() for p in trained), of_every, of_trained, layers, activations)
    seen = "halved until it fitted" if size < asked else f"more than {size} was not tried"
    fits = f"a micro-batch of {plural(size, 'sample')} fits on {trained[0].device} (one rank alone; {seen})"
    return sizes, size, f"{fits}; its forward keeps {bytes_text(activations)} for backward"


def key_of(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # tells storages on meta apart
