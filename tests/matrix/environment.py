"""A virtual environment of a row's own: made, filled, asked, and deleted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.waiting import SOON

INSTALL_TIMEOUT = 1800.0
"""Seconds for one installation: torch's CUDA build is 3 GB to fetch."""

FOREIGN = ("NBDIST_", "JUPYTER_", "IPYTHON", "PYTHON", "TORCHELASTIC_", "VIRTUAL_ENV")
"""Variables that begin so belong to what surrounds this run, and stay outside."""

VERSIONS = """
import importlib.metadata, json, platform
found = {d.metadata["Name"].lower().replace("_", "-"): d.version
         for d in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), **found}))
"""


class NotThere(Exception):
    """This machine lacks what the row needs."""


class Environment:
    """By uv where there is one, which also fetches a Python; by venv and pip elsewhere."""

    def __init__(self, folder: Path, log: IO[str]) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._log = log
        self._uv = shutil.which("uv")

    def make(self, version: str) -> None:
        """With this Python, such as 3.13. NotThere if it cannot be had."""
        try:
            if self._uv:
                self.run([self._uv, "venv", "--python", version, str(self.folder)], 300)
            else:
                self.run([_python(version), "-m", "venv", str(self.folder)], 300)
        except subprocess.SubprocessError as error:
            raise NotThere(f"no Python {version} was to be had") from error

    def install(self, *arguments: str) -> None:
        """As `pip install` does it. subprocess.SubprocessError if it fails."""
        if self._uv:
            command = [self._uv, "pip", "install", "--no-cache", "--python", str(self.python)]
        else:
            command = [str(self.python), "-m", "pip", "install", "--no-cache-dir"]
        self.run([*command, *arguments], INSTALL_TIMEOUT)

    def versions(self) -> dict[str, str]:
        """Of all that is installed, and of Python."""
        command = [str(self.python), "-c", VERSIONS]
        said = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=True)
        return dict(json.loads(said.stdout))

    def run(self, command: Sequence[str], timeout: float) -> None:
        """What it says goes to the log. subprocess.SubprocessError if it fails."""
        self._log.write(f"$ {' '.join(command)}\n")
        self._log.flush()
        environ = {name: value for name, value in os.environ.items() if not _is_foreign(name)}
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environ,
            timeout=timeout,
            check=True,
        )

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_foreign(name: str) -> bool:
    return name.startswith(FOREIGN) or name == "PIP_CONSTRAINT"


def _python(version: str) -> str:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    if found := shutil.which(f"python{version}"):
        return found
    raise NotThere(f"no python{version} is on the PATH")
