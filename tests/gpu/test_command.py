"""Tests of `python -m tests.gpu` itself, on machines without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.gpu import __main__ as command
from tests.gpu.__main__ import Report, results_of, write_metadata
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.timeout(300)


def test_it_is_ended(tmp_path: Path) -> None:
    """What ends the command ends what it has started; the report says what there was.

    Each test with its outcome, what it measured, and on what machine that was.
    """
    only = ["--only", "stop,kills", "-k", "everything and gloo and Python or grows"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path), "--device", "cpu", *only],
        cwd=command.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "test_kills.log").exists, timeout=2 * SOON)
    finally:
        process.terminate()
        assert process.wait(SOON) == 1
    page = (tmp_path / "report.md").read_text()
    assert re.findall("^## (.*): ", page, re.MULTILINE) == ["cut off", "passed"]
    assert "| test_kills |  | 0.0 | no time was left |" in page
    assert re.search(r"^\| torch, CUDA, NCCL \| \d", page, re.MULTILINE)
    assert re.search(r"\| gloo: Stop, Python code \| [\d.e-]+ s \|", page)
    assert "| test_stop | test_stop_keeps_everything[gloo-Python code] |" in page


def test_every_file_is_in_the_order() -> None:
    """But this one."""
    files = {path.stem for path in command.HERE.glob("test_*.py")}
    assert files - {"test_command"} == {*command.FILES}


def test_metadata_of_a_checkout(tmp_path: Path) -> None:
    """It has the entry points that an installed nbdist has."""
    write_metadata(command.ROOT / "pyproject.toml", tmp_path)
    (found,) = metadata.distributions(path=[str(tmp_path)])
    installed = metadata.distribution("nbdist")
    assert (found.name, found.version) == (installed.name, installed.version)

    def entries(of: metadata.Distribution) -> set[tuple[str, str, str]]:
        return {(entry.group, entry.name, entry.value) for entry in of.entry_points}

    assert entries(found) == entries(installed)


SUITE = """
import pytest

def test_good(record_property): record_property("time", "3 s")
def test_bad(): assert False, "a | b"
def test_skipped(): pytest.skip("no GPU")
@pytest.fixture
def broken():
    yield
    raise OSError("left behind")
def test_broken(broken): pass
"""


def test_what_is_reported(tmp_path: Path) -> None:
    """How each test ended and what it measured, and where a file has not come to its end."""
    (tmp_path / "test_x.py").write_text(SUITE)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "--junitxml=x.xml", "test_x.py"]
    subprocess.run(pytest_command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=SOON)
    results = results_of("test_x", tmp_path / "x.xml")
    report = Report("cuda", {"GPUs": "a | b"}, results)
    assert [each.outcome for each in results] == ["passed", "failed", "skipped", "error"]
    assert report.counts == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert [Report("cuda", {}, [each]).is_good for each in results] == [True, False, True, False]
    page = "\n".join(report.lines())
    assert "| GPUs | a \\| b |" in page
    assert "| time | 3 s | test_good |" in page
    assert re.search(r"\| test_x \| test_bad \| 0\.0 \| AssertionError: a \\\| b ", page)
    assert "error: test_x test_broken failed on teardown" in report.summary()
    (nothing,) = results_of("test_x", tmp_path / "none.xml", "no time was left")
    assert (nothing.test, nothing.outcome, nothing.note) == ("", "cut off", "no time was left")
