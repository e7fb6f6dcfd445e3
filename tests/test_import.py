"""`import distaccum` needs torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = ["accelerate", "deepspeed", "torchvision", "sklearn", "matplotlib", "transformers"]
SHOW = f"import sys; print([name for name in {OPTIONAL} if name in sys.modules])"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_brings_in_nothing_optional():
    assert run(f"import distaccum; {SHOW}") == "[]"


def test_this_test_can_fail():
    assert run(f"import torchvision, distaccum; {SHOW}") == "['torchvision']"


def test_public_names():
    import distaccum

    for name in distaccum.__all__:
        assert getattr(distaccum, name).__doc__
