"""Records the outputs of the tutorials: `python -m tests.notebooks.record 02 05`, or of all.

Runs each tutorial from top to bottom in a new kernel, and writes its file with the new outputs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

from tests.notebooks.test_notebooks import FOLDER, cleared

LONGEST_CELL = 600  # seconds

USERS_LOGS = "~/.local/state/nbdist"
"""The log folder of users, whose name the saved outputs have instead of a temporary folder's."""


def record(file: Path) -> None:
    """Run a tutorial in a temporary folder, and write its outputs into its file."""
    notebook = cleared(nbformat.read(file, as_version=4))
    metadata = nbformat.from_dict(notebook.metadata)
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=LONGEST_CELL,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, "NBDIST_LOG_DIR": f"{folder}/logs"})
    notebook.metadata = metadata
    file.write_text(nbformat.writes(notebook).replace(f"{folder}/logs", USERS_LOGS) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Record the tutorials whose names begin with one of the arguments, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks.record", description=__doc__)
    parser.add_argument("beginning", nargs="*", help="how the names of the files begin: 02")
    beginnings = tuple(parser.parse_args(arguments).beginning)
    for file in sorted(FOLDER.glob("*.ipynb")):
        if not beginnings or file.name.startswith(beginnings):
            sys.stdout.write(f"{file.name}\n")
            record(file)


if __name__ == "__main__":
    main(sys.argv[1:])
