"""Trainers and engines that accumulate by themselves, or as their guides say."""

import logging
import os
import sys
import tempfile

import torch
from data import Pictures, classifier
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

who, steps, num = sys.argv[1], 4, int(os.environ.get("WORLD_SIZE", "1"))
model, data = classifier(), Pictures(64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if who == "fabric":
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=num, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    for i, (x, y) in enumerate(fabric.setup_dataloaders(DataLoader(data, batch_size=4))):
        is_last = (i + 1) % steps == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(cross_entropy(model(x), y) / steps)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
elif who == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
elif who == "lightning":
    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, _):
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, accumulate_grad_batches=steps, **quiet)
    trainer.fit(Task(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
elif who == "transformers":
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def row(i):
        labels = torch.randint(0, 32, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": labels, "labels": torch.where(torch.arange(12) < 3 + i % 9, labels, -100)}

    rows = [row(i) for i in range(28)]
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": steps, "num_train_epochs": 2}
    options |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    options |= {"eval_strategy": "steps", "eval_steps": 3}
    arguments = TrainingArguments(tempfile.mkdtemp(), **options)
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows).train()
else:
    torch.distributed.init_process_group("gloo")
    from tests.support.engines import zero

    config = {"gradient_accumulation_steps": steps, "train_micro_batch_size_per_gpu": 4}
    engine, _ = zero(int(who[-1]), **config)(model, 0.1, 1.0)
    for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)):
        engine.backward(nn.CrossEntropyLoss()(engine(x), y))
        engine.step()
