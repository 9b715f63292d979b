"""A pytest plugin that says how each test ended, as a line of JSON in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

LONGEST = 2000

_FILE = Path(os.environ["NBDIST_REPORT_FILE"])


def _say(**what: Any) -> None:
    with _FILE.open("a") as file:
        file.write(f"{json.dumps(what)}\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Which tests there are to be."""
    _say(tests=[item.nodeid.rpartition("::")[2] for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _say(begun=nodeid.rpartition("::")[2])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The call, and a set-up or an ending in which something was wrong."""
    if report.when != "call" and report.passed:
        return
    _say(
        test=report.nodeid.rpartition("::")[2],
        when=report.when,
        outcome=report.outcome,
        seconds=round(report.duration, 3),
        note=_note(report),
        figures=dict(report.user_properties),
    )


def _note(report: pytest.TestReport) -> str:
    """Why it was skipped, or the end of what it failed with."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext[-LONGEST:] if report.failed else ""
