"""A small causal language model over bytes, whose layers can be cut over ranks by their heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, context: int, tokens: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers.values():
            hidden = layer(hidden)
        scores: Tensor = self.scores(self.norm(hidden))
        return scores

    def cut_heads(self, mesh: Any) -> None:
        """Tensor parallelism: each rank of `mesh` has some of the heads, and a part of the layers that follow them."""
        from torch.distributed.tensor import parallel

        for layer in self.layers.values():
            plan: dict[str, Any] = {name: parallel.ColwiseParallel() for name in ("query", "key", "value", "widen")}
            plan |= {name: parallel.RowwiseParallel() for name in ("leave", "narrow")}
            parallel.parallelize_module(layer, mesh, plan)


class Block(nn.Module):
    """Causal attention and two layers on each token, norms first. Query, key and value are apart, to cut by heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = width // num_heads(width)
        self.query, self.key, self.value, self.leave = (nn.Linear(width, width) for _ in range(4))
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.leave(self._attend(self.norm1(hidden)))
        narrowed: Tensor = self.narrow(relu(self.widen(self.norm2(hidden))))
        return hidden + narrowed

    def _attend(self, hidden: Tensor) -> Tensor:
        linears = (self.query, self.key, self.value)
        query, key, value = (one(hidden).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in linears)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def num_heads(width: int) -> int:
    """The number of heads, of 32 dimensions each if that divides the width."""
    return math.gcd(width, max(1, width // 32))
