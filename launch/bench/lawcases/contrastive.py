"""Helpers for a loss over all pairs: sentence-transformers' cached loss, and open_clip's `--accum-freq`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .library import Library
from .task import Outcome, Seen, Task

SENTENCES = Library("sentence-transformers", ("sentence_transformers",))
OPEN_CLIP = Library("open_clip", ("open_clip", "open_clip_train"))


class Encoder(nn.Module):
    """Both towers, as that library calls its models: features in, an embedding added to them."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "query" in features:
            embedding = self.net.queries(features["query"])
        else:
            embedding = self.net.documents(features["document"])
        return {**features, "sentence_embedding": embedding}


@SENTENCES.cell("pairs")
def cached(task: Task) -> Outcome:
    from sentence_transformers import SentenceTransformer, losses

    sentences = SentenceTransformer(modules=[Encoder(task.net)], device="cpu")
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    loss_fn = losses.CachedMultipleNegativesRankingLoss(sentences, mini_batch_size=4, gather_across_devices=True)
    loss_fn.model = DistributedDataParallel(sentences, find_unused_parameters=True)  # as its trainer does
    queries, documents = (torch.cat([batch[name] for batch in task.mine]) for name in ("x", "y"))
    loss_fn([{"query": queries}, {"document": documents}], None).backward()
    optimizer.step()
    return Outcome(seen.weights)


SENTENCES.absent |= {"clip"}  # its scale is a number


class Images(nn.Module):
    """As open_clip calls its models."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    @property
    def logit_scale(self) -> torch.Tensor:
        return self.net.logit_scale

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.net({"x": images, "y": texts})
        return dict(zip(("image_features", "text_features", "logit_scale"), features, strict=True))


class Pairs(list[Any]):
    """A loader, as open_clip's knows its length."""

    num_batches = property(len)
    num_samples = property(lambda self: sum(len(images) for images, _ in self))


@OPEN_CLIP.cell("clip")
def accum_freq(task: Task) -> Outcome:
    from open_clip import ClipLoss
    from open_clip_train.train import train_one_epoch

    options = {"device": "cpu", "precision": "fp32", "accum_freq": max(task.case.lengths[0]), "log_every_n_steps": 1000}
    options |= {"rank": task.rank, "local_rank": task.rank, "world_size": task.world, "batch_size": 4}
    options |= dict.fromkeys(("distill", "horovod", "wandb", "log_local"), False)
    options |= {"skip_scheduler": True, "grad_clip_norm": None}
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=task.rank, world_size=task.world)
    loader = Pairs((batch["x"], batch["y"]) for batch in task.mine)
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    model = DistributedDataParallel(Images(task.net))
    train_one_epoch(model, data, loss, 0, optimizer, None, None, None, SimpleNamespace(**options))
    return Outcome(seen.weights)


OPEN_CLIP.absent |= {"pairs"}  # its loss goes both ways, and its temperature is learned
