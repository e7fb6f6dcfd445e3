"""Measures open_clip's train.py, as published and moved, on a small CLIP and random pairs, on the CPU.

    PYTHONPATH=CHECKOUT/src python docs/examples/measure_open_clip.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of the loss on all pairs of the update at once (all
micro-batches of all ranks), in float64. Needs the checkout's `open_clip` on the path, and its dependencies.
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measuring
import torch

BATCH = 8  # pairs in a micro-batch


class Pairs(list[Any]):
    """A loader that knows its length, like open_clip's."""

    num_batches = property(len)
    num_samples = property(lambda self: BATCH * len(self))


def child(spec: dict[str, Any]) -> None:
    import importlib.util

    import torch.distributed as dist
    from open_clip.loss import ClipLoss, SigLipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    from open_clip.task.clip_task import CLIPTask
    from open_clip.task.siglip_task import SigLIPTask

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    rank, ranks, steps, is_siglip = spec["rank"], spec["ranks"], spec["steps"], spec["loss"] == "SigLIP"
    if ranks > 1:
        dist.init_process_group("gloo")
    found = importlib.util.spec_from_file_location("trained", f"{spec['folder']}/train.py")
    assert found is not None and found.loader is not None
    train = importlib.util.module_from_spec(found)
    sys.modules["trained"] = train
    found.loader.exec_module(train)

    vision = CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=2)
    scale, bias = spec["scale"], -10.0 if is_siglip else None
    model = CLIP(16, vision, text, init_logit_scale=math.log(scale), init_logit_bias=bias, output_dict=True).double()
    loss_of_all = SigLipLoss() if is_siglip else ClipLoss()
    shared = {"rank": rank, "world_size": ranks}
    task = SigLIPTask(model, **shared) if is_siglip else CLIPTask(
        model, local_loss=spec["local"], gather_with_grad=spec["local"], **shared
    )  # fmt: skip
    if ranks > 1:
        task.prepare_distributed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    everything = [
        {
            "image": torch.randn(BATCH, 3, 16, 16, generator=generator),
            "text": torch.randint(1, 64, (BATCH, 8), generator=generator),
        }
        for _ in range(spec["updates"] * steps * ranks)
    ]
    seen: dict[str, Any] = {"errors": [], "towers": [], "scale": [], "bias": []}

    def look(_: Any) -> None:
        update = len(seen["errors"])
        batches = everything[update * steps * ranks : (update + 1) * steps * ranks]
        one = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        reference = copy.deepcopy(model)
        reference.zero_grad()
        loss_of_all(**reference(**one)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        exact = {name: p.grad for name, p in reference.named_parameters()}
        towers = [name for name in exact if not name.startswith("logit_")]
        seen["errors"].append(measuring.relative(gradients.values(), exact.values()))
        seen["towers"].append(measuring.relative([gradients[n] for n in towers], [exact[n] for n in towers]))
        seen["scale"].append((gradients["logit_scale"].item(), exact["logit_scale"].item()))
        if is_siglip:
            seen["bias"].append((gradients["logit_bias"].item(), exact["logit_bias"].item()))

    measuring.before_steps(look)
    mine = Pairs(everything[rank::ranks])
    data = {"train": SimpleNamespace(dataloader=mine, set_epoch=lambda epoch: None)}
    args = SimpleNamespace(
        accum_freq=steps, batch_size=BATCH, device="cpu", distributed=ranks > 1, grad_clip_norm=spec["clip"],
        local_rank=rank, log_every_n_steps=1, precision="fp32", rank=rank, skip_scheduler=True, world_size=ranks,
    )  # fmt: skip
    train.train_one_epoch(train.TrainState(task=task, optimizer=optimizer), data, args)
    seen["temperature"] = model.logit_scale.exp().item()
    torch.save(seen, spec["result"])


def main(folder: Path) -> None:
    rows = []
    for loss, steps, scale, ranks, local in (
        ("CLIP", 4, 1 / 0.07, 1, False),
        ("CLIP", 8, 1 / 0.07, 1, False),
        ("CLIP", 4, 2.0, 1, False),
        ("SigLIP", 4, 10.0, 1, False),
        ("CLIP", 4, 1 / 0.07, 2, False),
        ("CLIP", 4, 1 / 0.07, 2, True),
    ):
        both = {}
        for kind in ("original", "moved"):
            spec = {"folder": str(folder / kind), "loss": loss, "steps": steps, "scale": scale, "local": local}
            results = measuring.run_well({**spec, "updates": 1, "clip": None}, ranks)
            both[kind] = results[0]
        first = both["original"]
        row: list[object] = [f"{loss}, scale {scale:.3g}" + (", `--local-loss`" if local else ""), ranks, steps]
        row += [f"{first['scale'][0][1]:.4f}", *(f"{seen['scale'][0][0]:.4f}" for seen in both.values())]
        row += [measuring.number(seen["towers"][0]) for seen in both.values()]
        row += [measuring.number(seen["errors"][0]) for seen in both.values()]
        rows.append(row)
        if loss == "SigLIP":
            biases = [f"{seen['bias'][0][0]:.4f}" for seen in both.values()]
            row = ["the same, of `logit_bias`", ranks, steps, f"{first['bias'][0][1]:.4f}", *biases, "", "", "", ""]
            rows.append(row)
    header = ["loss", "ranks", "`--accum-freq`", "temperature's gradient: exact", "original", "moved"]
    measuring.table([*header, "towers: original", "moved", "all: original", "moved"], rows)
    rows = []
    for clip in (None, 1.0):
        row = ["none" if clip is None else f"{clip:g}"]
        for kind in ("original", "moved"):
            spec = {"folder": str(folder / kind), "loss": "CLIP", "steps": 4, "scale": 1 / 0.07, "local": False}
            (result,) = measuring.run_well({**spec, "updates": 50, "clip": clip})
            row.append(f"{result['temperature']:.4f}")
        rows.append(row)
    print()
    measuring.table(["`--grad-clip-norm`", "scale after 50 updates of AdamW: original", "moved"], rows)
    measuring.versions("open_clip")


if __name__ == "__main__":
    measuring.start("open_clip", __doc__, main, child)
