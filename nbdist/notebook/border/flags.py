"""What options and arguments a magic has, read from what makes its parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Argument:
    """An option with its flags, or an argument without any; `dest` is what the parser calls it."""

    flags: tuple[str, ...]
    dest: str
    help: str
    takes_value: bool = True
    takes_many: bool = False


@cache
def arguments_of(magic: Callable[..., Any]) -> tuple[Argument, ...]:
    """List them in the order in which the help has them; read once, as each cell asks."""
    added: list[Any] = getattr(magic, "decorators", [])
    return tuple(_argument(each.args, each.kwds) for each in reversed(added) if _is_argument(each))


def flags_of(magic: Callable[..., Any]) -> dict[str, Argument]:
    """Give its options by each of their flags."""
    return {flag: each for each in arguments_of(magic) for flag in each.flags}


def _is_argument(added: Any) -> bool:
    return type(added).__name__ == "argument"


def _argument(names: tuple[str, ...], told: dict[str, Any]) -> Argument:
    flags = tuple(name for name in names if name.startswith("-"))
    longest = max(names, key=len)
    dest = told.get("dest") or longest.lstrip("-").replace("-", "_")
    takes_value = told.get("action") in (None, "append")
    text = str(told.get("help") or "").replace("%%", "%")
    return Argument(flags, dest, text, takes_value, told.get("nargs") in ("*", "+"))
