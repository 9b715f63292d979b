"""Why a module that the notebook has was not found on another machine, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from nbdist.wire.places import PACKAGES
from nbdist.world.code_sync import IGNORE_FILE, CodeSync

_MISSING = re.compile(r"No module named '([\w.]+)'")


def missing_text(
    message: str, host: str, folder: Path, path: Sequence[str], code: CodeSync | None
) -> str:
    """Say where the module lies here that an error's message says `host` lacks; "" for no such.

    `folder` is the notebook's, `path` its `sys.path`; `code` keeps the folder in step there.
    """
    found = _MISSING.search(message)
    if found is None:
        return ""
    if (file := _file_in(folder, found[1])) is not None:
        if code is None:
            where = "is in the notebook's folder, which"
            return f"`{file}` {where} {host} does not have: `--sync-code` sends it."
        why = code.listing.why_not(file)
        return why and (
            f"`{file}` is in the notebook's folder, but `--sync-code` leaves it out: {why}. "
            f"`!{file}` in {IGNORE_FILE} sends it."
        )
    module = found[1].partition(".")[0]
    spec = PathFinder.find_spec(module, [entry for entry in path if entry])
    origin = (spec.origin or next(iter(spec.submodule_search_locations or ()), "")) if spec else ""
    if not origin:
        return ""
    if PACKAGES.match(origin):
        return f"`{module}` is installed on the notebook's machine, but not on {host}."
    place = str(Path(origin).parent if spec and spec.submodule_search_locations is None else origin)
    return f"`{module}` is in {place}, which {host} does not have: install it there."


def _file_in(folder: Path, module: str) -> str | None:
    """Find a module's file below the folder; relative to it."""
    path = module.replace(".", "/")
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if (folder / name).is_file():
            return name
    return None
