"""The command `nbdist tutorial` copies the quickstart into the present folder and opens the copy.

The quickstart comes with the package, so nobody needs a clone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from nbdist.errors import UsageError
from nbdist.system.processes import MODULE_OPTIONS

TUTORIAL_COPY = "nbdist-quickstart.ipynb"

QUICKSTART_PACKAGES = {
    "jupyterlab": "jupyterlab",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
}
"""Modules that the quickstart needs, and their packages, which the extra `notebooks` installs."""


def tutorial(lab_options: Sequence[str]) -> int:
    """Copy the quickstart, and replace this process by JupyterLab, which opens the copy.

    `lab_options` are options of `jupyter lab`.  Raises UsageError if the copy cannot be written, or
    if packages of the quickstart are missing.
    """
    sys.stdout.write(f"{copy_quickstart(Path.cwd())}\n")
    missing = [
        package for module, package in QUICKSTART_PACKAGES.items() if find_spec(module) is None
    ]
    if missing:
        install = f"`{sys.executable} -m pip install {' '.join(missing)}`"
        raise UsageError(f"packages of the quickstart are missing: {install}")
    sys.stdout.flush()
    words = [sys.executable, *MODULE_OPTIONS, "jupyterlab", TUTORIAL_COPY, *lab_options]
    os.execv(sys.executable, words)


def copy_quickstart(folder: Path) -> str:
    """Write the quickstart into a folder; return a line that says so, or that a copy is there.

    An existing copy is not changed.  Raises UsageError if the copy cannot be written.
    """
    copy = folder / TUTORIAL_COPY
    content = _quickstart().read_bytes()
    try:
        with copy.open("xb") as file:
            file.write(content)
    except FileExistsError:
        if not copy.is_file():
            raise UsageError(
                f"{copy} is no file: run `nbdist tutorial` in another folder"
            ) from None
        return f"{copy} is there already and was not changed."
    except OSError as error:
        raise UsageError(f"{copy} cannot be written: {error.strerror}") from None
    return f"The quickstart was copied to {copy}."


def _quickstart() -> Path:
    """Return the notebook of the wheel, or that of the checkout after `pip install -e`."""
    of_wheel = Path(__file__).with_name("quickstart.ipynb")
    of_checkout = Path(__file__).parents[2] / "notebooks" / "01-quickstart.ipynb"
    return of_wheel if of_wheel.exists() else of_checkout
