"""Tests of `python -m tests.gpu` itself, on machines without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu.__main__ import Report, results_of
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.timeout(300)


def test_an_ended_command_writes_its_report(tmp_path: Path) -> None:
    """If the command is ended, its report has the tests that ran and those that did not.

    The report has each test's outcome and figures, and facts about the machine.
    """
    only = ["--only", "stop,kills", "-k", "everything and gloo and collective or grows"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path), "--device", "cpu", *only],
        cwd=command.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        said = tmp_path / "test_stop.jsonl"
        wait_until(lambda: said.exists() and '"passed"' in said.read_text(), timeout=2 * SOON)
    finally:
        process.terminate()
        assert process.wait(SOON) == 1
    page = (tmp_path / "report.md").read_text()
    assert re.findall("^## (.*): ", page, re.MULTILINE)[-1] == "passed"
    assert {*re.findall("^## (.*): ", page, re.MULTILINE)} <= {"cut off", "not run", "passed"}
    assert re.search(r"^\| torch, CUDA, NCCL \| \d", page, re.MULTILINE)
    assert re.search(r"\| gloo: Stop, one in a collective \| [\d.e-]+ s \|", page)
    assert "| test_stop | test_stop_keeps_everything[gloo-one in a collective] |" in page


def test_every_file_is_in_a_stage() -> None:
    """Every test file but this file is in a stage of the command."""
    files = {path.stem for path in command.HERE.glob("test_*.py")}
    assert files - {"test_command"} == {*command.FILES}


def test_tests_without_a_result_are_reported() -> None:
    """Tests that were cut off or never began are reported, also if their file named no tests."""
    (nothing,) = results_of("test_x", [], "no time was left")
    assert (nothing.test, nothing.outcome, nothing.note) == ("", "not run", "no time was left")
    said = [
        {"tests": ["a", "b", "c"]},
        {"begun": "a"},
        _ended("a", "passed", {"time": "3 s"}),
        {"begun": "b"},
    ]
    results = results_of("test_x", map(json.dumps, said), "pytest ended with code -11")
    report = Report("cuda", {"GPUs": "a | b"}, results)
    assert report.counts == {"passed": 1, "cut off": 1, "not run": 1}
    assert not report.is_good
    page = "\n".join(report.lines())
    assert "| GPUs | a \\| b |" in page
    assert "| time | 3 s | a |" in page
    assert "| test_x | b | 0.0 | pytest ended with code -11 |" in page
    assert "cut off: test_x b pytest ended with code -11" in report.summary()


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([("call", "failed")], "failed"),
        ([("setup", "failed")], "error"),
        ([("setup", "skipped")], "skipped"),
        ([("call", "passed"), ("teardown", "failed")], "error"),
        ([("call", "failed"), ("teardown", "failed")], "error"),
    ],
)
def test_failures_around_a_test_are_errors(lines: list[tuple[str, str]], outcome: str) -> None:
    """A test fails in its call, and has an error if its set-up or teardown fails."""
    ends = [{**_ended("a", how, {}), "when": when, "note": "E  bad"} for when, how in lines]
    results = results_of("test_x", map(json.dumps, [{"tests": ["a"]}, *ends]), "")
    assert [each.outcome for each in results] == [outcome]
    assert Report("cuda", {}, results).is_good == (outcome == "skipped")


def _ended(test: str, outcome: str, figures: dict[str, str]) -> dict[str, Any]:
    ended = {"test": test, "when": "call", "outcome": outcome, "figures": figures}
    return {**ended, "seconds": 1.5, "note": ""}
