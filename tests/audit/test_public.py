"""Mistakes that were reported in public, each as an ordinary script: named with its number and its line.

Those of transformers#34191 and #34242, pytorch-lightning#19987, tt-metal#17568, h2o-llmstudio#663, LoongForge#163,
nanochat#618 and FunASR#3472, a dropped tail and a schedule per rank are among the mutations of test_audit.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.audit.test_audit import LOOPS, audited  # noqa: F401  # a fixture


class Bug(NamedTuple):
    script: str
    ranks: int
    kind: str
    says: str  # a part of the finding
    mark: str = "# wrong"  # at the line that it names


FOUR = "divide what their tokens divide already: the gradient is 0.25 times"
BUGS = [
    Bug("verl_5625", 1, "weights", "tokens of different micro-batches weigh 0.0"),
    Bug("areal_1273", 1, "divisor", FOUR),
    Bug("accelerate_1299", 1, "cleared", "clears 24 backwards before any step"),
    Bug("automodel_3359", 1, "window", "2 micro-batches, and weighs 0.5 of the others"),
    Bug("open_clip_761", 1, "shared", "logit_scale gets the same gradient from each of 4 backwards"),
    Bug("context_ranks prime_rl_2562", 2, "divisor", "the 2 ranks divide twice: the gradient is 0.5 times"),
    Bug("context_ranks megatron_lm_673", 2, "divisor", "added up, not averaged: the gradient is 2 times"),
    Bug("pipelines torchtitan_2972", 2, "divisor", "nothing divides this sum: updates weigh"),
    Bug("pipelines torchtitan_1733", 2, "uneven", "(their weights: 0.25, 0.25, 0.25, 0.25, 1, 1, 1, 1)", "# uneven"),
    Bug("pipelines deepspeed_7773", 2, "divisor", "nothing divides by the 4 micro-batches: the gradient is 4 times"),
    Bug("ms_swift_10117", 1, "divisor", FOUR),
    Bug("ms_swift_10165", 2, "weights", "elements of different micro-batches weigh 0.0"),
    Bug("fast_llm_550", 1, "lost", "3 of 4 backwards are lost in update 0 on rank 0 (their weights: 0, 0, 0, 1)"),
    Bug("megatron_lm_6660", 1, "uneven", "(their weights: 1, 0.5, 0.25, 0.125)"),
    Bug("openwakeword_316", 1, "unused", "no backward follows 15 losses, which count as micro-batches"),
    Bug("cosmos_framework_162", 2, "note", "shards are reduced 4 times per update"),
    Bug("padded_sampler", 2, "note", "DistributedSampler repeats 1 of 61 samples"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda one: one.script)
def test_public_mistake_is_named_with_its_number_and_line(audited, bug):  # noqa: F811
    name = bug.script.split()[0]
    text = (LOOPS.parent / "bugs" / f"{name}.py").read_text()
    done, found = audited(bug.script, text, bug.ranks)
    lines = [f"{name}.py:{i}" for i, line in enumerate(text.splitlines(), start=1) if bug.mark in line]
    if bug.kind == "note":  # what may be meant
        assert done.status == 0 and found["findings"] == [], done.text
        assert any(f"{line}: {bug.says}" in note for line in lines for note in found["notes"]), done.text
    else:
        named = [one for one in found["findings"] if one["kind"] == bug.kind and bug.says in one["text"]]
        assert done.status == 1 and any(one["where"].endswith(line) for one in named for line in lines), done.text
