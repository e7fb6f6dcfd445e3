"""Seeds: the shares of losses as tensors, with which backwards begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, final

import torch
from torch import Tensor
from torch.amp import GradScaler

from ..engines import Engine
from ..law import Once
from ..norms import HALF
from ..scaling import is_scaled_by, stamp_of_scale

MOST_ROUNDING = 2**-8  # of a share in half precision: bfloat16 stays below it, and float16 where it is not subnormal


@final
class Seeds:
    """Makes the seed of each backward anew: a hook of the loss may write to it, and the scaler's scale moves."""

    def __init__(self, engine: Engine, once: Once, scaler: GradScaler | None, *, scales: bool) -> None:
        """`scaler` multiplies seeds if `scales`; else what runs backward does."""
        self._engine, self._once, self._scaler, self._scales = engine, once, scaler, scales

    def scale_stamp(self, device: torch.device) -> object:
        """Of the scale that all seeds of a window will have, also on a rank that gives none."""
        if self._scaler is None:
            return None
        if stamp_of_scale(self._scaler) is None:
            self._scaler.scale(torch.zeros((), device=device))  # which makes its scale
        return stamp_of_scale(self._scaler)

    def weigh(self, loss: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        """The loss, ready for backward, and its seed: a fill, which nobody waits for."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0):
            refuse_loss(loss)
        if type(loss) is not Tensor and hasattr(loss, "full_tensor"):
            loss = self._engine.whole_loss(loss)
        if loss.dtype is not torch.float32:
            if loss.is_complex():
                refuse_loss(loss)
            if loss.dtype in HALF:
                self._look_at_rounding(loss.dtype, share)
        scaler = self._scaler
        if scaler is not None and is_scaled_by(scaler, loss):
            raise ValueError(
                "backward() got a loss that scaler.scale() has multiplied, and the window scales it too; give it "
                "the loss itself: window.backward(loss)"
            )
        if loss.dtype in HALF:
            loss = loss.float()
        seed = loss.new_full((), share)
        return loss, scaler.scale(seed) if scaler is not None and self._scales else seed

    def _look_at_rounding(self, dtype: torch.dtype, share: float) -> None:
        """A loss in half precision is cast up, and its gradient, the share, comes back in half precision."""
        rounded = torch.tensor(share, dtype=dtype, device="cpu").item()
        if self._scaler is None and abs(rounded - share) > MOST_ROUNDING * share:
            raise ValueError(
                f"backward() got a loss in {dtype}, which rounds its share, {share:.6g}, to {rounded:.6g}, and the "
                "gradient with it; compute it in float32: criterion(outputs.float(), ...)"
            )
        if rounded != share:
            self._once(
                "half",
                f"a loss in {dtype} rounds its share, {share:.6g}, to that dtype in backward (an error of up to 0.2% "
                "in bfloat16); compute it in float32: criterion(outputs.float(), ...)",
            )

    def unscaled(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients that have the scaler's scale, as seeds of a backward whose runner scales them again."""
        if self._scaler is None or self._scales:
            return list(gradients)
        return [one / self._scaler.scale(one.new_ones((), dtype=torch.float32)) for one in gradients]


def refuse_loss(loss: object, who: str = "backward() got") -> NoReturn:
    if not isinstance(loss, Tensor):
        seen, cure = f"{loss!r}, a {type(loss).__name__}", "without .item() or float()"
        if isinstance(loss, Sequence | Mapping):  # whose text would hold all logits
            seen, cure = (
                f"a {type(loss).__name__} of {len(loss)}",
                "which is one of these, as outputs.loss or outputs[0]",
            )
        raise TypeError(f"{who} {seen}, expected the loss as a tensor ({cure})")
    if loss.ndim:
        say = " and say which to the Accumulator: reduction=" if who.startswith("backward") else ""
        raise ValueError(
            f"{who} a loss of shape {list(loss.shape)}, expected a scalar; reduce it with mean() or sum(){say}"
        )
    if loss.is_complex():
        raise TypeError(f"{who} a loss in {loss.dtype}, expected a real number; take .real or .abs()")
    raise ValueError(
        f"{who} a loss without a graph, which depends on no trainable parameter; compute it from the "
        "model's outputs (not from its inputs), outside torch.no_grad and without detach()"
    )
