"""Types that a user's editor shows, by mypy and by pyright, of a script outside of the repository; the install is
editable, which both see.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("user_script.py")
ROOT = Path(__file__).parents[2]
FILES = ["right.py", "wrong.py"]


def by_mypy(folder: Path) -> str:
    shared = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]  # which has torch
    command = [sys.executable, "-m", "mypy", "--strict", *shared, *FILES]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout


def by_pyright(folder: Path) -> str:
    options = {"include": FILES, "typeCheckingMode": "strict"}
    options["reportMissingTypeStubs"] = options["reportUnknownMemberType"] = False  # torch's own
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout


@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_users_script_has_types_that_both_checkers_accept_and_use(tmp_path, check):
    text = SCRIPT.read_text()
    assert "Window[Pair]" in text
    (tmp_path / "right.py").write_text(text)
    (tmp_path / "wrong.py").write_text(text.replace("Window[Pair]", "Window[Tensor]"))
    said = check(tmp_path)
    assert "wrong.py" in said and "right.py" not in said
