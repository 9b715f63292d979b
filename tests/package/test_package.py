"""Tests of the sdist and the wheel, which pip installs outside of the checkout.

Building both takes 3 s of a processor, once; no test installs a package that nbdist requires.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path

import nbformat
import pytest

from tests.matrix.rows import COLAB
from tests.sources import PACKAGE
from tests.waiting import SOON

ROOT = PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(
    command: Sequence[str | Path], cwd: Path, code: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the checkout, and check its exit code."""
    own = ("PYTHON", "PIP_")  # such as the constraints of the environment of the tests
    rest = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    pip = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**rest, **{f"PIP_{name}": value for name, value in pip.items()}, **environ},
        capture_output=True,
        text=True,
        timeout=3 * SOON,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of the unpacked sdist, so that neither lacks a file."""
    pytest.importorskip("hatchling")
    folder, build = tmp_path_factory.mktemp("built"), [sys.executable, "-m", "hatchling", "build"]
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    run([*build, "-t", "sdist", "-d", folder], ROOT, **path)
    (sdist,) = folder.iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run([*build, "-t", "wheel", "-d", folder], folder / sdist.name.removesuffix(".tar.gz"), **path)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the wheel, alone; it comes before other packages."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    run([*pip, folder, wheel], folder)
    return folder


def test_the_wheel_has_the_package_and_no_tests(wheel: Path) -> None:
    """The wheel has the package as in the checkout, `py.typed`, the licence, and no tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        entries = ConfigParser()
        entries.read_string(archive.read(f"{about(names)}/entry_points.txt").decode())
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    assert "nbdist/py.typed" in names
    files |= {"nbdist/terminal/quickstart.ipynb"}  # in the checkout it is in another folder
    assert {name for name in names if not name.startswith(about(names))} == {
        name for name in files if "__pycache__" not in name
    }
    assert f"{about(names)}/licenses/LICENSE" in names
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    assert {group: dict(entries[group]) for group in entries.sections()} == groups


def test_the_readme_can_be_read_on_pypi(wheel: Path) -> None:
    """The README of the wheel's metadata has whole addresses, each of a file in the repository."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{about({*archive.namelist()})}/METADATA").decode()
    assert "Description-Content-Type: text/markdown" in metadata
    _, _, text = metadata.partition("\n\n")
    original = (ROOT / "README.md").read_text()
    assert text.splitlines()[0] == original.splitlines()[0]
    found = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text)
    assert len(found) == len(re.findall(r"\]\([^)]+\)", original)) > 10
    assert any(mark for mark, _ in found)
    source, tag = re.escape(PROJECT["urls"]["Source"]), f"v{PROJECT['version']}"
    for mark, address in found:
        place = re.fullmatch(f"{source}/{'raw' if mark else 'blob'}/{tag}/(.*)", address)
        assert place, address
        assert (ROOT / place[1]).is_file(), address


def about(names: set[str]) -> str:
    (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    return folder


def test_extras_have_a_row_in_the_manual() -> None:
    """A table of the manual has a row for each extra, with the packages that it installs."""
    text = (ROOT / "docs" / "reference.md").read_text()
    _, _, table = text.partition("\n| extra | what it installs | for |\n")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table.partition("\n\n")[0], re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    assert rows.keys() == extras.keys()
    for extra in extras.keys() - {"dev"}:
        assert rows[extra] == ", ".join(re.split("[<>=]", each)[0] for each in extras[extra])


SMOKE = (
    "%load_ext nbdist",
    "%%distributed -n 2\n"
    "import nbdist\n"
    "t = torch.ones(1) * (rank + 1)\n"
    "dist.all_reduce(t)\n"
    "found = t.item(), nbdist.__file__",
    "import nbdist\n"
    "found = %dist_gather found\n"
    "assert found == [(3.0, nbdist.__file__)] * 2, found\n"
    "assert nbdist.__file__ == {file!r}",
    "same = %dist_diff t",  # a tool with an op, which entry points find
    "%dist_shutdown",
)


def test_the_installed_package_runs_a_notebook(installed: Path, tmp_path: Path) -> None:
    """A notebook with workers, a collective and a tool of an entry point runs as a user's.

    All processes import the installed nbdist.  The test takes 10 s of a processor.
    """
    cells = [each.replace("{file!r}", repr(f"{installed}/nbdist/__init__.py")) for each in SMOKE]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    nbformat.write(notebook, tmp_path / "smoke.ipynb")
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", "smoke.ipynb"]
    run(command, tmp_path, PYTHONPATH=str(installed), NBDIST_LOG_DIR="")
    last = nbformat.read(tmp_path / "smoke.ipynb", as_version=4).cells[3]
    assert "ranks 0-1 agree" in last.outputs[0]["data"]["text/plain"]


def test_the_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    """The command `nbdist` runs; without other packages the doctor names each that is missing.

    The test takes 1 s of a processor.
    """
    path = {"PYTHONPATH": str(installed)}
    said = run([installed / "bin" / "nbdist", "--version"], tmp_path, **path).stdout
    assert said == f"nbdist {PROJECT['version']}\n"
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    done = run([python, "-m", "nbdist.terminal", "doctor"], tmp_path, 1, **path)
    packages, torch, *_ = done.stdout.splitlines()
    named = re.findall(r"([\w-]+) \(missing\)", packages)
    needed = {re.split("[<>=!]", each)[0] for each in PROJECT["dependencies"]}
    assert {each.replace("-", "_") for each in named} == needed - {"torch"}
    assert torch == f"problem: torch is not installed: `{python} -m pip install torch`"


def test_the_tutorial_comes_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    """`nbdist tutorial` copies the quickstart of the wheel, and says which packages it needs."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    command = [python, "-m", "nbdist.terminal", "tutorial"]
    done = run(command, tmp_path, 2, PYTHONPATH=str(installed))
    copy = tmp_path / "nbdist-quickstart.ipynb"
    assert copy.read_bytes() == (ROOT / "notebooks" / "01-quickstart.ipynb").read_bytes()
    assert done.stdout == f"The quickstart was copied to {copy}.\n"
    packages = " ".join(PROJECT["optional-dependencies"]["notebooks"]).replace(">=4.2", "")
    install = f"`{python} -m pip install {packages}`"
    assert done.stderr == f"nbdist: packages of the quickstart are missing: {install}\n"


def test_colab_is_not_changed(wheel: Path, tmp_path: Path) -> None:
    """pip installs nbdist beside Colab's packages without changing or downloading any; 4 s.

    The test makes only the metadata of each package, which pip reads.
    """
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    there = {**COLAB, "packaging": "24.2", "xxhash": "3.4.1"}
    for name, version in there.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "INSTALLER").write_text("pip\n")
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "-q", wheel], tmp_path)
    after = run([*pip, "list", "--format", "freeze"], tmp_path).stdout.splitlines()
    before = {f"{name}=={version}" for name, version in there.items()}
    assert {*after} >= before
    assert {*after} - before == {f"nbdist=={PROJECT['version']}"}


def test_pyright_accepts_the_types_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Pyright, by which VS Code shows types, accepts the typed example with the wheel; 4 s."""
    pytest.importorskip("basedpyright")
    shutil.copy(ROOT / "tests" / "values" / "typed.py", tmp_path)
    unneeded = {"reportUnnecessaryTypeIgnoreComment": "error"}
    config = json.dumps({"typeCheckingMode": "strict", **unneeded})
    (tmp_path / "pyrightconfig.json").write_text(config)
    pyright = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    run([*pyright, "typed.py"], tmp_path, PYTHONPATH=path)
