"""A small causal language model over bytes, whose layers can be cut over ranks: by heads, by tokens, or into stages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention


class GPT(nn.Module):
    """The model, or one stage: `tokens` and `places` are None after the first, `norm` and `scores` before the last."""

    def __init__(self, width: int, layers: int, context: int, tokens: int = 256) -> None:
        super().__init__()
        self.tokens: nn.Embedding | None = nn.Embedding(tokens, width)
        self.places: nn.Embedding | None = nn.Embedding(context, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.scores: nn.Linear | None = nn.Linear(width, tokens, bias=False)
        self._part = 0  # which part of each row's tokens this rank has

    def forward(self, entering: Tensor) -> Tensor:
        """Scores of the next token, from tokens; in a later stage, from the previous stage's output."""
        hidden = entering
        if self.tokens is not None and self.places is not None:
            length = entering.shape[1]
            places = torch.arange(self._part * length, (self._part + 1) * length, device=entering.device)
            hidden = self.tokens(entering) + self.places(places)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is not None and self.scores is not None:
            hidden = self.scores(self.norm(hidden))
        return hidden

    def cut_heads(self, mesh: Any) -> None:
        """Tensor parallelism: each rank of `mesh` has some of the heads, and a part of the layers that follow them."""
        from torch.distributed.tensor import parallel

        for layer in self.layers.values():
            plan: dict[str, Any] = {name: parallel.ColwiseParallel() for name in ("query", "key", "value", "widen")}
            plan |= {name: parallel.RowwiseParallel() for name in ("leave", "narrow")}
            parallel.parallelize_module(layer, mesh, plan)

    def cut_rows(self, mesh: Any) -> None:
        """Context parallelism: each rank of `mesh` has one part of the tokens of each row, in order."""
        self._part = mesh.get_local_rank()
        for layer in self.layers.values():
            layer.mesh = mesh

    def cut_layers(self, stage: int, stages: int) -> None:
        """Pipeline: keeps the layers of one stage."""
        names = list(self.layers)
        kept = names[stage * len(names) // stages : (stage + 1) * len(names) // stages]
        for name in set(names) - set(kept):
            del self.layers[name]
        if stage > 0:
            self.tokens = self.places = None
        if stage < stages - 1:
            self.norm = self.scores = None


class Block(nn.Module):
    """Causal attention and two layers on each token, norms first. Query, key and value are apart, to cut by heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = width // num_heads(width)
        self.mesh: Any = None  # of ranks that have the other parts of each row
        self.query, self.key, self.value, self.leave = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.leave(self._attend(self.norm1(hidden)))
        narrowed: Tensor = self.narrow(relu(self.widen(self.norm2(hidden))))
        return hidden + narrowed

    def _attend(self, hidden: Tensor) -> Tensor:
        linears = (self.query, self.key, self.value)
        query, key, value = (one(hidden).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in linears)
        if self.mesh is None:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = whole_rows(torch.stack([key, value]), self.mesh)
            attended = scaled_dot_product_attention(query, key, value, attn_mask=self._mask(query, key))
        return attended.transpose(1, 2).flatten(2)

    def _mask(self, query: Tensor, key: Tensor) -> Tensor:
        """A mask of the tokens of the row that each token of this rank's part sees."""
        part, length = self.mesh.get_local_rank(), query.shape[2]
        own = torch.arange(part * length, (part + 1) * length, device=query.device)
        return own[:, None] >= torch.arange(key.shape[2], device=query.device)


def num_heads(width: int) -> int:
    """The number of heads, of 32 dimensions each if that divides the width."""
    return math.gcd(width, max(1, width // 32))


def whole_rows(parts: Tensor, mesh: Any) -> Tensor:
    """Joins the parts of all ranks along the tokens; in backward each part gets the sum of its gradients."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    cut = DTensor.from_local(parts.contiguous(), mesh, [Shard(parts.dim() - 2)], run_check=False)
    return cut.full_tensor(grad_placements=[Partial()])
