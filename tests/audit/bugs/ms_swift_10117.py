"""ms-swift#10117: a policy's loss over the tokens of the window is divided by the accumulation steps too."""

import torch
from data import language_model, texts
from torch.nn import functional

steps, model = 4, language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
completions = list(texts(32))
for first in range(0, len(completions), steps):
    window = completions[first : first + steps]
    num_items = sum(int((labels != -100).sum()) for _, labels in window)
    for rows, labels in window:
        mask = labels != -100
        rewards = torch.where(rows[:, 0] % 2 == 0, 1.0, -1.0)  # right or wrong
        log_probs = -functional.cross_entropy(  # wrong
            model(rows).transpose(1, 2), labels.clamp(min=0), reduction="none"
        )
        ratio = torch.exp(log_probs - log_probs.detach())
        per_token_loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)) * rewards[:, None]
        loss = (per_token_loss * mask).sum() / num_items
        (loss / steps).backward()  # as the trainer does for every loss
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
