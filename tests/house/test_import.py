"""`import distaccum` needs torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = ["accelerate", "deepspeed", "torchvision", "sklearn", "matplotlib", "transformers"]
SHOW = f"print([name for name in {OPTIONAL} if name in sys.modules])"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_no_optional_library():
    seen = run(f"import sys; from distaccum import *; {SHOW}; import matplotlib; {SHOW}").splitlines()
    assert seen == ["[]", "['matplotlib']"], "the second shows that this test can fail"


def test_names_and_modules_import_torch_when_they_are_used():
    seen = "'torch' in sys.modules"
    first = f"import sys, distaccum; print(sorted(set(distaccum.__all__) - set(dir(distaccum))), {seen})"
    found = run(
        f"{first}; print(distaccum.plan(batch_size=64, micro_batch_size=8).steps, {seen}); "
        f"print(distaccum.batchnorm.freeze.__name__, distaccum.Accumulator.__name__, {seen})"
    )
    assert found.splitlines() == ["[] False", "8 False", "freeze Accumulator True"]


def test_unknown_name_is_an_attribute_error():
    import distaccum

    with pytest.raises(AttributeError, match="module 'distaccum' has no attribute 'Acumulator'"):
        _ = distaccum.Acumulator
    with pytest.raises(ImportError, match="cannot import name 'Acumulator'"):
        exec("from distaccum import Acumulator")
    assert not hasattr(distaccum, "__wrapped__")
