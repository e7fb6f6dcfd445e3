"""Real launchers: each runs the default configuration and ends with the weights of the big batch."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_train import images, log_of, proven, same, trained
from tests.support.programs import ROOT, free_port, wait_for

CONFIGS = sorted(ROOT.glob("configs/*.toml"))
SCRIPTS = sorted(ROOT.glob("launch/*.sh"))
BIN = Path(sys.executable).parent


SMALL = ("--model", "cnn", "--updates", 3)


def run(*command: object, status: int = 0, seconds: float = 400, cwd: Path = ROOT, **environment: str) -> str:
    """A command's output on both streams."""
    mine = {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **mine}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=seconds,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


# Launchers of two ranks; torchrun is tested by the demo and by the test that kills a rank.
LAUNCHERS = {
    "accelerate": ("bash", "launch/accelerate.sh", "configs/accelerate/cpu.yaml"),
    "deepspeed": (
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", "PORT", "--num_accelerators", 2),
        *("launch/train.py", "--config", "configs/zero2.toml"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("job", LAUNCHERS)
def test_launchers_end_with_the_weights_of_the_big_batch(programs, tmp_path, job):
    words = [free_port() if word == "PORT" else word for word in LAUNCHERS[job]]
    text = run(*words, *SMALL, "--device", "cpu", "--out", tmp_path / "run")
    assert "2 ranks" in text and "cnn on digits" in text
    assert ("DeepSpeed ZeRO 2" in text) == (job == "deepspeed")
    assert ("Accelerate on cpu" in text) == (job == "accelerate")
    proven(programs, tmp_path / "run")


# Stand-ins for Slurm's commands: two tasks on this machine, which get the signal of a first job's time limit.
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames localhost" ] && printf '127.0.0.1\\nelsewhere\\n'
[ "$1" = requeue ] && echo "$2" > requeued
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>options && shift; done
for node in 0 1; do SLURM_NODEID=$node PATH=${PATH#*:} "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
if [[ ! -e requeued ]]; then
    until [[ -s run/log.jsonl ]]; do sleep 0.1; done
    kill -USR1 $PPID
fi
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; status=$?; done
done
exit $status
"""


@pytest.mark.long
def test_slurm_job_ends_before_its_time_is_up_queues_itself_again_and_goes_on(programs, tmp_path):
    """To the weights of the big batch; its tasks, as in a container, have no scontrol."""
    (tmp_path / "bin").mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("launch", "configs", "distaccum"):
        (tmp_path / name).symlink_to(ROOT / name)
    port, copy = free_port(), shutil.copy(ROOT / "launch" / "slurm.sh", tmp_path / "copy.sh")
    job = {"SLURM_JOB_ID": port, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost", "RANKS": "1"}
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), **job}
    options = ("--model", "cnn", "--updates", 80, "--precision", "float64", "--device", "cpu", "--out", "run")
    words = ["bash", copy, *options]
    first = run(*words, cwd=tmp_path, status=1, SLURM_CPUS_ON_NODE="2", **environment)
    assert "starts anew" in first and "stopped by SIGTERM" in first
    assert (tmp_path / "requeued").read_text() == f"{port}\n"
    options = (tmp_path / "options").read_text().split()
    assert options == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=2"]
    second = run(*words, cwd=tmp_path, **environment)
    assert "goes on with update" in second and "after 80 updates" in second
    proven(programs, tmp_path / "run", 1e-10)


def test_srun_may_start_the_ranks_itself(programs, tmp_path):
    port = free_port()
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    options = ("--model", "cnn", "--updates", 2, "--out", tmp_path / "run")
    places = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    ended = wait_for([programs.start("train", *options, **tasks, **place) for place in places])
    assert [done.status for done in ended] == [0, 0]
    proven(programs, tmp_path / "run")


@pytest.mark.long
def test_demo_trains_and_proves_itself(tmp_path):
    text = run("bash", "launch/demo.sh", VENV=sys.prefix, OUT=str(tmp_path / "run"))
    *_, accuracy = re.findall(r"accuracy (\d+\.\d)%", text)  # printed after each evaluation and at the end
    assert float(accuracy) >= 95
    assert "2 x 4 micro-batches of 8" in text
    assert re.search(r"equal \(float64, bound 1e-10\)", text) and "NOT" not in text
    assert (tmp_path / "run" / "curve.png").exists()


MESHES = ("context", "pipeline", "tensor")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_start(programs, tmp_path, path):
    """Runs the command in the first line; only --plan where GPUs are needed, or test_train_meshes.py runs it."""
    command = path.read_text().splitlines()[0].removeprefix("# ").split()
    assert command[-2:] == ["--config", str(path.relative_to(ROOT))]
    ranks = int(command[command.index("--nproc-per-node") + 1]) if command[0] == "torchrun" else 1
    if command[1] == "launch/nodes.sh":
        ranks = int(command[command.index("--nodes") + 1]) * int(command[command.index("--ranks") + 1])
    config = path.read_text()
    if 'device = "cuda"' in config or path.stem in MESHES:
        data = () if path.stem in MESHES else ("--data", texts_and_images(tmp_path))
        done = programs.run("train", "--config", path, *data, "--plan", ranks, status=0)
        assert f"{ranks} ranks, " in done.text and ("on cuda" in done.text or path.stem in MESHES)
        assert re.search(rf"{2 if path.stem in MESHES else ranks} x \d+ micro-batches of \d+", done.text)
        return
    smaller = ("--model", "cnn") if "resnet" in config else ("--width", 32, "--layers", 1) if "gpt" in config else ()
    trained(programs, tmp_path / "run", "--config", path, "--updates", 1, *smaller, ranks=ranks)
    proven(programs, tmp_path / "run")


def texts_and_images(folder: Path) -> Path:
    for part in ("train", "val"):
        images(folder / part, 1)
    (folder / "text.md").write_text("\n\n".join(["some words in a paragraph"] * 20))
    return folder


def test_fsdp_under_accelerate_is_refused_on_cpu_where_it_would_be_ddp(programs, tmp_path):
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    done = programs.run("train", "--engine", "accelerate", "--out", tmp_path, status=2, **fsdp)
    assert "use --engine fsdp2" in done.text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_clean_and_have_help(path):
    subprocess.run([shutil.which("shellcheck") or BIN / "shellcheck", path], cwd=ROOT, check=True)
    if path.stem in ("lib", "venv"):
        return
    text = run("bash", path, "--help")
    assert f"launch/{path.name}" in text and len(text.splitlines()) >= 5
    assert "#" not in text


WRONG = {
    ("launch/nodes.sh",): "--nodes is missing",
    ("launch/nodes.sh", "--nodes", "2", "--node", "2", "--address", "a"): "--node 2 of --nodes 2, expected 0 to 1",
    ("launch/nodes.sh", "--updates", "3"): "--updates is not known; options of train.py come after --",
    ("launch/slurm.sh",): "no Slurm job here; submit it: sbatch launch/slurm.sh",
    ("launch/torchrun.sh", "two"): "two is no number of ranks",
    ("launch/torchrun.sh", "0"): "ranks = 0, expected a whole number of at least 1",
    ("launch/torchrun.sh", "2", "--config", "no.toml"): "--config no.toml is not there",
    ("launch/nodes.sh", "--nodes", "2", "--node", "x", "--address", "a"): "--node = x, expected a whole number",
    ("launch/accelerate.sh",): "which config file?",
    ("launch/accelerate.sh", "README.md"): "README.md has no distributed_type",
}


@pytest.mark.parametrize("command", WRONG, ids=" ".join)
def test_wrong_calls_of_scripts_print_one_line_and_exit_with_status_2(command):
    text = run("bash", *command, status=2)
    assert WRONG[command] in text
    assert len(text.splitlines()) == 1


# Kills the first rank of the first start as it writes the checkpoint of update 4.
KILLS = """
import os, signal, sys

def kill(event, given):
    if event == "open" and ".update-00000004/state.pt" in str(given[0]):
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    sys.addaudithook(kill)
"""


@pytest.mark.long
def test_rank_that_is_killed_under_torchrun_starts_all_ranks_again(programs, tmp_path):
    """To the same bits as the uninterrupted run."""
    (tmp_path / "my folder").mkdir()
    config = tmp_path / "my folder" / "my.toml"
    config.write_text('model = "cnn"\nbatch_size = 32\nmicro_batch_size = 4\nupdates = 6\ncheckpoint_every = 2\n')
    trained(programs, tmp_path / "whole", "--config", config, ranks=2)
    (tmp_path / "sitecustomize.py").write_text(KILLS)
    # The script resolves paths in its working directory.
    words = ["bash", ROOT / "launch/torchrun.sh", 2, "--config", "my.toml", "--out", "../run", "--resume"]
    environment = {"RESTARTS": "2", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    text = run(*words, "--device", "cpu", cwd=config.parent, **environment)
    assert "goes on with update 2" in text
    assert same(tmp_path / "run", tmp_path / "whole")
    assert [one["index"] for one in log_of(tmp_path / "run")] == list(range(6))
