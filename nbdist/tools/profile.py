"""`%%distributed --profile`: one trace of all ranks, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import CellOption, Line
from nbdist.wire.ops import TracePart
from nbdist.words import count, one_line

HEAD = b'{"nbdist": 1, "displayTimeUnit": "ms", "traceEvents": [\n'
"""Every trace begins so, and nothing else is written over."""

SUFFIXES = (".json", ".json.gz")

LARGE = 16_000_000
"""Bytes of JSON from which on a trace is compressed, also where its name does not say so."""


@contextmanager
def _profiled(line: Line) -> Iterator[None]:
    """Have torch's profiler look at the cell that runs inside, where `--profile` says so.

    The trace is written also where the cell fails; that it cannot be is said, and no error.
    """
    if line.options.profile is None:
        yield
        return
    if line.options.no_wait:
        raise UsageError("`--profile`: the trace is written after the cell: not with `--no-wait`.")
    path = check_path(line.options.profile)
    line.pool.ensure(line.options, line.display)
    line.display.wait_for("starting torch's profiler …")
    line.call("timeline.begin_profile")
    origin = time.time_ns()
    try:
        yield
    finally:
        line.pool.display().say(_write_trace(line, path, origin))


def _write_trace(line: Line, path: Path, origin: int) -> str:
    """Collect the ranks' events and write them; what is to be said of it."""
    try:
        found = line.call("timeline.end_profile", origin_ns=origin)
        parts = {rank: part or TracePart() for rank, part in found.items()}
        path = write(path, parts)
    except NbdistError as error:
        return f"no trace of this cell: {one_line(str(error))}"
    lost = [f"rank {rank}: {part.problem}" for rank, part in parts.items() if part.problem]
    lost += [f"rank {rank}: the last {part.dropped:,} events are not in it"
             for rank, part in parts.items() if part.dropped]  # fmt: skip
    events = sum(part.count for part in parts.values())
    said = [f"{path} · {events:,} events of {count(len(parts), 'rank')} · ui.perfetto.dev opens it"]
    return " · ".join([*said, *lost])


PROFILE = CellOption(
    argument("--profile", nargs="?", const="trace.json", metavar="FILE",
             help="run the cell under torch.profiler, and write one trace of all ranks for"
             " ui.perfetto.dev (trace.json)"),
    _profiled,
)  # fmt: skip


def check_path(text: str) -> Path:
    """Read where a trace is to be written; UsageError where it cannot be."""
    path = Path(text).expanduser()
    if not text.endswith(SUFFIXES):
        raise UsageError(
            f"`--profile {text}`: the trace needs a name that ends in .json or .json.gz."
        )
    if not path.parent.is_dir():
        raise UsageError(f"`--profile {text}`: there is no folder {path.parent}.")
    for each in (path, _compressed(path)):
        if each.exists() and not _is_trace(each):
            raise UsageError(
                f"`--profile {text}`: {each} already exists and is not a trace of nbdist. Choose "
                f"another name."
            )
    return path


def write(path: Path, parts: Mapping[int, TracePart]) -> Path:
    """Write what ranks have brought, whole or not at all; return where it is.

    Raises UsageError where it cannot be written.
    """
    if sum(part.size for part in parts.values()) > LARGE:
        path = _compressed(path)
    unfinished = path.with_name(f".{path.name}.part")
    is_compressed = path.suffix == ".gz"
    try:
        with gzip.open(unfinished, "wb", 5) if is_compressed else open(unfinished, "wb") as file:
            file.write(HEAD)
            for number, part in enumerate(part for part in parts.values() if part.events):
                file.write((b",\n" if number else b"") + zlib.decompress(part.events))
            file.write(b"\n]}\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise UsageError(f"`--profile {path}`: {error.strerror or error}.") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _compressed(path: Path) -> Path:
    return path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")


def _is_trace(path: Path) -> bool:
    """Say whether it begins as traces do that were written here."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return bool(file.read(len(HEAD)) == HEAD)
    except (OSError, EOFError, zlib.error):
        return False
