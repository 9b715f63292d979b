"""Processes whose torch has the stand-in, and the results of two that run the contract."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import SOON

ROOT = Path(__file__).parent.parent.parent

METADATA = "Metadata-Version: 2.1\nName: nccl-standin\nVersion: 0\n"

ENTRY_POINT = "[torch.backends]\nnccl-standin = tests.standin.backend:install\n"


def path_with_standin(folder: Path) -> str:
    """Write the metadata of an installed package, and return a PYTHONPATH with that package."""
    about = folder / "nccl_standin-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    return os.pathsep.join([str(folder), str(ROOT)])


CONTRACT = Path(__file__).with_name("contract.py").read_text()

CHECKS = re.findall(r"^def (test_\w+)", CONTRACT, re.MULTILINE)
"""The names of the checks, read without an import of torch."""


@dataclass(frozen=True)
class Said:
    """The results by rank: a line for each check, and all text that the rank has written."""

    lines: list[dict[str, dict[str, str]]]
    texts: list[str]

    def passed(self, check: str) -> None:
        for lines, text in zip(self.lines, self.texts, strict=True):
            assert check in lines, text[-3000:]
            assert not lines[check]["why"], lines[check]["why"]


def both(folder: Path, device: str, environ: Mapping[str, str]) -> Said:
    """Run the contract on two ranks; if a rank fails, the other is killed."""
    command = [sys.executable, "-m", "tests.standin.contract"]
    files = [folder / f"rank{rank}" for rank in range(2)]
    ranks = []
    for rank, path in enumerate(files):
        with path.open("w") as file:
            asked = [*command, str(rank), "2", str(folder / "store"), device]
            ranks.append(subprocess.Popen(asked, cwd=ROOT, env=environ, stdout=file, stderr=file))
    end = time.monotonic() + 2 * SOON
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
        if any('"why": "T' in path.read_text() for path in files) or any(r.poll() for r in ranks):
            break
    for rank in ranks:
        rank.kill()
        rank.wait()
    texts = [path.read_text() for path in files]
    return Said([_checks(text) for text in texts], texts)


def _checks(text: str) -> dict[str, dict[str, str]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"check"')]
    return {line["check"]: line for line in lines}
