"""What is checked of machines that have come, before anything is started there; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nbdist import __version__
from nbdist.wire.many import NodeFacts, NodeHello, Target
from nbdist.wire.versions import Versions, difference

REACHED = 16
"""Of so many other machines each tries the way: with more of them, others try the rest."""


def mismatch(name: str, hello: NodeHello, here: Versions) -> str:
    """Say in which version a machine differs from the notebook's that has to be the same."""
    facts = hello.facts
    own = f"{facts.python} on {name}"
    if hello.version != __version__:
        install = f"`pip install nbdist=={__version__}` for {own}"
        return f"{name} has nbdist {hello.version}, the notebook {__version__}: {install}"
    found = difference(facts.versions, here)
    if found and found.what == "Python":
        said = f"{own} is Python {found.there}, the notebook's is {found.here}: {found.why}"
        return f"{said}. `--python` names another one"
    if not facts.torch:
        return f"{own} has no torch: `--python` names the interpreter that has it"
    if found:
        wanted = f"{found.what}=={found.here.partition('+')[0]}"
        install = f"`pip install {wanted}` for {own}, or another `--python`"
        return f"{name} has {found.what} {found.there}, the notebook {found.here}: {install}"
    return ""


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
