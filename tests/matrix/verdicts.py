"""What the core suite said, by capability: read from the file that pytest writes."""

from __future__ import annotations

import enum
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

COLUMNS = {
    "start": "start",
    "names": "names",
    "output": "output",
    "raise": "raise",
    "skip": "skip",
    "kill": "kill",
    "heal": "heal",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "scale": "scale",
    "restart": "restart",
    "stop": "Stop",
    "snapshot": "snapshot",
    "end": "end",
}
"""Each capability: the test in test_core.py, and the head of its column."""


class Verdict(enum.IntEnum):
    """From best to worst: where a capability has several tests, the worst counts."""

    PASSED = 0
    DEGRADED = 1
    FAILED = 2
    NOT_RUN = 3


def read(report: Path) -> tuple[dict[str, Verdict], list[str]]:
    """The verdict on each capability, and a note on each that has not simply passed."""
    found: dict[str, Verdict] = {}
    notes = []
    if report.exists():  # Otherwise pytest has not come to its end.
        for case in ET.parse(report).iter("testcase"):
            name = case.get("name", "").removeprefix("test_").partition("[")[0]
            verdict, notice = _judge(case)
            found[name] = max(verdict, found.get(name, verdict))
            notes += [f"{COLUMNS.get(name, name)} {said}" for said in notice]
    return {name: found.get(name, Verdict.NOT_RUN) for name in COLUMNS}, [*dict.fromkeys(notes)]


def _judge(case: ET.Element) -> tuple[Verdict, list[str]]:
    if bad := [*case.iter("failure"), *case.iter("error")]:
        return Verdict.FAILED, [f"fails: {_line(each.get('message', ''))}" for each in bad]
    if case.find("skipped") is not None:
        return Verdict.NOT_RUN, []
    if said := [*_degraded(case)]:
        return Verdict.DEGRADED, [f"is degraded: {each}" for each in said]
    return Verdict.PASSED, []


def _degraded(case: ET.Element) -> Iterator[str]:
    for each in case.iter("property"):
        if each.get("name") == "degraded":
            yield each.get("value", "")


def _line(message: str) -> str:
    """What is said first, in one line that fits below a table."""
    return " ".join(message.split())[:300]
