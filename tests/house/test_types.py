"""Types that a user's editor shows, by pyright, of a script outside of the repository; the install is editable, which
it sees. mypy checks the script with the library.
"""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("user_script.py")


def test_users_script_has_types_that_an_editor_accepts_and_uses(tmp_path):
    text = SCRIPT.read_text()
    assert "Window[Pair]" in text
    (tmp_path / "right.py").write_text(text)
    (tmp_path / "wrong.py").write_text(text.replace("Window[Pair]", "Window[Tensor]"))
    options = {"include": ["right.py", "wrong.py"], "typeCheckingMode": "strict"}
    options["reportMissingTypeStubs"] = options["reportUnknownMemberType"] = False  # torch's own
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "wrong.py" in said and "right.py" not in said
