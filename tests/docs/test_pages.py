"""The code of the README and of the guide runs and prints the output in its comments; links lead somewhere.

Each python block runs in its own namespace, on the number of ranks in its fence (```python ranks=2). A block that makes
no model gets one, with an optimizer and data. The comment after a print is the expected output; ` | ` separates
outputs of several calls. Blocks fenced as ```python run=no are not run, since they need a GPU or data; they must be
valid Python, and what they import from distaccum must be there.
"""

import ast
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import nullcontext, redirect_stdout

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import distaccum
from distaccum import Accumulator
from tests.support.engines import import_deepspeed
from tests.support.programs import ROOT
from tests.support.windows import warned

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python((?: \w+=\w+)*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(is_run):
    """A parameter for each block: the number of ranks and the code."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for num, (words, code) in enumerate(FENCE.findall(page.read_text())):
            options = dict(word.split("=") for word in words.split())
            if (options.get("run") != "no") is is_run:
                yield pytest.param(int(options.get("ranks", 0)), code, id=f"{name}-{num}")


def printed_by(code):
    warnings.simplefilter("error")
    torch.manual_seed(0)
    out = io.StringIO()
    names = {} if re.search(r"^(import|from) ", code, re.MULTILINE) else made()
    if "import deepspeed" in code:
        import_deepspeed()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if "import Accelerator" in code or "import AccumulatingTrainer" in code:
            os.environ.pop(name, None)  # another library's test leaves these; they would look like a launcher
    if "import Fabric" in code or "import pytorch_lightning" in code:
        warnings.simplefilter("ignore")  # their own
    if "import AccumulatingTrainer" in code:
        with warned():
            import deepspeed  # noqa: F401  # which transformers imports, and which prints then
    with redirect_stdout(out), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed on torch 2.13
        exec(compile(code, "a page", "exec"), names)
    return out.getvalue().strip().splitlines()


def made():
    model = DistributedDataParallel(nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "Accumulator": Accumulator,
        "clip_grad_norm_": nn.utils.clip_grad_norm_,
        "criterion": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(torch.randn(48, 20), torch.randint(0, 2, (48,))), batch_size=8),
        "model": model,
        "network": (network := nn.Linear(20, 2)),
        "sgd": torch.optim.SGD(network.parameters(), lr=0.1),
        "nullcontext": nullcontext,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "steps": 4,
    }


@pytest.mark.parametrize(("num", "code"), list(blocks(is_run=True)))
def test_block_prints_what_its_comments_say(ranks, num, code):
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    expected = [line.strip() for comment in comments for line in comment.split(" | ")]
    for printed in ranks(num).run(printed_by, code) if num else [printed_by(code)]:
        assert [line.strip() for line in printed] == expected


@pytest.mark.parametrize(("num", "code"), list(blocks(is_run=False)))
def test_block_that_is_not_run_is_python_whose_imports_are_there(num, code):
    for node in ast.walk(compile(code, "a page", "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("distaccum"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_fences_of_python_are_all_found():
    for page in PAGES:
        assert len(FENCE.findall(page.read_text())) == len(re.findall(r"^```py", page.read_text(), re.MULTILINE)), page


def test_links_and_anchors_lead_somewhere():
    found = subprocess.run([sys.executable, ROOT / "docs" / "links.py"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_readme_is_read_in_two_minutes():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert all(len(line) <= 120 or line.startswith("|") for line in lines)
    assert next(num for num, line in enumerate(lines, start=1) if "pip install" in line) <= 40


def test_readme_and_guide_keep_their_budget_of_words():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= 20_000


def test_first_screen_of_the_readme_names_the_two_commands_that_do_everything():
    lines = (ROOT / "README.md").read_text().splitlines()[:45]
    for command in ("bash launch/demo.sh", "bash tests/run.sh"):
        assert any(re.match(rf"{command} +# \d+ minutes", line) for line in lines), command
        assert (ROOT / command.split()[1]).exists()


def test_version_is_the_same_wherever_it_stands():
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest, date = re.search(r"^## ([\d.]+) \((\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE).groups()
    cited = (ROOT / "CITATION.cff").read_text()
    assert newest == distaccum.__version__
    assert f"\nversion: {newest}\ndate-released: {date}\n" in cited


DRAW = runpy.run_path(str(ROOT / "docs" / "images" / "draw.py"))


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_picture_is_what_its_program_draws(name, tmp_path):
    DRAW["PICTURES"][name]().write(tmp_path / name)
    assert (tmp_path / name).read_text() == (ROOT / "docs" / "images" / name).read_text(), "run docs/images/draw.py"


def test_notebook_is_made_of_its_page_and_runs():
    text = (ROOT / "docs" / "start.ipynb").read_text()
    assert text == runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebook"](), "run docs/notebook.py"
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    names, out = {}, io.StringIO()
    with redirect_stdout(out):
        for cell in cells:
            exec(compile(re.sub(r"^%.*", "", cell), "a cell", "exec"), names)
    assert len(cells) == 3 and out.getvalue().endswith("0.4\nTrue\n10 {'samples': 32}\n")


@pytest.mark.long  # a workflow builds it, too
def test_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", tmp_path]
    done = subprocess.run([*command, "-d", tmp_path / ".doctrees"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    reference = (tmp_path / "reference.html").read_text()
    for name in distaccum.__all__:
        assert f'id="distaccum.{name}"' in reference, name
    moved = runpy.run_path(str(ROOT / "docs" / "conf.py"))["MOVED"]
    assert not [name for name in moved if (ROOT / "docs" / f"{name}.md").exists()], "the note would hide the page"
    for note in ("rl", "field", "pipelines"):  # pages that were merged lead on
        page, _, anchor = re.search(r"url=([^\"]+)", (tmp_path / f"{note}.html").read_text())[1].partition("#")
        assert f'id="{anchor}"' in (tmp_path / page).read_text()
    assert 'href="measured/law.html"' in (tmp_path / "results.html").read_text()
    assert "2e-\N{WORD JOINER}16" in (tmp_path / "measured" / "law.html").read_text()  # no line ends within it
