"""launch/ray_train.py: two workers of Ray Train, one of which dies, end with the bits of launch/minimal.py."""

import os
import sys

import pytest

from tests.launch.test_launchers import run
from tests.launch.test_minimal import SCRIPT, expect_same
from tests.support.programs import ROOT

# Imported as Python starts: the second worker dies once a checkpoint is there.
DIES = """
import os, pathlib, threading, time
folder = pathlib.Path(os.environ["FOLDER"])
def die():
    while os.environ.get("RANK") != "1" or not list(folder.glob("ray/checkpoint_*/run.pt")):
        time.sleep(0.005)
    if not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(3)
threading.Thread(target=die, daemon=True).start()
"""


@pytest.mark.long
def test_worker_of_ray_that_dies_goes_on_to_the_bits_of_minimal(programs, tmp_path):
    pytest.importorskip("ray", reason="no Ray here: pip install 'distaccum[ray]'")
    (tmp_path / "sitecustomize.py").write_text(DIES)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FOLDER": str(tmp_path)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
    words = (sys.executable, ROOT / "launch" / "ray_train.py", tmp_path)
    text = run(*words, cwd=tmp_path, seconds=900, **environment)
    assert (tmp_path / "died").exists() and "'index': 79" in text
    programs.run(str(SCRIPT), tmp_path / "whole.pt", ranks=2, status=0)
    expect_same(max((tmp_path / "ray").glob("checkpoint_*/run.pt")), tmp_path / "whole.pt")
