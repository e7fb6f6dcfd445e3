"""Measures the training loop of llama-cookbook, as published and moved, on a small Llama with LoRA, on the CPU.

    python docs/examples/measure_lora.py --from CHECKOUT

The gradient of the adapters just before `optimizer.step()` is compared with that of one batch of all rows of the
update, in float64. Needs peft and transformers. Imports of train_utils.py from the rest of llama-cookbook that are not
used here are replaced by empty modules. The rows are random: a prompt, whose labels are -100, and a summary, of
lengths drawn from log-normal distributions (medians 40 and 12). Four of five tokens follow from the token before, by a
rule that differs from the one in the rows on which the model was trained before it got its adapters.
"""

from __future__ import annotations

import copy
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import measuring
import torch

VOCABULARY, ROWS, BATCH, CONTEXT = 128, 148, 2, 64
CASES = (("padding", 4), ("padding", 16), ("packing", 4), ("packing", 16))


def rows(seed: int) -> list[list[tuple[int, int]]]:
    """Rows of (token, label)."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(VOCABULARY - 1, generator=generator) + 1
    found = []
    for _ in range(ROWS):
        prompt, summary = (
            max(1, round(median * float(torch.randn((), generator=generator).mul(0.6).exp()))) for median in (40, 12)
        )
        tokens = [int(torch.randint(1, VOCABULARY, (), generator=generator))]
        while len(tokens) < prompt + summary:
            is_known = float(torch.rand((), generator=generator)) < 0.8
            other = int(torch.randint(1, VOCABULARY, (), generator=generator))
            tokens.append(int(following[tokens[-1] - 1]) if is_known else other)
        found.append([(token, -100 if i < prompt else token) for i, token in enumerate(tokens)])
    return found


def pad(batch: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, batch))
    padded = torch.tensor([row + [(0, -100)] * (longest - len(row)) for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
    return {"input_ids": padded[..., 0], "attention_mask": mask, "labels": padded[..., 1]}


def micro_batches(strategy: str, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of --batching_strategy: padded rows of similar length in random order, or packed equal rows."""
    if strategy == "padding":
        ordered = sorted(rows(seed), key=len)
        batches = [pad(ordered[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
        return [batches[i] for i in torch.randperm(len(batches), generator=torch.Generator().manual_seed(1))]
    stream = [pair for row in rows(seed) for pair in row]
    packed = [stream[i : i + CONTEXT] for i in range(0, len(stream) - CONTEXT, CONTEXT)]
    return [pad(packed[i : i + BATCH]) for i in range(0, len(packed) - BATCH + 1, BATCH)]


def child(spec: dict[str, Any]) -> None:
    import accelerate.utils

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)

    @contextmanager
    def trace() -> Any:
        yield SimpleNamespace(print_stats=lambda: None)

    checkpointing = ("save_fsdp_model_checkpoint_full", "save_model_and_optimizer_sharded", "save_optimizer_checkpoint")
    for name, contents in {
        "llama_cookbook": (),
        "llama_cookbook.model_checkpointing": (*checkpointing, "save_peft_checkpoint", "save_model_checkpoint"),
        "llama_cookbook.policies": ("fpSixteen", "bfSixteen", "get_llama_wrapper"),
        "llama_cookbook.utils": (),
        "llama_cookbook.utils.memory_utils": ("MemoryTrace",),
        "llama_cookbook.utils.flop_utils": ("FlopMeasure",),
    }.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(dict.fromkeys(contents, trace))
    if not hasattr(accelerate.utils, "is_ccl_available"):  # newer versions of Accelerate lack it
        accelerate.utils.is_ccl_available = lambda: False
    sys.path[0] = spec["folder"]
    import train_utils

    looks: list[Any] = []
    measuring.before_steps(lambda _: looks[-1]() if looks else None)
    torch.save({"cases": [measure(train_utils.train, looks, *case) for case in CASES]}, spec["result"])


def measure(train: Any, looks: list[Any], strategy: str, steps: int) -> dict[str, Any]:
    """Runs one epoch of the script's loop."""
    import peft
    import transformers

    looks.clear()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).double()
    batches = micro_batches(strategy)
    pretrain = torch.optim.AdamW(base.parameters(), lr=3e-3)  # LoRA starts from a trained model
    for batch in micro_batches("padding", seed=1):
        base(**{**batch, "labels": batch["input_ids"]}).loss.backward()
        pretrain.step()
        pretrain.zero_grad()
    lora = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(base, lora).double()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen: dict[str, Any] = {"errors": [], "by_norm": [], "sizes": [], "tokens": [], "losses": []}

    def look() -> None:
        done = sum(seen["sizes"])
        size = min(steps, len(batches) - done)
        parts = batches[done : done + size]
        whole = pad([row for part in parts for row in unpad(part)])
        reference = copy.deepcopy(model)
        reference.zero_grad()
        loss = reference(**whole).loss
        loss.backward()
        found, exact = (dict(network.named_parameters()) for network in (model, reference))
        gradients = [[by_name[name].grad for name in trained] for by_name in (found, exact)]
        seen["errors"].append(measuring.relative(*gradients))
        norms = [torch.nn.utils.get_total_norm(g).item() for g in gradients]
        seen["by_norm"].append(norms[0] / norms[1])
        seen["sizes"].append(size)
        seen["tokens"] += [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        seen["losses"].append(loss.item())

    looks.append(look)
    settings = {
        "batching_strategy": strategy, "enable_fsdp": False, "flop_counter": False, "gradient_clipping": False,
        "gradient_clipping_threshold": 1.0, "max_train_step": 0, "num_epochs": 1, "run_validation": False,
        "save_metrics": False, "save_model": False, "use_fp16": False, "use_profiler": False,
    }  # fmt: skip
    logged: list[float] = []
    run = SimpleNamespace(log=lambda values: logged.append(float(values["train/loss"])))
    schedule = SimpleNamespace(step=lambda: None)
    done = train(model, batches, None, None, optimizer, schedule, steps, SimpleNamespace(**settings), wandb_run=run)
    seen["reported"] = float(done["avg_train_loss"])
    seen["logged"] = logged[0] / float(seen["losses"][0])
    return seen


def unpad(part: dict[str, torch.Tensor]) -> list[list[tuple[int, int]]]:
    return [
        [pair for pair, keep in zip(zip(tokens, labels, strict=True), mask, strict=True) if keep]
        for tokens, labels, mask in zip(
            part["input_ids"].tolist(), part["labels"].tolist(), part["attention_mask"].tolist(), strict=True
        )
    ]


def main(folder: Path) -> None:
    table, both = [], {}
    for kind in ("original", "moved"):
        (result,) = measuring.run_well({"folder": str(folder / kind)}, timeout=900)
        both[kind] = result["cases"]
    for i, (strategy, steps) in enumerate(CASES):
        for kind in both:
            seen = both[kind][i]
            whole = [error for error, size in zip(seen["errors"], seen["sizes"], strict=True) if size == steps]
            last = seen["sizes"][-1]
            tokens = seen["tokens"]
            table.append(
                [
                    f"{strategy}, {kind}", steps, f"{min(tokens)}, {statistics.median(tokens):g}, {max(tokens)}",
                    *map(measuring.number, (whole[0], statistics.median(whole), max(whole))),
                    f"{measuring.number(seen['errors'][-1])} ({last})" if last < steps else "no tail",
                    f"{seen['logged']:.2f}", f"{seen['reported']:.2f}",
                ]
            )  # fmt: skip
    header = [
        "batches",
        "steps",
        "tokens of a micro-batch: least, median, most",
        "error of the gradient: first update",
        "median",
        "most",
    ]
    measuring.table([*header, "tail (its micro-batches)", "first logged loss / loss", "loss of the epoch"], table)
    measuring.versions("lora")


if __name__ == "__main__":
    measuring.start("lora", __doc__, main, child)
