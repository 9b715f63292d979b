"""What a front end asks of a worker's names while somebody types, and the answers.

They go over the control path, so that they are answered whatever the worker's task does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = "_jupyter_types_experimental"
"""Where a reply to a front end says of what kind each completion is, and its signature."""


@dataclass(frozen=True, slots=True)
class Complete:
    """What can stand at the cursor?  `cursor` counts characters of the code."""

    code: str
    cursor: int


@dataclass(frozen=True, slots=True)
class Inspect:
    """What is at the cursor?  `detail` 1 asks for the source too, as `x??` does."""

    code: str
    cursor: int
    detail: int = 0


Question = Complete | Inspect


@dataclass(frozen=True, slots=True)
class Candidate:
    """What could stand there, and of what kind that is: `function`, `instance`, ..."""

    text: str
    type: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Completions:
    """Each of these can stand in place of the characters from `start` to `end`."""

    candidates: tuple[Candidate, ...]
    start: int
    end: int

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> Completions:
        """Read the content of a kernel's reply to a front end."""
        typed = reply["metadata"].get(TYPES) or [{"text": text} for text in reply["matches"]]
        candidates = (
            Candidate(each["text"], each.get("type") or "", each.get("signature") or "")
            for each in typed
        )
        return cls(tuple(candidates), reply["cursor_start"], reply["cursor_end"])

    def reply(self) -> dict[str, Any]:
        """Write the content of a kernel's reply to a front end."""
        place = {"start": self.start, "end": self.end}
        typed = [
            {**place, "text": each.text, "type": each.type or "<unknown>",
             "signature": each.signature}
            for each in self.candidates
        ]  # fmt: skip
        return {
            "matches": [each.text for each in self.candidates],
            "cursor_start": self.start,
            "cursor_end": self.end,
            "metadata": {TYPES: typed},
            "status": "ok",
        }


@dataclass(frozen=True, slots=True)
class Description:
    """Text by media type, of one rank; empty where there is no such name."""

    data: Mapping[str, str]
    rank: int = 0
