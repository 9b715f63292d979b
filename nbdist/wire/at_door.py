"""What is said at a world's door: who has it, and that another notebook takes it over.

The door is a socket in the runtime folder, at which an agent (or the head of many) answers.
What is said are lines of JSON with plain values, which other versions of nbdist can read too.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nbdist.wire.frames import BadFrame, fits
from nbdist.wire.spec import Versions

DOOR = "door.sock"
"""The socket's name in the runtime folder."""

SOCKET = re.compile(r"notebook-[0-9]{1,10}\.sock")
"""What the socket of a notebook may be called that takes a world over."""

LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class Who:
    """Whose world is it, and what is it doing?  Answered by `Held`."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A notebook of this version wants the world, and has bound this socket in the folder.

    Answered by `Admitted` or `Refused`; it has the world for as long as the connection lasts.
    """

    version: str
    pid: int
    socket: str


@dataclass(frozen=True, slots=True)
class Held:
    """A world: `notebook` has it, a process, 0 where none does, since `since` on the clock.

    `cell` is what it runs, a line, "" for nothing; `began` when that was sent, or the world
    was started.  Before the first start there are no `workers` and no `name`.  `guard` is the
    process that ends last, once nothing is left of the world.  `versions` are those of the
    interpreter that the world was started with.
    """

    version: str
    host: str
    pool: str
    name: str
    workers: int
    state: str
    cell: str
    began: float
    notebook: int
    since: float
    detach: bool
    guard: int
    versions: Versions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The world is this notebook's; `guard` as in `Held`."""

    agent: int
    guard: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody has the world, or nobody can have it now; `why` says it in a sentence."""

    why: str


Said = Who | Attach | Held | Admitted | Refused

_KINDS: dict[str, Any] = {each.__name__: each for each in (Who, Attach, Held, Admitted, Refused)}


def to_line(said: Said) -> bytes:
    """Write it as one line."""
    return json.dumps({type(said).__name__: asdict(said)}).encode() + b"\n"


def from_line(line: bytes) -> Said:
    """Read what was said; raises BadFrame."""
    try:
        ((name, values),) = json.loads(line).items()
        # Another version may say more.
        known = {each.name for each in fields(_KINDS[name])}
        said: Said = _KINDS[name](**{key: values[key] for key in known & values.keys()})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadFrame(f"{type(error).__name__}: {error}"[:200]) from error
    if not fits(said, type(said)):
        raise BadFrame(f"it is no {name}")
    return said
