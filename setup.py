"""What pyproject.toml cannot say: the README's links made absolute, so that they work on a package index too."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
repository = re.search(r'^Repository = "https://github.com/(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert repository is not None
PAGES = f"https://github.com/{repository[1]}/blob/main/"
PICTURES = f"https://raw.githubusercontent.com/{repository[1]}/main/"

readme = (ROOT / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^\]]*\]\()(?!#|[a-z]+:)", rf"\1{PICTURES}", readme)
readme = re.sub(r"((?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?!#|[a-z]+:)", rf"\1{PAGES}", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
