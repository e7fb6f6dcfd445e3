"""`import distaccum` needs torch and nothing else, and that only when it is used."""

import subprocess
import sys

import pytest

PROGRAM = """
import io
import sys
from contextlib import redirect_stdout, suppress
import distaccum
print("names", dir(distaccum) == sorted([*distaccum.__all__, "__version__"]), "torch" in sys.modules)
print("plan", distaccum.plan(batch_size=64, micro_batch_size=8).steps, "torch" in sys.modules)
from distaccum.tools.cli import main
with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
    main(["--help"])
print("command", "audit" in said.getvalue(), "torch" in sys.modules)
print("module", distaccum.batchnorm.freeze.__name__, "torch" in sys.modules)

from distaccum import *
OPTIONAL = ["accelerate", "deepspeed", "torchvision", "sklearn", "matplotlib", "transformers"]
print("optional", [name for name in OPTIONAL if name in sys.modules])

import torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # imports many modules itself
before = set(sys.modules)
Accumulator(net, optimizer, steps=2)
print("engine", [name for name in set(sys.modules) - before if "fsdp" in name or name.split(".")[0] in OPTIONAL])

import matplotlib
print("seen", [name for name in OPTIONAL if name in sys.modules])
"""


def test_each_use_loads_only_what_it_needs():
    seen = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert seen.splitlines() == [
        "names True False",
        "plan 8 False",
        "command True False",
        "module freeze True",
        "optional []",
        "engine []",
        "seen ['matplotlib']",  # so that this test can fail
    ]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import distaccum
for name in "Accumulator", "audit":
    try:
        getattr(distaccum, name)
    except ImportError as error:
        print(error)
from distaccum.tools.cli import main
sys.stderr = sys.stdout
print(main(["audit", "train.py"]))
"""


def test_names_and_audit_say_how_to_install_torch():
    seen = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True).stdout
    lines = seen.splitlines()
    assert len(lines) == 4 and lines[3] == "2"
    assert all("which this Python does not have: pip install torch" in line for line in lines[:3]), seen


def test_unknown_name_is_an_attribute_error():
    import distaccum

    with pytest.raises(AttributeError, match="module 'distaccum' has no attribute 'Acumulator'"):
        _ = distaccum.Acumulator
    with pytest.raises(ImportError, match="cannot import name 'Acumulator'"):
        exec("from distaccum import Acumulator")
    assert not hasattr(distaccum, "__wrapped__")
