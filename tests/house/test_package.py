"""The package as it is uploaded and installed: its files and its description."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes

import pytest

import distaccum
from tests.programs.mutants import copied_tree
from tests.support.programs import ROOT

IN_SOURCE = ("configs", "distaccum", "docs", "launch", "tests")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with a source archive and the wheel made from it."""
    folder = tmp_path_factory.mktemp("package")
    # Without isolation, which would install setuptools from a package index
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", copied_tree(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def test_source_archive_has_tests_pages_and_changes(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {str(path.relative_to(ROOT)) for name in IN_SOURCE for path in (ROOT / name).rglob("*.*") if path.is_file()}
    files = {name for name in files if not name.endswith((".pyc", ".pyo"))}
    assert files | {"CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE"} <= names


def test_wheel_has_the_typed_package_the_command_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        command = wheel.read(f"distaccum-{distaccum.__version__}.dist-info/entry_points.txt").decode()
    assert "distaccum/py.typed" in names
    assert "distaccum = distaccum.tools.cli:main" in command
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"distaccum"}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {str(path.relative_to(ROOT)) for path in (ROOT / "distaccum").rglob("*.py")}


def test_links_of_the_description_are_absolute_and_lead_into_the_repository(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        metadata = message_from_bytes(wheel.read(f"distaccum-{distaccum.__version__}.dist-info/METADATA"))
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(targets) > 20
    for target in targets:
        assert target.startswith("https://"), target
        if "/distaccum/main/" in target or "/blob/main/" in target:
            assert (ROOT / target.partition("/main/")[2].partition("#")[0]).exists(), target
