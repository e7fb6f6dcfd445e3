"""Measures TRL's sft.py, as published and moved, on one process and on two gloo ranks, on the CPU.

    python docs/examples/measure_trl.py --from CHECKOUT

This program makes a tiny Llama in float64 and answers of 2 to 20 words; the script loads both from folders. The
gradient just before `optimizer.step()` is compared with that of one big batch of the samples of all ranks. Needs trl,
datasets and distaccum[transformers].
"""

from __future__ import annotations

import gc
import json
import random
import warnings
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import nn

LENGTHS = (20, 3, 7, 18, 5, 9, 2, 14, 6, 11, 4, 16, 8, 12)
STEPS = 3
OPTIONS = [
    *("--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out", "--use_cpu", "--dtype", "auto"),
    *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", str(STEPS), "--num_train_epochs", "1"),
    *("--train_sampling_strategy", "sequential", "--max_grad_norm", "0", "--bf16", "False", "--optim", "sgd"),
    *("--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "True", "--activation_checkpointing", "False"),
]


def make(folder: Path, num: int) -> None:
    """Makes the model, its tokenizer and the data that the script loads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(60)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).double().save_pretrained(folder / "model")
    random.seed(1)
    rows = [(random.choices(words, k=4), random.choices(words, k=length)) for length in LENGTHS[:num]]
    lines = [json.dumps({"prompt": " ".join(one), "completion": " " + " ".join(other)}) for one, other in rows]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))


def child(spec: dict[str, Any]) -> None:
    """Runs a script, and compares the gradient before each step with one big batch of all ranks' samples."""
    from transformers import Trainer

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"errors": []}

    def look(_: Any) -> None:
        (trainer,) = (one for one in gc.get_objects() if isinstance(one, Trainer))
        update, ranks = len(seen["errors"]), spec["ranks"]
        rows = list(trainer.train_dataset)
        own = [rows[rank::ranks][update * STEPS : (update + 1) * STEPS] for rank in range(ranks)]
        batch = trainer.data_collator([row for part in own for row in part])
        model = trainer.accelerator.unwrap_model(trainer.model)
        reference = type(model)(model.config).double()
        reference.load_state_dict(model.state_dict())
        logits = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
        labels = batch["labels"][:, 1:].flatten()
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels).backward()
        found, exact = ([p.grad for p in one.parameters()] for one in (model, reference))
        seen["errors"].append(measuring.relative(found, exact))

    measuring.before_steps(look)
    measuring.script(spec["folder"], "sft.py", [*OPTIONS, *spec["options"]])
    torch.save(seen, spec["result"])


CASES = {
    "one process, windows of 3, 3, 3, 3, 1": (1, 13, []),
    "two ranks, windows of 3, 3, 1": (2, 14, []),
    "two ranks, the second without data in the last window": (2, 13, ["--accelerator_config", "uneven.json"]),
}


def row(folder: Path, case: str, kind: str) -> list[str]:
    ranks, num, options = CASES[case]
    place = measuring.copy(folder / kind, folder / "measured" / f"{kind}{num}{ranks}", {})
    make(place, num)
    (place / "uneven.json").write_text('{"even_batches": false}')
    spec = {"folder": str(place), "options": options}
    results = measuring.run(spec, ranks, timeout=90)
    if any(one["error"] for one in results):
        return [case, kind, "hangs" if any("no end within" in one["output"] for one in results) else "fails"]
    return [case, kind, ", ".join(map(measuring.number, results[0]["errors"]))]


def main(folder: Path) -> None:
    measuring.remove(folder / "measured")
    kinds = {"original": "as published", "moved": "moved"}
    rows = [row(folder, case, kind) for case in CASES for kind in kinds]
    measuring.table(
        ["", "script", "error of the gradient of each update"],
        [[case, kinds[kind], errors] for case, kind, errors in rows],
    )
    measuring.versions("trl")


if __name__ == "__main__":
    measuring.start("trl", __doc__, main, child)
