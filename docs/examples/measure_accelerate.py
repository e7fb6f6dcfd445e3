"""Measures Accelerate's gradient_accumulation.py, as published and moved, on a tiny BERT, on the CPU.

    python docs/examples/measure_accelerate.py --from CHECKOUT

The gradient just before `optimizer.step()` is compared with that of one big batch of the same sentences, in float64.
As many random sentences as MRPC has (3,668), and a BERT of two layers without dropout, replace the data set and the
checkpoint, which must be downloaded. The metric is left out. Nothing else changes in the scripts.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import measuring
import torch

SAMPLES, STEPS = 3668, 4
UNEVEN = [
    (
        "Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)",
        "Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, dataloader_config=EVEN)",
    )
]
UNEVEN_ORIGINAL = [
    (
        "gradient_accumulation_steps=gradient_accumulation_steps\n",
        "gradient_accumulation_steps=gradient_accumulation_steps, dataloader_config=EVEN\n",
    )
]
EVEN = "from accelerate import Accelerator, DistributedType"
EVEN = (EVEN, f"{EVEN}, DataLoaderConfiguration\nEVEN = DataLoaderConfiguration(even_batches=False)")


class Sentences:
    """Random sentences of 6 to 20 words, with the methods that the script calls on a data set."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows: dict[str, list[Any]] = {}
        for split, number in (("train", SAMPLES), ("validation", 64)):
            lengths = torch.randint(6, 21, (number,), generator=generator).tolist()
            words = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
            labels = torch.randint(0, 2, (number,), generator=generator).tolist()
            self.rows[split] = [{"input_ids": w, "labels": label} for w, label in zip(words, labels, strict=True)]

    def map(self, *_: Any, **__: Any) -> Sentences:
        return self

    def rename_column(self, *_: Any) -> Sentences:
        return self

    def __getitem__(self, split: str) -> list[Any]:
        return self.rows[split]


class Tokenizer:
    """Pads like a tokenizer."""

    def pad(self, rows: list[Any], **_: Any) -> Any:
        from transformers import BatchEncoding

        ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        labels = torch.tensor([row["labels"] for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})


class Metric:
    def add_batch(self, **_: Any) -> None:
        pass

    def compute(self) -> str:
        return "no metric"


def child(spec: dict[str, Any]) -> None:
    import accelerate  # noqa: F401  # must come before the stand-ins
    import torch.distributed as dist
    import transformers
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name, contents in {
        "datasets": {"load_dataset": lambda *_: Sentences()},
        "evaluate": {"load": lambda *_: Metric()},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(sys.modules[name]).update(contents)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    kind = transformers.BertForSequenceClassification
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: Tokenizer()
    transformers.AutoModelForSequenceClassification.from_pretrained = lambda *_, **__: kind(config)

    seen: dict[str, Any] = {"errors": [], "rates": [], "sizes": []}
    samples: list[Any] = []
    models: list[Any] = []
    last: list[bool] = []
    forward, ddp = kind.forward, torch.nn.parallel.DistributedDataParallel

    def recorded(self: Any, **batch: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            samples.append((batch["input_ids"].clone(), batch["labels"].clone()))
            models[:] = [self]
        return forward(self, **batch)

    class Counting(ddp):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(
                None, lambda _, bucket: (last.append(bucket.is_last()), allreduce_hook(None, bucket))[1]
            )

    def look(optimizer: Any) -> None:
        of_all = [list(samples)]
        if dist.is_initialized():
            of_all = [None] * dist.get_world_size()  # type: ignore[list-item]
            dist.all_gather_object(of_all, samples)
        rows = [row for rank in of_all for ids, _ in rank for row in ids]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.cat([part for rank in of_all for _, part in rank])
        reference = kind(config)
        reference.load_state_dict(models[0].state_dict())
        forward(reference, input_ids=ids, attention_mask=(ids > 0).long(), labels=labels).loss.backward()
        found, exact = ([p.grad for p in network.parameters()] for network in (models[0], reference))
        seen["errors"].append(measuring.relative(found, exact))
        seen["rates"].append(optimizer.param_groups[0]["lr"])
        seen["sizes"].append(len(labels))
        samples.clear()

    kind.forward = recorded
    torch.nn.parallel.DistributedDataParallel = Counting
    measuring.before_steps(look)
    measuring.script(spec["folder"], "gradient_accumulation.py", ["--cpu", "--gradient_accumulation_steps", str(STEPS)])
    seen["reductions"] = sum(last)
    torch.save(seen, spec["result"])


def main(folder: Path) -> None:
    work = folder / "measured"
    measuring.remove(work)
    rows = []
    for ranks, even in ((1, True), (2, True), (2, False)):
        for kind, name in (("original", "as published"), ("moved", "moved")):
            pairs = [] if even else [EVEN, *(UNEVEN if kind == "moved" else UNEVEN_ORIGINAL)]
            place = measuring.copy(folder / kind, work / str(len(rows)), {"gradient_accumulation.py": pairs})
            results = measuring.run_well({"folder": str(place)}, ranks)
            seen = results[0]
            each = len(seen["errors"]) // 3  # epochs
            last = [error for i, error in enumerate(seen["errors"]) if (i + 1) % each == 0]
            rest = [error for i, error in enumerate(seen["errors"]) if (i + 1) % each]
            rows.append(
                [
                    name + ("" if even else ", `even_batches=False`"),
                    ranks,
                    f"{sum(seen['sizes']) // 3:,}",
                    len(seen["errors"]),
                    measuring.number(max(rest)),
                    measuring.number(max(last)),
                    f"{seen['reductions'] / len(seen['errors']):g}" if ranks > 1 else "",
                    seen["rates"].index(max(seen["rates"])),
                    f"{100 * seen['rates'][-1] / 2e-5:.0f}%",
                ]
            )
    header = ["", "processes", "samples per epoch", "updates", "error: all windows but the last of an epoch"]
    header += ["error: the last window", "reductions per update", "updates of warm-up", "rate of the last update"]
    measuring.table(header, rows)
    measuring.versions("accelerate")


if __name__ == "__main__":
    measuring.start("accelerate", __doc__, main, child)
