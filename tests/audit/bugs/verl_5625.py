"""verl#5625: means over tokens are weighted by numbers of samples."""

import torch
from data import Texts, language_model
from torch import nn
from torch.utils.data import DataLoader

model = language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(Texts(24), batch_size=6, shuffle=True)
for _epoch in range(2):
    for rows, labels in loader:
        model.train()
        for micro_rows, micro_labels in zip(rows.split(4), labels.split(4), strict=True):
            logits = model(micro_rows)
            loss = criterion(logits.flatten(0, 1), micro_labels.flatten())  # wrong
            loss = loss * (len(micro_rows) / len(rows))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
