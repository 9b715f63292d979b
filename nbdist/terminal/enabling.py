"""`nbdist enable`: notebooks find the magics without `%load_ext nbdist`; `nbdist disable`: not.

What IPython calls lazy magics: names in the configuration of a profile, each with the extension
that is loaded when it is first used, so also after a kernel has been started anew.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from IPython.paths import get_ipython_dir

from nbdist.errors import UsageError
from nbdist.notebook.command import find_commands

EXTENSION = "nbdist"
SECTION, TRAIT = "MagicsManager", "lazy_magics"
"""Where IPython looks for them."""

_SET_IN_PYTHON = re.compile(rf"^[^#\n]*\b{TRAIT}\b", re.MULTILINE)


def enable(profile: str, *, is_sure: bool) -> int:
    """Write them into a profile, after asking; returns the command's exit code."""
    file = config_file(profile)
    config = read(file)
    # Also what IPython makes of `%%distributed` below other lines, so that this is said.
    found = [*find_commands()]
    below = {f"%{each.name}" for each in found if each.kind == "cell"}
    names = sorted(below | {each.name for each in found})
    in_python = file.with_suffix(".py")
    if in_python.exists() and _SET_IN_PYTHON.search(in_python.read_text(encoding="utf-8")):
        raise UsageError(
            f"{in_python} sets {SECTION}.{TRAIT} itself; add to it "
            f'`c.{SECTION}.{TRAIT}["distributed"] = "{EXTENSION}"`, and so on for other magics.'
        )
    if not is_sure and not _is_wanted(file, len(names) - len(below)):
        sys.stdout.write("nothing was written\n")
        return 1
    config.setdefault(SECTION, {}).setdefault(TRAIT, {}).update(dict.fromkeys(names, EXTENSION))
    write(file, config)
    sys.stdout.write(
        f"written to {file}: in new kernels `%%distributed -n 4` works at once; "
        "`nbdist disable` undoes it\n"
    )
    return 0


def disable(profile: str) -> int:
    """Take out of the profile what `enable` has written; returns the command's exit code."""
    file = config_file(profile)
    config = read(file)
    section: dict[str, Any] = config.get(SECTION, {})
    magics: dict[str, Any] = section.get(TRAIT, {})
    ours = [name for name, extension in magics.items() if extension == EXTENSION]
    if not ours:
        sys.stdout.write(f"there is nothing of nbdist in {file}\n")
        return 1
    for name in ours:
        del magics[name]
    if not magics:
        del section[TRAIT]
    if not section:
        del config[SECTION]
    write(file, config)
    sys.stdout.write(f"removed from {file}: `%load_ext nbdist` loads nbdist\n")
    return 0


def config_file(profile: str) -> Path:
    """Name the file of a profile that programs write; people write the one that ends in .py."""
    if not re.fullmatch(r"\w[\w.-]*", profile):
        raise UsageError(f"`--profile {profile}`: an IPython profile, such as `default`.")
    return Path(get_ipython_dir()) / f"profile_{profile}" / "ipython_config.json"


def read(file: Path) -> dict[str, Any]:
    """Read it; UsageError where it is not what IPython could read."""
    if not file.exists():
        return {}
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error}); nothing was changed.") from None
    is_good = isinstance(config, dict) and isinstance(config.get(SECTION, {}), dict)
    if not is_good or not isinstance(config.get(SECTION, {}).get(TRAIT, {}), dict):
        raise UsageError(f"{file} is not an IPython configuration; nothing was changed.")
    return dict(config)


def write(file: Path, config: dict[str, Any]) -> None:
    """Replace the file in one step, or remove it where nothing is left in it."""
    try:
        if not config:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.{os.getpid()}")
        new.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from None


def _is_wanted(file: Path, count: int) -> bool:
    """Ask; no answer is none."""
    sys.stdout.write(
        f"`%%distributed` and {count - 1} other magics will load nbdist when one is first used.\n"
        f"Write this into {file}? [y/N] "
    )
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
