"""`distaccum audit` on whole scripts: right ones, and each with one mistake put in.

Thirty of the mistakes were reported in public; beside those that say so, transformers#34191 and #34242,
pytorch-lightning#19987, tt-metal#17568, h2o-llmstudio#663, LoongForge#163, nanochat#618 and FunASR#3472.
"""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
import warnings
import weakref
from contextlib import ExitStack
from functools import partial, wraps
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import distaccum
from distaccum import Accumulator
from distaccum.auditing import watch
from tests.support.counting import Counting
from tests.support.programs import wait_for

LOOPS = Path(__file__).parent / "loops"
STYLES = "divides at the step, times its tokens, masks, scales gradients, nll"
LOSSES = "weighted, distilled, of_pairs, focal, mixed, of_one, rooted, in_boxes"
UNUSUAL = "perturbs attacks projects searches plays alternates hides evens unrolls carries schedules skips"
RIGHT = {  # scripts, some with an argument, and their ranks
    **dict.fromkeys(("plain_tokens", "plain_samples", "gan", "scaled", "parts", "compiled", "windows plain"), 1),
    **dict.fromkeys((f"styles {style}" for style in STYLES.split(", ")), 1),
    **dict.fromkeys((f"losses {kind}" for kind in LOSSES.split(", ")), 1),
    **dict.fromkeys((f"unusual {who}" for who in UNUSUAL.split()), 1),
    **dict.fromkeys(("windows plain", "trained lightning", "trained transformers"), 1),
    **dict.fromkeys((f"trained {who}" for who in ("accelerate", "fabric", "zero1", "zero2", "zero3")), 2),
    **dict.fromkeys(("ddp_tokens", "ddp_samples", "ddp_samples compresses", "ddp_samples averages", "ddp_by_hand"), 2),
    **dict.fromkeys(("ddp_by_hand alone", "textbook", "fsdp2_tokens", "fsdp2_tokens hybrid", "accelerated"), 2),
    **dict.fromkeys(("windows ddp", "windows fsdp"), 2),
    "two_models": 4,
}
WRONG = {"context_ranks": 2, "pipelines": 2, "openwakeword_316": 1}  # without a right one
PARTLY = (  # nothing is wrong, and not everything was judged
    # An engine keeps gradients; transformers counts the first token of a row, which nothing predicts; ranks step alone.
    *("trained zero1", "trained zero2", "trained zero3", "trained transformers"),
    *("ddp_by_hand alone", "ddp_samples averages"),
    # Losses, and gradients, that are not torch's alone
    *("losses rooted", "losses in_boxes", "unusual projects", "unusual plays", "unusual unrolls"),
    "unusual hides",
)


class Mutation(NamedTuple):
    name: str
    script: str
    kind: str
    says: str  # a part of the finding
    changes: list[tuple[str, str]]
    at: str  # a part of the line that is named


def mutation(text: str) -> Mutation:
    """Reads a head, pairs of what goes ("- ") and what comes ("+ "), and ("@ ") what the line has that is named."""
    head, *lines = text.split("\n")
    blocks = [
        (mark, "\n".join(line[2:] for line in every)) for mark, every in groupby(lines, key=lambda line: line[:1])
    ]
    changes = [(old, new) for (mark, old), (_, new) in pairwise(blocks) if mark == "-"]
    at = [block for mark, block in blocks if mark == "@"] or changes[0][1].strip().split("\n")
    return Mutation(*head.split(" | "), changes, at[0])


MUTATIONS = [mutation(one) for one in (LOOPS.parent / "mutations.txt").read_text().rstrip().split("\n\n")]


OWN_PROCESSES = ("accelerated", "trained", "compiled")  # whose libraries keep state, or start ranks


def audit_here(path, text, arguments):
    """The report of a script in this process, which has its group already where it is one of several ranks."""
    given = [str(path), *arguments]
    with ExitStack() as stack, distaccum.audit() as report:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        for owner, name, new in ((sys, "argv", given), (sys, "path", [str(LOOPS), *sys.path])):
            stack.enter_context(patch.object(owner, name, new))
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(patch.object(dist, name, lambda *_, **__: None))
        exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
    return report.as_dict() | {"text": str(report)}


@pytest.fixture
def audited(programs, tmp_path, ranks, monkeypatch):
    def run(script: str, text: str, num: int):
        name, *arguments = script.split(" ", 1)
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        monkeypatch.delitem(sys.modules, "data", raising=False)
        if name not in OWN_PROCESSES:
            return (
                ranks(num).run(audit_here, path, text, arguments)[0] if num > 1 else audit_here(path, text, arguments)
            )
        shutil.copy(LOOPS / "data.py", tmp_path)
        result = tmp_path / "result.json"
        command = ("distaccum", "audit", "--json", result, path, *arguments)
        done = programs.run(*command, ranks=num, OMP_NUM_THREADS="1")
        return (json.loads(result.read_text()) if result.exists() else {}) | {"text": done.text, "status": done.status}

    return run


@pytest.mark.parametrize("script", RIGHT)
def test_right_script_has_no_finding(audited, script):
    seen = audited(script, (LOOPS / f"{script.split()[0]}.py").read_text(), RIGHT[script])
    assert seen["findings"] == [] and seen["status"] == (3 if script in PARTLY else 0), seen["text"]
    assert seen["ranks"] == RIGHT[script] and seen["updates"] > 1
    assert not any("failed" in text for text in seen["unjudged"])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_mistake_is_named_with_its_line(audited, mutation):
    script = LOOPS / f"{mutation.script.split()[0]}.py"
    text = script.read_text()
    for old, new in mutation.changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    seen = audited(mutation.script, text, WRONG.get(script.stem) or RIGHT.get(mutation.script, 1))
    lines = [f"{script.stem}.py:{i}" for i, line in enumerate(text.splitlines(), start=1) if mutation.at in line]
    if mutation.kind in ("note", "unjudged"):  # what may be meant
        assert seen["status"] in (0, 3) and seen["findings"] == [], seen["text"]
        texts = seen["notes" if mutation.kind == "note" else "unjudged"]
        assert any(line in text and mutation.says in text for line in lines for text in texts), seen["text"]
        return
    assert seen["status"] == 1, seen["text"]
    kinds = [one for one in seen["findings"] if one["kind"] == mutation.kind]
    named = [one for one in kinds if mutation.says in one["text"]]
    assert named, seen["text"]
    assert any(one["where"].endswith(tuple(lines)) for one in named), (lines, seen["text"])


TRUTHS = [block.split("\n", 1) for block in (LOOPS.parent / "truths.txt").read_text().split("### ")[1:]]
BEGIN = """import random, torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0); random.seed(0)
"""


@pytest.mark.parametrize(("head", "text"), TRUTHS, ids=[head for head, _ in TRUTHS])
def test_verdict_agrees_with_a_truth_that_was_known_before(audited, head, text):
    """`head` has the truth, the script, its ranks, the status, and a part of the report."""
    truth, _, ranks, status, says = head.split(" | ")
    seen = audited("truth", BEGIN + text, int(ranks))
    assert seen["status"] == int(status) and says in " ".join(seen["text"].split()), seen["text"]
    assert seen["status"] in ((0, 3) if truth == "right" else (1, 3))


SEEN = """
import sys, torch
from data import language_model, texts
from torch.nn.functional import cross_entropy
class Given:
    rate: float
model = language_model()
adam = torch.optim.Adam(model.parameters())
print(__name__, sys.argv[1:], sys.path[0] == __file__.rpartition("/")[0], Given.__annotations__["rate"](3), flush=True)
for rows, labels in texts(12):
    cross_entropy(model(rows).flatten(0, 1), labels.flatten()).backward()
    adam.step()
    adam.zero_grad()
torch.save([list(model.state_dict().values()), torch.get_rng_state()], "weights.pt")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path):
    shutil.copy(LOOPS / "data.py", tmp_path)
    (tmp_path / "train.py").write_text(SEEN)
    return tmp_path / "train.py"


def test_script_runs_as_itself_with_the_same_weights_until_its_updates_are_made(programs, script):
    alone = programs.start(str(script), "3", cwd=script.parent).wait()
    weights, numbers = torch.load(script.parent / "weights.pt")
    audited = programs.start("distaccum", "audit", script, "3", cwd=script.parent, own_stderr=True).wait()
    assert alone.status == audited.status == 3 and audited.text == alone.text == "__main__ ['3'] True 3.0\n"
    again, drawn = torch.load(script.parent / "weights.pt")
    assert all(map(torch.equal, weights, again)) and torch.equal(numbers, drawn)
    assert audited.errors.startswith("audit: right in 6 updates")
    ended = programs.start("distaccum", "audit", "--updates", "2", script, "3", cwd=script.parent).wait()
    assert ended.status == 0 and "right in 2 updates" in ended.text


@pytest.mark.parametrize("name", [name for name, num in RIGHT.items() if num == 2 and " " not in name])
def test_audit_sends_nothing_and_changes_no_weight(programs, tmp_path, name):
    """Collectives and weights of the same script, with and without."""
    shutil.copy(LOOPS / "data.py", tmp_path)
    text = (LOOPS / f"{name}.py").read_text().replace("dist.destroy_process_group()\n", "")
    begin = "from tests.support.counting import Counting\ncounting = Counting()\ncounting.__enter__()\n"
    end = "counting.__exit__(None, None, None)\nprint(counting.collectives, [p.sum() for p in model.parameters()])\n"
    counted = begin + text + end
    (tmp_path / f"{name}.py").write_text(counted)
    root = str(LOOPS.parents[2])
    alone = programs.run(str(tmp_path / f"{name}.py"), ranks=2, PYTHONPATH=root)
    audited = programs.run("distaccum", "audit", tmp_path / f"{name}.py", ranks=2, PYTHONPATH=root)
    assert alone.status == audited.status == 0, audited.text
    assert alone.text in audited.text and "allreduce" in alone.text


def test_audit_runs_under_accelerate_launch(programs, tmp_path):
    """Two launchers, as a scheduler of a cluster starts them: on CPUs alone, Accelerate starts one process."""
    shutil.copy(LOOPS / "data.py", tmp_path)
    text = (LOOPS / "accelerated.py").read_text().replace("loss * steps * ", "loss * ")
    (tmp_path / "train.py").write_text(text + "import sys\nprint(sys.argv, sys.path[0])\n")
    code = "import sys\nfrom accelerate.commands.accelerate_cli import main\nsys.argv[0] = 'accelerate'\nmain()"
    words = ["launch", "--cpu", "-m", "distaccum", "audit", "--json", tmp_path / "found.json", tmp_path / "train.py"]
    started = programs.start_ranks(2, "-c", code, *words, "--lr", "0.1", PYTHONPATH=str(LOOPS.parents[2]))
    done = wait_for(started, seconds=180)[0]
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.status == 1 and f"['{tmp_path / 'train.py'}', '--lr', '0.1'] {tmp_path}\n" in done.text
    assert found["ranks"] == 2 and [one["kind"] for one in found["findings"]] == ["divisor"]


def test_script_that_fails_and_one_that_trains_nothing_have_status_2(programs, tmp_path):
    (tmp_path / "fails.py").write_text("raise KeyError('mine')\n")
    (tmp_path / "nothing.py").write_text("print('hello')\n")
    failed = programs.run("distaccum", "audit", tmp_path / "fails.py")
    text = " ".join(failed.text.split())
    assert failed.status == 2 and "the audited code raised KeyError: 'mine'" in text and "watch.py" not in text
    unwritable = programs.run("distaccum", "audit", "--json", tmp_path / "no" / "x.json", tmp_path / "fails.py")
    assert unwritable.status == 2 and "cannot be written" in unwritable.text
    nothing = programs.run("distaccum", "audit", tmp_path / "nothing.py")
    assert nothing.status == 2 and "nothing could be judged" in nothing.text
    assert programs.run("distaccum", "audit", tmp_path / "missing.py").status == 2


def test_micro_step_reads_nothing_on_the_host():
    model = nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with distaccum.audit(model) as report, Counting() as counting:
        for size in (2, 3):
            loss = cross_entropy(model(torch.randn(size, 4)), torch.arange(size))
            (loss / 2).backward()
        assert not counting.host_reads
        sgd.step()
    assert [one.kind for one in report.findings] == ["weights"] and report.ranks == 1
    with pytest.raises(AssertionError, match=r"targets of different micro-batches weigh 0.167\s+to 0.25 \(1.5 to 1\)"):
        report.assert_right()


def test_window_of_an_accumulator_that_is_older_than_the_audit_is_heard():
    model = nn.Linear(4, 3)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with distaccum.audit(model) as report:
        for window in accumulator.windows([torch.ones(size, 4) for size in (2, 3, 2, 3)]):
            for x in window:
                window.backward(cross_entropy(model(x), torch.arange(len(x))))
            window.discard() if window.index else window.step()
    report.assert_right()
    assert report.facts[-1].startswith("receipts in updates 0 to 0, of 0 to 0")


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_window_in_which_a_run_is_stopped_is_no_tail(error):
    model = nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error), distaccum.audit(model) as report:
        for update in range(2):
            cross_entropy(model(torch.ones(2, 4)), torch.arange(2)).backward()
            if update:
                raise error
            sgd.step()
            sgd.zero_grad()
    assert report.updates == 1 and not report.findings


def test_long_run_takes_receipts_ever_more_rarely(monkeypatch):
    monkeypatch.setattr(watch, "OFTEN", 32)
    monkeypatch.setattr(watch, "KEPT", 20)
    report = loop(lambda model, *_: mean(model).backward(), [1] * 200)
    assert report.facts[-1].startswith("receipts in updates 0 to 16, then 32, 64, 128, of 0 to 199"), report


def test_older_optimizers_with_windows_of_different_length_are_told_apart():
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    often, rarely = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other))
    x, y = torch.randn(2, 4), torch.arange(2)
    with distaccum.audit() as report:
        for i in range(24):
            (cross_entropy(one(x), y) / 2).backward()
            if i % 2:
                often.step()
                often.zero_grad()
            (cross_entropy(other(x), y) / 6).backward()
            if i % 6 == 5:
                rarely.step()
                rarely.zero_grad()
    report.assert_right()


def test_no_model_is_kept_whose_optimizer_is_gone():
    kept = []
    with distaccum.audit() as report:
        for _ in range(3):
            model = nn.Linear(4, 3)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            cross_entropy(model(torch.randn(2, 4)), torch.randint(3, (2,))).backward()
            sgd.step()
            kept.append(weakref.ref(model.weight))
            del model, sgd
            gc.collect()
    assert [one() is None for one in kept[:-1]] == [True, True] and report.updates == 3
    report.assert_right()


def trained(loss_of):
    """The report of an update of micro-batches of 2 and 3 samples."""

    def backward(model, i, _):
        loss_of(model(torch.ones(2 + i, 8)), torch.arange(2 + i)).backward()

    return loop(backward, [2])


def test_criterion_is_heard_where_a_script_held_it_before():
    held = partial(cross_entropy, label_smoothing=0.1)
    assert [fault.kind for fault in trained(lambda scores, y: held(scores, y) / 2).findings] == ["weights"]


@pytest.mark.parametrize("updates", [0, -2, True, "3"])
def test_updates_that_are_no_number_are_refused_before_the_block(updates):
    with pytest.raises((TypeError, ValueError), match=f"^updates={updates!r}, expected a whole number of at least 1; "):
        distaccum.audit(updates=updates)


def test_criterion_of_another_library_is_not_seen_and_the_verdict_says_so(monkeypatch):
    heard, others = cross_entropy, partial(cross_entropy)
    another = wraps(heard)(lambda scores, y: others(scores, y) + 0)
    for one in (others, another):
        monkeypatch.setattr(nn.functional, "cross_entropy", one)
        report = trained(lambda scores, y: nn.functional.cross_entropy(scores, y) / 2)
        assert nn.functional.cross_entropy is one and report.status == 3
        assert "cross_entropy, in whose place another library has put its own" in report.unjudged
        assert str(report).startswith("audit: nothing wrong was seen in 1 update, but not everything was judged")
        assert "whose loss is wholly or in part the script's own" in " ".join(str(report).split())


def test_audit_puts_everything_back():
    def state() -> list[object]:
        return [vars(cross_entropy), cross_entropy.__code__, torch.autograd.backward, torch.optim.Optimizer.zero_grad]

    before = state()
    with distaccum.audit():
        assert all(now is not one for now, one in zip(state()[1:], before[1:], strict=True))
    assert state() == before


def loop(backward, lengths, step=torch.optim.AdamW):
    """The report of a training with windows of these lengths; `backward(model, i, length)` does a micro-step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = step(model.parameters(), lr=0.1)
    with distaccum.audit(model) as report:
        for length in lengths:
            for i in range(length):
                backward(model, i, length)
            optimizer.step()
            optimizer.zero_grad()
    return report


def mean(model):
    return cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 3, (4,)))


def own(model):
    return -nn.functional.logsigmoid(model(torch.randn(4, 8)) - model(torch.randn(4, 8))).mean()


def fit_own(losses, steps, *, drawn=True, views=1, optimizer=torch.optim.AdamW):
    """The report of a training on losses of its own: each of `losses` runs a backward, `views` times for a batch."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    adam = optimizer(model.parameters(), lr=0.1)
    epochs = [DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4) for _ in range(2)]
    batches = itertools.chain(*epochs) if drawn else [batch for epoch in epochs for batch in epoch]
    with distaccum.audit(model) as report:
        for i, (x,) in enumerate(batches):
            for _ in range(views):
                for backward in losses:
                    backward(-nn.functional.logsigmoid(model(x) - model(torch.randn(4, 8))))
            if i % steps == steps - 1:
                adam.step()
                adam.zero_grad()
    return report


def divided(by):
    return [lambda losses: (losses.mean() / by).backward()]


UNDIVIDED = [lambda losses: losses.mean().backward()]
TERMS = [  # two losses of a batch, with their mean and that of 4 micro-batches
    lambda losses: (losses.mean() / 8).backward(),
    lambda losses: (losses.square().mean() / 8).backward(),
]
PENALTY = [*UNDIVIDED, lambda losses: (10 * losses.square().mean()).backward()]


@pytest.mark.parametrize(("losses", "steps"), [(divided(4), 4), (UNDIVIDED, 1), (divided(2), 2), (TERMS, 4)])
def test_loss_of_the_scripts_own_is_right_if_it_is_one_mean_in_each_update(losses, steps):
    report = fit_own(losses, steps)
    report.assert_right()
    assert sum("a loss of the script's own" in fact for fact in report.facts) == len(losses)


@pytest.mark.parametrize(
    ("losses", "steps", "options", "times"),
    [
        (UNDIVIDED, 4, {}, 4),
        (divided(4), 2, {}, 0.5),
        (divided(2), 4, {"drawn": False}, 2),
        ([lambda losses: losses.sum().backward()], 4, {}, 48),
        (UNDIVIDED, 1, {"views": 3}, 3),
        (PENALTY, 4, {}, 4),
    ],
)
def test_loss_of_the_scripts_own_that_may_be_meant_is_not_judged(losses, steps, options, times):
    report = fit_own(losses, steps, **options)
    assert report.findings == []
    assert any(f"the gradient is {times} times that of the mean" in text for text in report.unjudged), report
    with pytest.raises(AssertionError, match="not everything was judged"):
        report.assert_right()


@pytest.mark.parametrize("num", [1, 4])
def test_loss_over_pairs_of_micro_batches_is_noted(num):
    """Rows of a batch are each other's negatives, so that windows of one batch alone are right."""

    def backward(model, *_):
        images, texts = model(torch.randn(6, 8)), model(torch.randn(6, 8))
        (cross_entropy(images @ texts.T, torch.arange(6)) / num).backward()

    report = loop(backward, [num] * 4)
    assert report.status == 0 and ["contrast() does" in note for note in report.notes] == [True] * (num > 1)


@pytest.mark.parametrize("loss", [mean, own])
def test_branches_for_the_last_micro_batch_are_one_criterion(loss):
    def branches(divisor):
        def backward(model, i, length):
            if i + 1 < length:
                (loss(model) / (divisor or length)).backward()
            else:
                value = loss(model) / (divisor or length)
                value.backward()

        return backward

    right, wrong = (loop(branches(divisor), [4, 4, 3, 4, 4, 3]) for divisor in (None, 4))
    assert right.findings == [] and right.status == 0
    assert [fault.kind for fault in wrong.findings] == ["window"], wrong
    text = "has 3 micro-batches, and weighs 0.75 of the others, which have 4; so 2 of 6 updates"
    assert text in wrong.findings[0].text


def test_finding_names_the_line_of_the_backward():
    def backward(model, *_):
        loss = mean(model)
        loss = loss / 4
        loss.backward()

    (fault,) = loop(backward, [4, 4, 3]).findings
    assert fault.text.endswith(f"(backward: line {backward.__code__.co_firstlineno + 3})")


def clipped(bound, is_late=False, scaler=None):
    """The report of windows that clip in each micro-step, or after the step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    adam = torch.optim.AdamW(model.parameters())
    with distaccum.audit(model) as report:
        for _ in range(4):
            for _ in range(4):
                (mean(model) / 4).backward()
                if not is_late:
                    if scaler is not None:
                        scaler.unscale_(adam)
                    nn.utils.clip_grad_norm_(model.parameters(), bound)
            adam.step()
            if is_late:
                nn.utils.clip_grad_norm_(model.parameters(), bound)
            adam.zero_grad()
    return report


def test_clipping_is_judged_by_what_it_changes():
    clipped(float("inf")).assert_right()
    clipped(float("inf"), scaler=torch.amp.GradScaler("cpu", enabled=False)).assert_right()
    clipped(100.0).assert_right()
    assert [fault.kind for fault in clipped(0.01).findings] == ["clip"]
    assert [fault.kind for fault in clipped(1.0, is_late=True).findings] == ["late"]


def test_scaler_that_is_older_than_the_audit_hides_no_short_window():
    model = nn.Linear(8, 3)
    adam, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    with distaccum.audit(model) as report:
        for length in (4, 4, 3, 4):
            for _ in range(length):
                scaler.scale(mean(model) / 4).backward()
            scaler.step(adam)
            scaler.update()
            adam.zero_grad()
        for _ in range(2):
            mean(model).backward()  # without it
            adam.step()
            adam.zero_grad()
    assert [fault.kind for fault in report.findings] == ["window"] and "0.75" in report.findings[0].text
