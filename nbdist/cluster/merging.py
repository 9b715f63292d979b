"""What several nodes say, as one agent would say it; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nbdist.output.events import Clear, Died, Display, Failure, Text, Update
from nbdist.wire.messages import Outputs


def in_time_of_head(outputs: Outputs, offset_ns: int) -> Outputs:
    """Give failures the time of this machine's clock, by which those of all nodes are ordered."""
    if not any(isinstance(output, Failure | Died) for _, _, output in outputs.items):
        return outputs
    return Outputs(
        tuple(
            (rank, task, replace(output, time_ns=output.time_ns - offset_ns))
            if isinstance(output, Failure | Died)
            else (rank, task, output)
            for rank, task, output in outputs.items
        )
    )


def last_words(outputs: Outputs) -> Outputs:
    """Return what ranks had shown before their machine was lost, which may arrive after that.

    They have been reported dead by then: how a task ended there says nothing any more, and what
    their collectives raised is of a group that is being replaced.
    """
    shown = Text | Display | Update | Clear
    return Outputs(tuple(each for each in outputs.items if isinstance(each[2], shown)))


def shares(ranks: Iterable[int], node_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Group ranks by their nodes."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        if rank in node_of:
            found[node_of[rank]] = (*found.get(node_of[rank], ()), rank)
    return found
