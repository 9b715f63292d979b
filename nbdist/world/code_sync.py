"""Keeps the notebook's folder the same on all nodes that do not share it: `--sync-code`.

On the session's thread, before each cell: `CodeListing` knows which files are sent and which have
changed, `CodeSync` sends these.  What has not changed costs one look at each file and folder.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from fnmatch import translate
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from nbdist.errors import CodeNotSent
from nbdist.wire.messages import (
    OWN_NAMES,
    CodeFile,
    CodeHeld,
    GetCode,
    PutCode,
    Starting,
    landmark,
)
from nbdist.wire.places import PACKAGES
from nbdist.words import count, size_text

IGNORE_FILE = ".nbdistignore"
LARGEST = 1 << 20  # bytes of a file that is sent without being asked for
MOST_BYTES, MOST_FILES = 64 << 20, 5000  # of all of these
MOST_LOOKED_AT = 50_000  # files and folders below the notebook's: with more it is hardly of code
FULL_FOLDER = 500  # files in one folder, apart from Python's, from which on they are taken for data
FRESH = 2 * 10**9  # nanoseconds after a change in which a second one may not show in a file's times
NAMED = 3  # how many files are named of those that stay here
LANDMARKS, LANDMARKS_LOOKED_AT = 3, 100  # files by which a node tells whether it shares the folder
GIT_TIMEOUT = 5.0  # seconds for git; without an answer all is sent that is small

# Git runs no program that the folder's own configuration names, and fetches nothing: the folder
# may be a clone or an unpacked archive that another person made.
GIT = ("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
GIT_ENVIRON = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}


def _any_of(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns.split())))


QUIET = _any_of(
    ".git/ .hg/ .svn/ __pycache__/ .ipynb_checkpoints/ .*_cache/ node_modules/ .venv/ .tox/ .nox/ "
    ".eggs/ *.egg-info/ .idea/ .vscode/ *.py[co] *.ipynb *.sw[op] .~* *~ .DS_Store"
)
"""Files that ranks do not need, left out without a word; folders end with a slash."""
HEAVY = _any_of(
    "checkpoints/ lightning_logs/ wandb/ mlruns/ *.pt *.pth *.ckpt *.safetensors *.gguf"
)
"""Files that stay here, which is said."""
ENVIRONMENT = ("pyvenv.cfg", "conda-meta")  # in a folder that venv, virtualenv or conda has made

Stamp = tuple[int, int, int, int]  # what differs of a file or a folder once it has changed
_Found = tuple[str, os.stat_result, bool]  # a file's path, what there is of it, is it asked for
Asks = Callable[[GetCode | PutCode], Generator[Starting, None, CodeHeld]]  # `Link.calling`


class Rule(NamedTuple):
    """A line of `.nbdistignore`, as in .gitignore: what it matches stays or, after `!`, is sent."""

    sends: bool
    text: str
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, line: str) -> Rule:
        """Read a line.  Paths are relative to the notebook's folder; of folders they end with `/`.

        What lies in a folder that is sent is sent too; of one that stays nothing is looked at.
        """
        sends, name = line.startswith("!"), line.removeprefix("!")
        # Its end is `\z` from Python 3.14 on.
        pattern = translate(name.strip("/")).removesuffix(r"\Z").removesuffix(r"\z")
        if "/" not in name.rstrip("/"):  # wherever it is
            pattern = "(?:.*/)?" + pattern.replace(".*", "[^/]*")
        below = ".*" if sends else ""
        end = f"/{below}" if name.endswith("/") else f"(?:/{below})?"
        return cls(sends, name.strip("/"), re.compile(pattern + end))


class CodeListing:
    """The code in a folder: `files` are those that are sent, by their paths in it.

    `left_out` has the sizes of those that stay here.  The paths of folders end with a slash.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Stamp | None] = {}  # None where another change may not show
        self.left_out: dict[str, int] = {}
        self._is_cut_short = False
        self._root = f"{folder}/"
        self._folders: dict[str, Stamp | None] = {}

    def look(self) -> None:
        """Look again which files there are, and which have changed.  Raises OSError."""
        with suppress(OSError):
            stamps = [*self._folders.items(), *self.files.items()]
            if stamps and all(_stamp(os.stat(self._root + path)) == each for path, each in stamps):
                return
        self._list()

    def why_not(self, path: str) -> str:
        """Return what keeps a file of the folder here; "" for one that is sent."""
        if path in self.files:
            return ""
        if path in self.left_out:
            return f"it has {size_text(self.left_out[path])}"
        return "git or nbdist ignores it"

    def note(self) -> str:
        """Return a sentence about files that stay here, and how they would be sent, or ""."""
        sizes = self.left_out
        if self._is_cut_short:
            return (
                f"`--sync-code` has looked at the first {MOST_LOOKED_AT:,} files below the "
                f"notebook's folder: {IGNORE_FILE} there can leave out the folders with the rest."
            )
        if not sizes:
            return ""
        largest = sorted(sizes, key=lambda path: (-sizes[path], path))
        named = [f"{path} ({size_text(sizes[path])})" for path in largest[:NAMED]]
        if largest[NAMED:]:
            named.append(count(len(largest) - NAMED, "other"))
        listed = ", ".join(named[:-1]) + (" and " if named[1:] else "") + named[-1]
        return (
            f"`--sync-code` leaves out {listed}: checkpoints, data, and what is larger than "
            f"{size_text(LARGEST)}. `!{largest[0]}` in {IGNORE_FILE} sends it."
        )

    def _list(self) -> None:
        self.files, self.left_out, self._folders = {}, {}, {}
        room = MOST_BYTES
        # Code first, and what is near: where there is no room for all, data stays here.
        by_use = sorted(self._walk(), key=lambda each: (not each[2], not each[0].endswith(".py")))
        for path, found, is_asked_for in by_use:
            size = found.st_size
            has_room = size <= min(LARGEST, room) and len(self.files) < MOST_FILES
            if (is_asked_for or has_room) and os.access(self._root + path, os.R_OK):
                self.files[path] = _lasting_stamp(found)
                room -= 0 if is_asked_for else size
            else:
                self.left_out[path] = size

    def _walk(self) -> Iterator[_Found]:
        """Yield the files that may be sent, those far down last; note their folders."""
        rules, ignored = _rules_in(self.folder), _ignored_by_git(self.folder)
        waiting, looked_at = deque([("", os.stat(self._root))]), 0
        while waiting:
            (folder, found), entries = waiting.popleft(), list[os.DirEntry[str]]()
            self._folders[folder] = _lasting_stamp(found)
            with suppress(OSError) if folder else nullcontext():  # one may not be to be read
                entries = [*os.scandir(self._root + folder)]
            looked_at += len(entries)
            self._is_cut_short = looked_at > MOST_LOOKED_AT
            if self._is_cut_short:
                return
            data = sum(not each.name.endswith(".py") and each.is_file() for each in entries)
            if data > FULL_FOLDER:
                self.left_out[folder or "./"] = 0
            for each in (each for each in entries if each.name not in OWN_NAMES):
                is_folder = each.is_dir(follow_symlinks=False)
                path = f"{folder}{each.name}{'/' if is_folder else ''}"
                is_data = data > FULL_FOLDER and not path.endswith(("/", ".py"))
                is_wanted = _asks_for(rules, path)
                with suppress(OSError):  # of a link that leads nowhere
                    # Data is not looked at one by one: there may be much, on a slow disk.
                    if is_wanted or (
                        is_wanted is None
                        and not (path in ignored or self._stays(path, each) or is_data)
                    ):
                        found = each.stat()
                        if is_folder:
                            waiting.append((path, found))
                        elif stat.S_ISREG(found.st_mode):
                            yield path, found, bool(is_wanted)

    def _stays(self, path: str, entry: os.DirEntry[str]) -> bool:
        """Return True for what no machine needs elsewhere; what may be missed is noted."""
        name = path[path.rfind("/", 0, -1) + 1 :]
        is_folder = path.endswith("/")
        if HEAVY.match(name):
            self.left_out[path] = 0 if is_folder else entry.stat().st_size
            return True
        return bool(QUIET.match(name)) or (
            is_folder and any(os.path.exists(f"{entry.path}/{made}") for made in ENVIRONMENT)
        )


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ctime_ns, found.st_ino


def _lasting_stamp(found: os.stat_result) -> Stamp | None:
    """Return None where a second change may not show in the stamp."""
    is_fresh = abs(time.time_ns() - found.st_mtime_ns) < FRESH
    return None if is_fresh else _stamp(found)


def _rules_in(root: Path) -> list[Rule]:
    """Read `.nbdistignore`, if there is one; the later of two lines wins, so it comes first."""
    try:
        text = (root / IGNORE_FILE).read_text("utf-8", "replace")
    except OSError:
        return []
    lines = reversed([line.strip() for line in text.splitlines()])
    return [Rule.of(line) for line in lines if line and not line.startswith("#")]


def _asks_for(rules: Sequence[Rule], path: str) -> bool | None:
    """Return True for what `.nbdistignore` sends, False for what stays; None: it has no line."""
    for rule in rules:
        if rule.pattern.fullmatch(path):
            return rule.sends
        if rule.sends and path.endswith("/") and rule.text.startswith(path):  # what is in it
            return True
    return None


def _ignored_by_git(root: Path) -> frozenset[str]:
    """Return the files, and the folders that need no look, that git ignores, if there is git."""
    command = [*GIT, "ls-files", "-oi", "--exclude-standard", "--directory", "-z"]
    environ = {**os.environ, **GIT_ENVIRON}
    try:
        git = subprocess.run(
            command, cwd=root, env=environ, capture_output=True, timeout=GIT_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(map(os.fsdecode, git.stdout.split(b"\0")))


class CodeSync:
    """The code in a folder, as the nodes of a world have it; `is_shared` if all see this folder."""

    def __init__(self, folder: Path) -> None:
        self.listing = CodeListing(folder)
        self.is_shared = False
        self._brought: dict[str, Stamp | None] | None = None  # as nodes have them
        self._sent: dict[str, Stamp | None] = {}  # as the agent or the head was sent them
        self._told = ""

    def take_note(self) -> str:
        """Return what is new to be said of files that stay here, or ""."""
        said = "" if self.is_shared else self.listing.note()
        before, self._told = self._told, said
        return said if said != before else ""

    def forget(self) -> None:
        """Send all files the next time: another agent or head is there."""
        self._brought, self._sent = None, {}

    def bringing(self, asks: Asks, *, to_new: bool = False) -> Generator[Starting, None, None]:
        """Send the files that have changed since the last time; raises CodeNotSent.

        If none has, nodes are asked only with `to_new`: some may have come.
        """
        try:
            self.listing.look()
        except OSError as error:
            raise CodeNotSent("", f"{self.listing.folder}: {error.strerror}") from None
        files, sent = self.listing.files, self._sent
        if files == self._brought and None not in files.values() and not to_new:
            return
        self._brought = None
        held = yield from asks(GetCode(self._landmarks(), frozenset(files)))
        if not held.is_shared:
            self._sent = {}
            new = [path for path in files if files[path] is None or sent.get(path) != files[path]]
            puts = PutCode.of(self._read(new))
            while not held.problem and (put := next(puts, None)):
                held = yield from asks(put)
            if held.problem:
                raise CodeNotSent(held.host, held.problem)
            self._sent = files
        self.is_shared, self._brought = held.is_shared, files

    def _read(self, paths: Iterable[str]) -> Iterator[tuple[str, CodeFile]]:
        for path in paths:
            with suppress(OSError):  # it has just gone, which the next look finds out
                yield path, CodeFile.read(f"{self.listing.folder}/{path}")

    def _landmarks(self) -> dict[str, tuple[int, int]]:
        """Choose files that have not changed for long: other machines may be slow to see that."""
        paths = [f"{self.listing.folder}/{path}" for path in self.listing.files]
        found = {p: mark for p in paths[:LANDMARKS_LOOKED_AT] if (mark := landmark(p))}
        oldest = sorted(found, key=lambda path: found[path][1])[:LANDMARKS]
        return {path: found[path] for path in oldest}


_MISSING = re.compile(r"No module named '([\w.]+)'")


def missing_text(
    message: str, host: str, folder: Path, path: Sequence[str], code: CodeSync | None
) -> str:
    """Return where the notebook has the module that an error's message says `host` lacks, or "".

    `folder` is the notebook's, `path` its `sys.path`; `code` keeps the folder in step there.
    """
    found = _MISSING.search(message)
    if found is None:
        return ""
    path_of = found[1].replace(".", "/")
    files = (f"{path_of}.py", f"{path_of}/__init__.py")
    if file := next((each for each in files if (folder / each).is_file()), ""):
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
