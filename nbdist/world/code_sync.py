"""Keeps the notebook's folder the same on all nodes that do not share it: `--sync-code`.

Runs in the notebook, on the session's thread, before each cell: `CodeListing` knows which files
go to other machines and which of them have changed, `CodeSync` sends these.  What has not
changed costs one look at each file and folder.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Protocol

from nbdist.errors import CodeNotSent
from nbdist.wire.code_tree import OWN_NAMES, CodeFile, Digest, Landmark, digest_of, parts
from nbdist.wire.messages import CodeHeld, GetCode, PutCode, Reply, Request, Starting
from nbdist.words import count, size_text

IGNORE_FILE = ".nbdistignore"

LARGEST = 1 << 20
"""Bytes of a file that goes along without being asked for."""
MOST_BYTES = 64 << 20
"""Of all that go along."""
MOST_FILES = 5000
MOST_LOOKED_AT = 50_000
"""Files and folders below the notebook's: with more it is hardly a folder of code."""
FULL_FOLDER = 500
"""Files in one folder, apart from Python's, from which on they are taken for data."""

GIT_TIMEOUT = 5.0
"""Seconds for git to say what it ignores; without an answer all goes along that is small."""
GIT = ("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
GIT_ENVIRON = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
"""Git runs no program that the folder's own configuration names, and fetches nothing: the folder
may be a clone or an unpacked archive that another person made."""

FRESH = 2 * 10**9
"""Nanoseconds after a change in which a second one may not show in a file's times."""

NAMED = 3
"""How many files are named of those that stay here."""

QUIET_FOLDERS = (
    *(".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", ".*_cache", "node_modules"),
    *(".venv", ".tox", ".nox", ".eggs", "*.egg-info", ".idea", ".vscode"),
)
QUIET_FILES = ("*.py[co]", "*.ipynb", "*.sw[op]", ".~*", "*~", ".DS_Store", *OWN_NAMES)
"""Stay here, as nobody misses them there."""
HEAVY_FOLDERS = ("checkpoints", "lightning_logs", "wandb", "mlruns")
HEAVY_FILES = ("*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.gguf")
"""Stay here, which is said."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of `.nbdistignore`: what it matches stays here, or, after `!`, goes along."""

    text: str
    pattern: re.Pattern[str]
    sends: bool
    only_folders: bool
    is_path: bool

    @classmethod
    def read(cls, line: str) -> Rule | None:
        """Read a line as .gitignore has them; `*` is any number of any signs."""
        text = line.strip()
        if not text or text.startswith("#"):
            return None
        sends, bare = text.startswith("!"), text.removeprefix("!")
        only_folders, bare = bare.endswith("/"), bare.rstrip("/")
        is_path, bare = "/" in bare, bare.lstrip("/")
        return cls(bare, re.compile(translate(bare)), sends, only_folders, is_path)

    def matches(self, path: str, *, is_folder: bool) -> bool:
        """Say whether it is about this path, below the notebook's folder."""
        if self.sends and "/" in path and self.matches(path.rpartition("/")[0], is_folder=True):
            return True
        if self.only_folders and not is_folder:
            return False
        return bool(self.pattern.match(path if self.is_path else path.rpartition("/")[2]))


@dataclass(frozen=True)
class LeftOut:
    """Files that stay here: the size of each by its path; a folder's ends with a slash."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    is_cut_short: bool = False

    def __str__(self) -> str:
        """Say in a sentence which stay here, and how they would go along; "" for none."""
        if self.is_cut_short:
            return (
                f"`--sync-code` has looked at the first {MOST_LOOKED_AT:,} files below the "
                f"notebook's folder: {IGNORE_FILE} there can leave out the folders with the rest."
            )
        if not self.sizes:
            return ""
        largest = sorted(self.sizes, key=lambda path: (-self.sizes[path], path))
        named = [f"{path} ({size_text(self.sizes[path])})" for path in largest[:NAMED]]
        if more := len(largest) - NAMED:
            named += [f"{count(more, 'other')}"] if more > 0 else []
        listed = ", ".join(named[:-1]) + (" and " if named[1:] else "") + named[-1]
        return (
            f"`--sync-code` leaves out {listed}: checkpoints, data, and what is larger than "
            f"{size_text(LARGEST)}. `!{largest[0]}` in {IGNORE_FILE} sends it."
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was at the last look; `stamp` is None where another change may not show."""

    stamp: tuple[int, int, int, int] | None
    file: CodeFile


@dataclass(slots=True)
class _Found:
    """A file that is to go along; `is_asked_for`: it is whatever its size."""

    stat: os.stat_result
    is_asked_for: bool


class CodeListing:
    """The code in a folder: `files` are those that go along, by their paths in it.

    `left_out` says which do not.  Up to date after `look`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, CodeFile] = {}
        self.left_out = LeftOut()
        self._root = f"{folder}/"
        self._seen: dict[str, _Seen] = {}
        self._folders: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CodeListing of {self.folder}, {count(len(self.files), 'file')}>"

    def look(self) -> bool:
        """Look again; say whether anything differs from the last time.  Raises OSError."""
        before = self.files
        changed = self._changed()
        if changed is None or any(path.endswith((".gitignore", IGNORE_FILE)) for path in changed):
            self._list()
        else:
            self.files = {**before, **{path: self._digested(path) for path in changed}}
        return self.files != before

    def read(self, path: str) -> bytes | None:
        """Read a file; None where it cannot be read any more."""
        try:
            return self._read(path)
        except OSError:
            return None

    def why_not(self, path: str) -> str:
        """Say what keeps a file that lies in the folder here; "" for one that goes along."""
        if path in self.files:
            return ""
        if path in self.left_out.sizes:
            return f"it has {size_text(self.left_out.sizes[path])}"
        return "git or nbdist ignores it"

    # --- what has changed -----------------------------------------------------------------

    def _changed(self) -> list[str] | None:
        """Name the files that may have changed; None where there may be others."""
        root, look = self._root, os.stat
        changed = []
        try:
            for path, modified in self._folders.items():
                if look(root + path).st_mtime_ns != modified:
                    return None
            for path, seen in self._seen.items():
                if _stamp(look(root + path)) != seen.stamp:
                    changed.append(path)
        except OSError:
            return None
        return changed if self._folders else None

    def _digested(self, path: str, found: os.stat_result | None = None) -> CodeFile:
        """Read a file that is not as it was; "" for what cannot be read any more."""
        now = found or os.stat(self._root + path)
        stamp = _stamp(now)
        seen = self._seen.get(path)
        if seen is None or seen.stamp is None or seen.stamp != stamp:
            file = CodeFile(digest_of(self._read(path)), bool(now.st_mode & stat.S_IXUSR))
            is_fresh = abs(time.time_ns() - now.st_mtime_ns) < FRESH
            self._seen[path] = seen = _Seen(None if is_fresh else stamp, file)
        return seen.file

    def _read(self, path: str) -> bytes:
        with open(self._root + path, "rb") as file:
            return file.read()

    # --- what there is --------------------------------------------------------------------

    def _list(self) -> None:
        """Look for what there is, and choose."""
        walk = _Walk(self.folder)
        files: dict[str, CodeFile] = {}
        left_out, room = walk.left_out, MOST_BYTES
        # Code first, and what is small: where there is no room for all, data stays here.
        for path, found in sorted(walk.files.items(), key=_by_use):
            size = found.stat.st_size
            fits = size <= LARGEST and size <= room and len(files) < MOST_FILES
            if not (fits or found.is_asked_for):
                left_out[path] = size
                continue
            try:
                files[path] = self._digested(path, found.stat)
                room -= size
            except OSError:
                left_out[path] = size
        self._folders = walk.folders
        self._seen = {path: self._seen[path] for path in files}
        self.files, self.left_out = files, LeftOut(left_out, walk.is_cut_short)


class _Walk:
    """A walk through the folder: the files that may go along, and the folders they lie in.

    The folder itself comes first, and then those in it: what is cut short is far away.
    """

    def __init__(self, root: Path) -> None:
        self.files: dict[str, _Found] = {}
        self.folders: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        self.is_cut_short = False
        self._root = f"{root}/"
        self._rules = _rules_in(root)
        self._ignored = _ignored_by_git(root)
        waiting, looked_at = deque([""]), 0
        while waiting:
            path = waiting.popleft()
            entries = self._entries(path)
            looked_at += len(entries)
            if looked_at > MOST_LOOKED_AT:
                self.is_cut_short = True
                return
            waiting += self._take(path, entries)

    def _entries(self, path: str) -> list[os.DirEntry[str]]:
        """List a folder; one that cannot be read has nothing."""
        try:
            self.folders[path] = os.stat(self._root + path).st_mtime_ns
            with os.scandir(self._root + path) as found:
                return [*found]
        except OSError:
            if not path:
                raise
            return []

    def _take(self, path: str, entries: list[os.DirEntry[str]]) -> Iterator[str]:
        """Take a folder's files, and yield the folders in it that are to be looked into."""
        others = [each for each in entries if not each.name.endswith(".py")]
        is_full = len(others) > FULL_FOLDER and sum(each.is_file() for each in others) > FULL_FOLDER
        if is_full:
            self.left_out[path or "./"] = 0
        for each in entries:
            name = path + each.name
            is_folder = each.is_dir(follow_symlinks=False)
            wanted = self._wanted(name, each.name, is_folder=is_folder)
            if is_folder:
                if wanted or (wanted is None and not _is_environment(each.path)):
                    yield f"{name}/"
            elif wanted or (wanted is None and (not is_full or name.endswith(".py"))):
                self._take_file(name, each, is_asked_for=bool(wanted))

    def _take_file(self, name: str, entry: os.DirEntry[str], *, is_asked_for: bool) -> None:
        try:
            found = entry.stat()  # of a link, where it leads to
        except OSError:
            return
        if stat.S_ISREG(found.st_mode):
            self.files[name] = _Found(found, is_asked_for)

    def _wanted(self, path: str, name: str, *, is_folder: bool) -> bool | None:
        """Say whether it was asked for (True) or is to stay here (False); None where nothing is."""
        for rule in reversed(self._rules):
            if rule.matches(path, is_folder=is_folder):
                return rule.sends
            if is_folder and rule.sends and rule.text.startswith(f"{path}/"):
                return True
        if path in self._ignored or (QUIET_FOLDER if is_folder else QUIET_FILE).match(name):
            return False
        if (HEAVY_FOLDER if is_folder else HEAVY_FILE).match(name):
            self._leave_out(path, is_folder=is_folder)
            return False
        return None

    def _leave_out(self, path: str, *, is_folder: bool) -> None:
        if is_folder:
            self.left_out[f"{path}/"] = 0
            return
        with suppress(OSError):
            self.left_out[path] = os.stat(self._root + path).st_size


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_mtime_ns, found.st_size, found.st_ctime_ns, found.st_ino


def _by_use(item: tuple[str, _Found]) -> tuple[bool, bool, int, str]:
    path, found = item
    return not found.is_asked_for, not path.endswith(".py"), found.stat.st_size, path


def _is_environment(path: str) -> bool:
    """Say whether it is a folder that venv, virtualenv or conda has made."""
    return any(os.path.exists(f"{path}/{name}") for name in ("pyvenv.cfg", "conda-meta"))


def _rules_in(root: Path) -> list[Rule]:
    """Read `.nbdistignore`, if there is one; the later of two lines wins."""
    try:
        text = (root / IGNORE_FILE).read_text("utf-8", "replace")
    except OSError:
        return []
    return [rule for line in text.splitlines() if (rule := Rule.read(line))]


def _ignored_by_git(root: Path) -> frozenset[str]:
    """Ask git what it ignores; nothing where there is no git, or no repository.

    What is left are the files of `git ls-files -co --exclude-standard`; this way round it also
    says which folders need no look.
    """
    command = [*GIT, "ls-files", "-oi", "--exclude-standard", "--directory", "-z"]
    environ = {**os.environ, **GIT_ENVIRON}
    try:
        git = subprocess.run(
            command, cwd=root, env=environ, capture_output=True, timeout=GIT_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(os.fsdecode(path).rstrip("/") for path in git.stdout.split(b"\0") if path)


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


QUIET_FOLDER, QUIET_FILE = _any_of(QUIET_FOLDERS), _any_of(QUIET_FILES)
HEAVY_FOLDER, HEAVY_FILE = _any_of(HEAVY_FOLDERS), _any_of(HEAVY_FILES)

TRIES = 3
"""As many times as files may change while they are being sent."""

LANDMARKS = 3
LANDMARKS_LOOKED_AT = 100
"""Files by which a node tells whether it shares the folder, and how many these are taken from."""


class Asks(Protocol):
    """What calls a node: `Link.calling`."""

    def __call__(self, request: Request) -> Generator[Starting, None, Reply]:
        """Return its reply at the end, and come round now and then."""


class CodeSync:
    """The code in a folder, as the nodes of a world have it.

    `is_shared` once all nodes have said that they see the very same folder.
    """

    def __init__(self, folder: Path) -> None:
        self.listing = CodeListing(folder)
        self.is_shared = False
        self._sent: Mapping[str, CodeFile] | None = None
        self._told = ""

    def __repr__(self) -> str:
        state = "shared" if self.is_shared else "in sync" if self._sent else "not sent"
        return f"<CodeSync {self.listing} {state}>"

    def take_note(self) -> str:
        """Return what is to be said of files that stay here, where it is new; else ""."""
        said = "" if self.is_shared else str(self.listing.left_out)
        before, self._told = self._told, said
        return said if said != before else ""

    def bringing(self, asks: Asks, *, anew: bool = False) -> Generator[Starting, None, None]:
        """Bring what has changed to all nodes; with `anew` they are asked what they have.

        Raises CodeNotSent, and what the link raises.
        """
        for _ in range(TRIES):
            try:
                self.listing.look()
            except OSError as error:
                raise CodeNotSent("", f"{self.listing.folder}: {error.strerror}") from None
            if self._sent == self.listing.files and not anew:
                return
            if (yield from self._bring(asks)):
                return
        raise CodeNotSent("", "files in it keep changing")

    def _bring(self, asks: Asks) -> Generator[Starting, None, bool]:
        """Bring the files as they were at the last look; say whether they still were."""
        files = self.listing.files
        held = yield from asks(GetCode(self._landmarks(), files))
        assert isinstance(held, CodeHeld)
        self._sent = None
        if held.problem:
            raise CodeNotSent(held.host, held.problem)
        if held.lacks or not held.is_shared:
            contents = self._contents(held.lacks)
            for part in parts(files, contents):
                held = yield from asks(PutCode(part))
                assert isinstance(held, CodeHeld)
                if held.problem:
                    raise CodeNotSent(held.host, held.problem)
        if held.lacks:
            return False
        self.is_shared, self._sent = held.is_shared, files
        return True

    def _landmarks(self) -> tuple[Landmark, ...]:
        """Choose files that have not changed for long: other machines may be slow to see that."""
        found = []
        for path in [*self.listing.files][:LANDMARKS_LOOKED_AT]:
            with suppress(OSError):
                found.append(Landmark.of(str(self.listing.folder / path)))
        return tuple(sorted(found, key=lambda mark: mark.changed)[:LANDMARKS])

    def _contents(self, wanted: Iterable[Digest]) -> Iterator[tuple[Digest, bytes]]:
        """Read these files; one that has changed meanwhile is left out."""
        paths = {file.digest: path for path, file in self.listing.files.items()}
        for digest in wanted:
            content = self.listing.read(paths[digest])
            if content is not None and digest_of(content) == digest:
                yield digest, content
