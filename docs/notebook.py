"""Makes docs/start.ipynb of docs/start.md: its code in cells that run in order, its text between them.

python docs/notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "start.md"
CODE = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
INSTALL = "%pip install --quiet git+https://github.com/distaccum/distaccum"


def notebook() -> str:
    # A file to copy is for a terminal, and a bash fence is no cell.
    text = re.sub(
        r"^## A file to copy\n.*?(?=^## )", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    title, *parts = CODE.split(text)
    cells = [cell("markdown", title), cell("code", INSTALL)]
    cells += [cell("markdown" if number % 2 else "code", part) for number, part in enumerate(parts)]
    for number, made in enumerate(cells):
        made["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def cell(kind: str, text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}
    return made | {"execution_count": None, "outputs": []} if kind == "code" else made


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(), encoding="utf-8")
