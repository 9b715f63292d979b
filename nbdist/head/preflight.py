"""What is checked of machines that have come, before anything is started there; pure."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nbdist import __version__
from nbdist.wire.many import NodeFacts, NodeHello, Target

REACHED = 16
"""Of so many other machines each tries the way: with more of them, others try the rest."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What the notebook's machine has; `torch` is "" where it has none."""

    nbdist: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> Versions:
        """Look at this interpreter, which is the notebook's."""
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = ""
        return cls(__version__, platform.python_version(), torch)


def mismatch(name: str, hello: NodeHello, here: Versions) -> str:
    """Say in which version a machine differs from the notebook's that has to be the same."""
    facts = hello.facts
    own = f"{facts.python} on {name}"
    if hello.version != here.nbdist:
        install = f"`pip install nbdist=={here.nbdist}` for {own}"
        return f"{name} has nbdist {hello.version}, the notebook {here.nbdist}: {install}"
    if _minor(facts.python_version) != _minor(here.python):
        why = "functions can be sent to the same minor version only. `--python` names another one"
        return f"{own} is Python {facts.python_version}, the notebook's is {here.python}: {why}"
    if not facts.torch:
        return f"{own} has no torch: `--python` names the interpreter that has it"
    if here.torch and _minor(facts.torch) != _minor(here.torch):
        install = f"`pip install torch=={_release(here.torch)}` for {own}, or another `--python`"
        return f"{name} has torch {facts.torch}, the notebook {here.torch}: {install}"
    return ""


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _release(version: str) -> str:
    return version.partition("+")[0]


# --- from machine to machine ------------------------------------------------------------------


class Reachable(Protocol):
    """A machine, as far as the way there goes."""

    number: int
    name: str
    facts: NodeFacts


def targets(nodes: Sequence[Reachable]) -> Mapping[int, tuple[Target, ...]]:
    """Choose for each machine, by its number, which others it is to try to reach."""
    found = {}
    for at, node in enumerate(nodes):
        others = [*nodes[at + 1 :], *nodes[:at]][:REACHED]
        found[node.number] = tuple(
            Target(other.name, other.facts.address, other.facts.port) for other in others
        )
    return found


def unreachable(name: str, problem: str) -> str:
    """Word that one machine cannot reach another, and what can be done about it."""
    return (
        f"{name} cannot reach {problem}; gloo and nccl connect all machines, at ports that the"
        " kernel chooses. A firewall has to let these through, or `--backend none`"
    )
