"""The harness itself: a failure on a rank shows at once, and all processes end with the test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from processes import marked
from programs import Programs, wait_until
from ranks import RankError


def sum_of_ranks():
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("this is why")
    sum_of_ranks()  # rank 0 waits here


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 0


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(3)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fail_on_rank_1, ["rank 1 Traceback", "in fail_on_rank_1", "KeyError: 'this is why'", "rank 0 "]),
        (hang_on_rank_1, ["rank 1 hangs", "in hang_on_rank_1"]),
        (die_on_rank_1, ["rank 1 died"]),
    ],
)
def test_failure_of_a_rank_is_an_error_that_shows_it_first(ranks, function, words):
    these = ranks(2)
    these.run(sum_of_ranks)  # start-up does not count
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        these.run(function, seconds=6)
    assert time.monotonic() - start < 50
    message = str(caught.value)
    assert len(message.splitlines()) <= (8 if function is fail_on_rank_1 else 60), message
    places = [message.find(word) for word in words]
    assert -1 not in places and places == sorted(places) and places[0] == 0, message
    assert these.run(sum_of_ranks) == [1.0, 1.0], "started anew"


NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")
HERE = Path(__file__).parent
INTERRUPTED = """
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor


def test_it():
    # In its own session, behind a shell and a thread that waits for it.
    subprocess.Popen(["bash", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)
    pool = ThreadPoolExecutor()
    pool.submit(subprocess.run, ["bash", "-c", "trap 'sleep 0.5 && touch trapped; exit' TERM; sleep 1000 & wait"])
    time.sleep(1000)
"""


@NEEDS_PROC
def test_interrupted_run_of_tests_ends_its_processes(tmp_path):
    runs = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "test_it.py").write_text(INTERRUPTED)
        words = [sys.executable, "-m", "pytest", "-p", "processes", "-c", os.devnull, "--rootdir", folder, "test_it.py"]
        path = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
        runs[number] = subprocess.Popen(
            list(map(str, words)), cwd=folder, env={**os.environ, **path}, stdout=subprocess.PIPE, text=True
        )
    for number, run in runs.items():
        until = time.monotonic() + 60
        while len(marked(run.pid)) < 5:
            assert run.poll() is None and time.monotonic() < until, marked(run.pid)
            time.sleep(0.05)
        run.send_signal(number)
    for number, run in runs.items():
        text, _ = run.communicate(timeout=60)
        assert run.returncode == pytest.ExitCode.INTERRUPTED, text
        assert not marked(run.pid)
        assert (tmp_path / number.name / "trapped").exists(), "a trap may run programs"


def test_programs_end_with_the_process_that_started_them(tmp_path):
    mine = Programs(tmp_path)
    program = mine.start("-c", "import time; time.sleep(1000)")
    assert program.poll() is None
    mine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(program.pid, 0)


def test_program_that_hangs_shows_where_it_stands(programs):
    program = programs.start("-c", "import time\ndef wait():\n print('here', flush=True)\n time.sleep(1000)\nwait()")
    assert wait_until(lambda: program.text, program)
    with pytest.raises(AssertionError, match=r"(?s)none, hangs.*in wait"):
        program.wait(1)


def test_process_that_forks_outlives_a_client_that_was_killed(programs):
    ask = f"mine.connect({os.environ[forks.ADDRESS]!r}); mine.sendall(b'{{}}\\n'); print('asked', flush=True)"
    program = programs.start("-c", f"import socket, time; mine = socket.socket(1); {ask}; time.sleep(1000)")
    assert wait_until(lambda: program.text, program)
    time.sleep(0.2)  # the answer stays unread
    program.send(signal.SIGKILL)
    assert program.poll() is not None or program.wait().status == -signal.SIGKILL
    assert programs.run("-c", "print('here')").text == "here\n"
