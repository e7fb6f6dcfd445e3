"""The imports of the programs under launch/ beyond `preloaded`, for the process that forks them."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torchvision

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))
import matplotlib.pyplot
import prove  # found through the line above
import train

import distaccum.tools.cli

LOADED = (matplotlib.pyplot, torchvision)
PROGRAMS = {"train": train.main, "prove": prove.main, "distaccum": distaccum.tools.cli.main}
