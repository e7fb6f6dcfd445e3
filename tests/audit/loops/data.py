"""Texts of different lengths, pictures of equal number, and small models."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self, num, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 12, (num,), generator=generator).tolist()
        self.rows = [torch.randint(0, 12, (12,), generator=generator) for _ in lengths]
        self.labels = [
            row.clone().index_fill(0, torch.arange(n, 12), -100) for row, n in zip(self.rows, lengths, strict=True)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.labels[index]


class Pictures(Texts):
    def __getitem__(self, index):
        return self.rows[index].float() / 12, self.rows[index][0] % 4


def texts(num, seed=0, batch_size=2):
    return DataLoader(Texts(num, seed), batch_size=batch_size)


def language_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))


def classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
