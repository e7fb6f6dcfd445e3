"""trace=: each rank writes the spans of a window, and `distaccum timeline` aligns the ranks."""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from engines import KINDS, Run
from problems import loss_of, make_batch, trunk
from test_drawing import loader_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.tools.cli import main
from distaccum.tools.timeline.cutting import COLUMNS, cut, typical
from distaccum.tools.timeline.drawing import draw
from distaccum.tools.timeline.reading import read_traces

BATCHES = [make_batch(size, seed=i) for i, size in enumerate([2, 3, 1])]
SLEEP = 0.06
NOISE = 0.01  # microseconds; times are written with three decimals


def make(folder: Any, **options: Any) -> tuple[nn.Module, Accumulator]:
    model: nn.Module = trunk()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    return model, Accumulator(model, SGD(model.parameters(), lr=0.1), trace=folder, **options)


def run(window: Any, model: nn.Module) -> None:
    for batch in window:
        window.backward(loss_of(model, batch))


def spans(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    gc.collect()  # the accumulator writes its last spans when it is deleted
    found = json.loads((folder / f"rank{rank}.json").read_text())
    assert found["otherData"]["rank"] == rank
    return sorted((one for one in found["traceEvents"] if one["ph"] == "X"), key=lambda one: (one["ts"], -one["dur"]))


def named(found: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [one for one in found if one["name"] in names]


def end(one: dict[str, Any]) -> float:
    return one["ts"] + one["dur"]


def assert_nested(found: list[dict[str, Any]]) -> None:
    """Two spans are disjoint or nested; a viewer would draw other spans wrong."""
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert other["ts"] >= end(one) - NOISE or end(other) <= end(one) + NOISE, (one, other)


# Spans


def test_window_shows_plan_forwards_backwards_and_step_in_order(tmp_path):
    model, accumulator = make(tmp_path / "new" / "folder", steps=2)
    for window in accumulator.windows(BATCHES):
        run(window, model)
        window.step()
    del accumulator, window
    found = spans(tmp_path / "new" / "folder")
    assert_nested(found)
    of_first = [one for one in found if one["args"]["update"] == 0]
    both = ["forward", "backward"]
    assert [one["name"] for one in of_first] == ["window", "plan", *both, *both, "step"]
    assert [one["args"].get("samples") for one in named(of_first, *both)] == [2, 2, 3, 3]
    assert [one["args"]["micro_batch"] for one in named(of_first, *both)] == [0, 0, 1, 1]
    assert [one["args"]["outcome"] for one in named(found, "window")] == ["stepped", "stepped"]
    whole, *inside = of_first
    assert sum(one["dur"] for one in inside) <= whole["dur"] + NOISE
    assert all(one["ts"] >= whole["ts"] and end(one) <= end(whole) + NOISE for one in inside)
    assert {one["pid"] for one in found} == {0}


def test_check_and_untraced_training_write_no_spans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, accumulator = make(None, steps=2)
    run(window := accumulator.window(BATCHES), model)
    window.step()
    assert not list(tmp_path.iterdir())
    model, accumulator = make("traces", steps=2)
    accumulator.check(BATCHES[1], lambda batch: loss_of(model, batch))
    del accumulator
    assert spans(tmp_path / "traces") == []


def test_file_is_whole_while_the_job_runs(tmp_path):
    model, accumulator = make(tmp_path)
    for updates in range(3):
        run(window := accumulator.window(BATCHES), model)
        time.sleep(0.03)
        window.step()
        assert len(named(spans(tmp_path), "window")) == updates + 1  # a killed job leaves the same


@pytest.mark.parametrize("how", ["break", "error", "discard", "failing backward"])
def test_discarded_window_is_shown_as_undone(tmp_path, how):
    model, accumulator = make(tmp_path)
    window = accumulator.window(BATCHES)
    with contextlib.suppress(KeyboardInterrupt, RuntimeError):
        for batch in window:
            loss = loss_of(model, batch)
            if how == "failing backward":
                loss.register_hook(lambda _: 1 / 0 if how == "x" else torch.ones(2))
            window.backward(loss)
            if how == "break":
                break
            if how == "error":
                raise KeyboardInterrupt
    window.discard()
    run(window := accumulator.window(BATCHES), model)
    window.step()
    del accumulator, window
    found = spans(tmp_path)
    assert_nested(found)
    undone, done = named(found, "undone window", "window")
    assert undone["args"]["outcome"] == "undone" and done["args"] == {"update": 0, "attempt": 1, "outcome": "stepped"}
    of_first = [one for one in named(found, "forward", "backward") if "attempt" not in one["args"]]
    assert len(of_first) == (6 if how == "discard" else 2)
    assert [one for one in of_first if one["args"].get("unfinished")] == of_first[1:] * (how == "failing backward")


def test_attempt_that_ran_out_of_memory_is_shown_as_undone(tmp_path):
    model, accumulator = make(tmp_path, micro_batch_size=4)
    sizes = []

    def loss_fn(batch):
        sizes.append(len(batch["x"]))
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError
        return loss_of(model, batch)

    accumulator.update(make_batch(4, seed=0), loss_fn)
    del accumulator
    found = spans(tmp_path)
    assert_nested(found)
    assert [one["args"].get("attempt") for one in named(found, "undone window", "window")] == [None, 1]
    assert [one["args"]["samples"] for one in named(found, "backward")] == [2, 2]
    timeline = cut(read_traces(tmp_path), 0, 0)
    assert len(timeline.rows[0].undone) == 1 and timeline.as_dict()["ranks"][0]["percent"]["compute"] > 0


def test_parts_heads_and_losses_over_pairs_have_their_spans(tmp_path):
    model, accumulator = make(tmp_path, micro_batch_size=2)
    window = accumulator.window(BATCHES)
    for batch in window:
        for _ in window.parts([1, 2]):
            window.backward(loss_of(model, batch))
    window.step()
    window = accumulator.window(BATCHES[:1])
    for batch in window:
        for _, outputs in window.heads(model(batch["x"]), [1, 2]):
            window.backward(outputs.square().mean())
    window.step()
    accumulator.contrast(BATCHES[0]["x"][:, 0], model, lambda encoded: (encoded @ encoded.T).square().mean())
    del accumulator, window
    found = spans(tmp_path)
    assert_nested(found)
    places = [(one["args"]["micro_batch"], one["args"].get("part")) for one in named(found, "backward")]
    assert places == [(i, part) for i in range(3) for part in (0, 1)] + [(0, 0), (0, 1), (0, 1), (0, None)]
    assert named(found, "backward")[8]["args"]["trunk"] is True
    assert len(named(found, "forward")) == 6 + 2 + 2
    assert any("over all" in one["args"].get("on", "") for one in named(found, "forward"))


# Ranks


def traced(name: str, sync: str, folder: str | None) -> list[tuple[str, int]]:
    """The collectives of three windows; the last is uneven, so that a rank may need stand-ins."""
    runs = Run(name, sync=sync, trace=folder)
    counting = Counting()
    with counting:
        for index, layout in enumerate([[[2, 1], [1, 2]], [[2, 3], [1, 1]], [[2, 1], [1]]]):
            runs.window(layout, index)
    return counting.take()


def both_ways(cases: list[tuple[str, str]], folder: str) -> list[bool]:
    """For each case, whether the collectives with and without a trace are the same."""
    return [traced(n, s, None) == traced(n, s, str(Path(folder) / f"{n} {s}")) for n, s in cases]


def test_trace_of_every_engine_adds_no_collective(ranks, tmp_path):
    zero = "ZeRO 2", KINDS["ZeRO 2"].policies[0]
    cases = [("DDP", "last"), ("DDP", "every"), ("FSDP2", "last"), ("FSDP1", "last"), zero]
    cases = [case for case in cases if case[0] in KINDS]
    assert ranks(2).run(both_ways, cases, str(tmp_path)) == [[True] * len(cases)] * 2
    for name, sync in cases:
        traces = read_traces(tmp_path / f"{name} {sync}")
        for trace in traces:
            raw = spans(tmp_path / f"{name} {sync}", trace.rank)
            assert_nested(raw)
            assert len(named(raw, "window")) == len(named(raw, "step")) == 3
            assert [one["args"]["update"] for one in named(raw, "plan")] == [0, 1, 2]
            reductions = [one for one in named(raw, "reduction") if "by_hand" not in one["args"]]
            in_first = [one["args"]["micro_batch"] for one in reductions if one["args"]["update"] == 0]
            assert name == "ZeRO 2" or in_first == ([0, 1] if sync == "every" else [1])
            stands_in = [one for one in named(raw, "backward") if one["args"].get("stand_in")]
            assert len(stands_in) == (trace.rank == 1 and name.startswith("FSDP"))
        assert cut(traces, 0, 2).length > 0
        gathers = "parameters are gathered inside of forward" in " ".join(str(cut(traces, 0, 2)).split())
        assert gathers == name.startswith("FSDP")
    draw(cut(read_traces(tmp_path / "FSDP1 last"), 0, 2), tmp_path / "picture.svg")
    assert "parameters are gathered inside of forward" in (tmp_path / "picture.svg").read_text()


def one_sleeps(folder: str, sync: str, where: str) -> None:
    model, accumulator = make(folder, steps=2, sync=sync)

    def batches():
        for i in range(6):
            if where == "draw" and i == 2 and dist.get_rank() == 1:
                time.sleep(SLEEP)
            yield make_batch(2, seed=i)

    for window in accumulator.windows(batches()):
        for i, batch in enumerate(window):
            if where == "forward" and window.index == 1 and i == 1 and dist.get_rank() == 1:
                time.sleep(SLEEP)
            window.backward(loss_of(model, batch))
        if where in ("step", "loss") and window.index == 1 and dist.get_rank() == 1:
            time.sleep(SLEEP)
        update = window.step()
        assert where != "loss" or update.loss > 0  # reading it waits for all ranks


@pytest.mark.parametrize("where", ["step", "loss"])
def test_wait_that_ends_after_the_update_names_the_late_rank(ranks, tmp_path, where):
    ranks(2).run(one_sleeps, str(tmp_path), "last", where)
    timeline = cut(read_traces(tmp_path), 1, 1)
    early, late = timeline.as_dict()["ranks"]
    assert early["waited_for"].get("1", 0) >= 1000 * SLEEP / 2, timeline
    assert late["waited_for"].get("0", 0) <= 1000 * SLEEP / 2, timeline


@pytest.mark.parametrize(("sync", "where"), [("last", "forward"), ("every", "forward"), ("last", "draw")])
def test_waits_name_the_rank_that_sleeps(ranks, tmp_path, sync, where):
    ranks(2).run(one_sleeps, str(tmp_path), sync, where)
    timeline = cut(read_traces(tmp_path), 1, 1)
    early, late = timeline.as_dict()["ranks"]
    assert early["waited_for"]["1"] >= 1000 * SLEEP / 2  # not all of it, since the other rank works meanwhile
    assert early["milliseconds"]["waiting"] > late["milliseconds"]["waiting"]
    longest = max((piece for piece in timeline.rows[0].pieces if piece.kind == "waiting"), key=lambda one: one.length)
    assert longest.of == 1
    assert late["milliseconds"]["plan" if where == "draw" else "compute"] >= 1000 * SLEEP
    for rank in (early, late):
        assert sum(rank["milliseconds"].values()) == pytest.approx(timeline.length)
        assert rank["link_busy"] > 0
    of_update = [one for one in spans(tmp_path) if one["args"]["update"] == 1]
    waited = named(of_update, "plan" if where == "draw" else "reduction")
    assert max(one["dur"] for one in waited) >= 1e6 * SLEEP / 2


def test_clocks_of_other_machines_are_aligned_by_collectives(ranks, tmp_path):
    ranks(2).run(one_sleeps, str(tmp_path), "last", "forward")
    before = cut(read_traces(tmp_path), 1, 1)
    found = json.loads((tmp_path / "rank1.json").read_text())
    found["otherData"]["boot"] = "another machine's"
    for one in found["traceEvents"]:
        if one["ph"] == "X":
            one["ts"] += 1e9
            one["args"] |= {key: one["args"][key] + 1e9 for key in ("arrived", "computed") if key in one["args"]}
    (tmp_path / "rank1.json").write_text(json.dumps(found))
    after = cut(read_traces(tmp_path), 1, 1)
    assert abs(after.length - before.length) < 1000 * SLEEP
    assert after.as_dict()["ranks"][0]["waited_for"]["1"] >= 1000 * SLEEP / 3


def streamed_and_read_ahead(folder: str) -> None:
    model, accumulator = make(f"{folder}/streamed", steps=2, lookahead=False)
    for window in accumulator.windows(BATCHES):
        run(window, model)
        window.step()
    model, accumulator = make(f"{folder}/ahead", steps=2)
    for window in accumulator.windows(loader_of(12)):
        run(window, model)
        assert window.step().loss > 0  # reading it waits


def test_spans_show_when_micro_batches_are_drawn_ahead(ranks, tmp_path):
    ranks(2).run(streamed_and_read_ahead, str(tmp_path))
    streamed, ahead = spans(tmp_path / "streamed"), spans(tmp_path / "ahead")
    assert_nested(streamed)
    assert_nested(ahead)
    plans = [one["args"].get("ahead", False) for one in named(streamed, "plan") if one["args"]["update"] == 0]
    assert plans == [False, True, True]
    for wait in named(streamed, "waiting"):  # also that for the window's count: it is no reduction
        for sent in named(streamed, "reduction"):
            is_over = sent["ts"] + sent["dur"] <= wait["ts"] or wait["ts"] + wait["dur"] <= sent["ts"]
            assert is_over or not sent["args"].get("by_hand")
    assert named(ahead, "window")[0]["args"]["outcome"] == "stepped"
    assert any(one["args"].get("on") == "the record of the loss" for one in named(ahead, "waiting"))
    timeline = cut(read_traces(tmp_path / "ahead"), 1, 1)
    assert timeline.micro_batches == (2, 2)


def test_reduction_shown_by_one_rank_keeps_its_place(ranks, tmp_path):
    ranks(2).run(one_sleeps, str(tmp_path), "last", "forward")
    before = cut(read_traces(tmp_path), 1, 1).as_dict()["ranks"][0]["link_busy"]
    found = json.loads((tmp_path / "rank0.json").read_text())
    one = next(e for e in found["traceEvents"] if e["name"] == "reduction" and e["args"]["update"] == 1)
    about = {**one["args"], "number": 7, "by_hand": True}
    found["traceEvents"].append({**one, "ts": end(one), "dur": 200.0, "args": about})
    (tmp_path / "rank0.json").write_text(json.dumps(found))
    assert cut(read_traces(tmp_path), 1, 1).as_dict()["ranks"][0]["link_busy"] <= before + 0.2 + NOISE


def test_window_in_which_ddp_lays_out_buckets_is_not_typical(ranks, tmp_path):
    ranks(2).run(one_sleeps, str(tmp_path), "last", "nowhere")
    traces = read_traces(tmp_path)  # DDP does so in the forward after its first reduction
    assert [bool(one["args"].get("lays_out")) for one in named(spans(tmp_path), "window")] == [False, True, False]
    for trace in traces:  # made longer, since the shorter of two is chosen
        trace.spans[:] = [
            replace(one, end=one.end + 1000) if (one.name, one.update) == ("window", 2) else one for one in trace.spans
        ]
    assert typical(traces) == 2
    assert "DDP lays out its buckets in update 1, once" in str(cut(traces, 1, 1)).replace("\n", " ")
    assert not cut(traces, 2, 2).as_dict()["notes"]


# Folders


def test_trace_of_an_older_run_is_kept_under_another_name(tmp_path):
    for _ in range(3):
        model, accumulator = make(tmp_path)
        run(window := accumulator.window(BATCHES), model)
        window.step()
        del accumulator, window, model
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.1.json", "rank0.2.json", "rank0.json"]
    assert all(json.loads(path.read_text())["traceEvents"] for path in tmp_path.iterdir())


def test_accumulators_need_a_folder_each(tmp_path):
    _, accumulator = make(tmp_path)
    with pytest.raises(ValueError, match="that another Accumulator writes its trace to; give each a folder"):
        make(tmp_path)
    del accumulator
    make(tmp_path)


def closes_its_trace(folder: str) -> tuple[bool, float, float | None]:
    """The trace closes with its accumulator, even if read or unread updates are kept."""
    gc.disable()
    try:
        model, accumulator = make(folder, measure_noise=True)
        updates = []
        for _ in range(2):
            run(window := accumulator.window(BATCHES), model)
            updates.append(window.step())
        loss = updates[0].loss
        del accumulator, window
        make(folder)  # raises if another accumulator still writes there
        return True, loss, updates[1].noise_scale
    finally:
        gc.enable()


def test_kept_update_keeps_no_trace_open(ranks, tmp_path):
    alone = closes_its_trace(str(tmp_path / "one"))
    for gone, loss, noise in [alone, *ranks(2).run(closes_its_trace, str(tmp_path / "two"))]:
        assert gone and loss > 0 and noise is not None


def unequal(folder: str) -> None:
    run_ = Run("FSDP2", trace=folder)
    for index, layout in enumerate([[[1, 2], [2, 1]], [[1, 2, 1], [2]]]):
        run_.window(layout, index)


@pytest.mark.skipif("FSDP2" not in KINDS, reason="not on CPU in torch 2.6")
def test_stand_in_is_not_counted_as_a_micro_batch(ranks, tmp_path):
    ranks(2).run(unequal, str(tmp_path))
    assert cut(read_traces(tmp_path), 1, 1).micro_batches == (3, 1)


def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(.*\); name a folder that this process may make"):
        make(tmp_path / "file" / "traces")


@pytest.mark.parametrize("left", [0, 100])  # bytes that the disk still takes
def test_full_disk_ends_the_trace_and_not_the_training(tmp_path, left):
    model, accumulator = make(tmp_path)
    run(window := accumulator.window(BATCHES), model)
    time.sleep(0.03)  # long enough that the end of the window writes
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "rank0.json").stat().st_size
    # The kernel refuses writes, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + left, found[1]))
    try:
        with pytest.warns(UserWarning, match="the trace ends here"):
            assert window.step().stepped
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)
    run(window := accumulator.window(BATCHES), model)
    assert window.step().stepped
    json.loads((tmp_path / "rank0.json").read_text())


# The command


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("traces")
    model, accumulator = make(folder, steps=3)
    for window in accumulator.windows(BATCHES * 4):
        run(window, model)
        window.step()
    return folder


def test_timeline_prints_and_draws_a_typical_update(traces, tmp_path, capsys):
    update = typical(read_traces(traces))
    for suffix, begins in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        out = tmp_path / "made" / f"picture.{suffix}"
        assert main(["timeline", str(traces), "--out", str(out)]) == 0
        assert out.read_bytes().startswith(begins)
        assert f"Update {update}: 1 rank with 3 micro-batches each" in capsys.readouterr().out
    assert 0 < update < 4


def test_printed_timeline_fits_the_terminal(traces, monkeypatch):
    found = cut(read_traces(traces), 1, 2)
    for columns, parts in ((30, 6), (60, 2), (120, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(found)
        assert max(map(len, text.splitlines())) <= columns and text.count("  rank 0  ") == parts, text
        assert all(name in text for name in COLUMNS)


def test_timeline_prints_several_updates_as_json(traces, capsys):
    assert main(["timeline", str(traces), "--updates", "1:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    assert found["updates"] == [1, 2] and rank["micro_batches"] == 6
    assert sum(rank["milliseconds"].values()) == pytest.approx(found["milliseconds"])
    assert sum(rank["percent"].values()) == pytest.approx(100)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nowhere",), "there is no folder nowhere; name the one that was given to Accumulator(trace=...)"),
        (("empty",), "empty has no trace, expected rank0.json and one for each rank"),
        (("others",), "others has only rank1.json, expected rank0.json"),
        (("broken",), "rank0.json is not a whole trace (JSONDecodeError: "),
        (("foreign",), "rank0.json is not a whole trace (KeyError: 'otherData')"),
        (("halves",), "halves has no trace of rank 1 of 2"),
        (("swapped",), "swapped/rank1.json is the trace of rank 0, expected rank 1's"),
        (("mixed",), "mixed/rank1.json is of a job of 3 ranks, and rank0.json of one of 2; expected one job's"),
        (("traces", "--update", "9"), "the traces hold updates 0 to 3, and not update 9"),
        (("traces", "--updates", "3:1"), "--updates 3:1, expected two indices such as 10:12"),
        (
            ("traces", "--out", "picture.bmp"),
            "the picture 'picture.bmp' has no ending that says its kind, expected .png, .svg or .pdf",
        ),
    ],
)
def test_mistake_prints_one_line_and_exits_with_status_2(traces, tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    files = {"others/rank1.json": "{}", "broken/rank0.json": '{"otherData": {', "foreign/rank0.json": "{}"}
    one = json.loads((traces / "rank0.json").read_text())
    one["otherData"]["ranks"] = 2
    files["swapped/rank0.json"] = files["swapped/rank1.json"] = files["mixed/rank0.json"] = json.dumps(one)
    one["otherData"] |= {"ranks": 3, "rank": 1}
    files["mixed/rank1.json"] = json.dumps(one)
    one["otherData"] |= {"ranks": 2, "rank": 0}
    for name, content in {**files, "empty/other.txt": "", "halves/rank0.json": json.dumps(one)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    folder = str(traces) if words[0] == "traces" else words[0]
    assert main(["timeline", folder, *words[1:]]) == 2
    seen = capsys.readouterr()
    assert len(seen.err.splitlines()) == 1 and text in seen.err and not seen.out


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["timeline", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "distaccum timeline traces --out timeline.png" in text and "exit status: 0" in text
