"""What several nodes say, as one agent would say it; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nbdist.output.events import Died, Failure
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


def shares(ranks: Iterable[int], node_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Group ranks by their nodes."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        if rank in node_of:
            found[node_of[rank]] = (*found.get(node_of[rank], ()), rank)
    return found
