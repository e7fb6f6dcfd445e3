"""The core stands alone: its files, copied into an empty folder, pass the grid of engines there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ["extensions", "trainers", "tools", "auditing"]  # that can be taken away
KINDS = "[plain- or [DDP- or [FSDP2-"


def copied(folder: Path) -> Path:
    """The package without its rooms, and the tests."""
    left_out = shutil.ignore_patterns(*ROOMS, "__main__.py", "transformers.py", "__pycache__")
    shutil.copytree(ROOT / "distaccum", folder / "distaccum", ignore=left_out)
    for name in ("tests", "launch", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    # The ranks' server imports what the core needs, and no trainer.
    (folder / "tests/support/preloaded.py").write_text("import torch._dynamo, torch.distributed.fsdp\n")
    # An editable install would find the rooms in the checkout.
    hide = "import sys\nsys.meta_path[:] = [one for one in sys.meta_path if 'Editable' not in str(one)]\n"
    (folder / "sitecustomize.py").write_text(hide)
    return folder


def test_core_passes_the_grid_of_engines_alone(tmp_path):
    core = copied(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(core)}
    program = "import sys, distaccum, pytest; print(distaccum.__file__); sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-n", "0", "-m", "quick", "-k", KINDS]
    grid = [sys.executable, "-c", program, *options, "tests/grids/test_engines.py"]
    done = subprocess.run(grid, env=environment, cwd=core, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(str(core)), done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 20, done.stdout
