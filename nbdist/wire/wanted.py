"""What a world on many machines is asked to be, for the process that starts the agents.

The notebook makes it of the options (`nbdist.world.spec`), and hands it to the head's stdin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbdist.hosts import Host
from nbdist.topology import WorkerCount

LINK_TIMEOUT = 10.0
"""Seconds without one after which a machine counts as lost, unless the user says otherwise.

TCP sends what was lost again after 0.2, 0.6, 1.4, 3.0 and 6.2 s: a cable that is out for a second
may be silent for nearly three.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How many nodes and workers there shall be, and what a launcher needs to start agents.

    From `min_nodes` to `max_nodes` nodes, with None all that there are, have `per_node` workers
    each; with `workers` there are so many in all, one node after the other filled.  `backend`
    is None for what fits the nodes' GPUs.  `environ` is what goes along to each node, with
    secrets: it is in no text.
    """

    launcher: str
    hosts: tuple[Host, ...] = ()
    min_nodes: int = 1
    max_nodes: int | None = None
    per_node: WorkerCount = "auto"
    workers: int | None = None
    backend: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = "world"
    pool: str = "default"
    cwd: str = "/"
    python: str = ""
    wrap: tuple[str, ...] = ()
    fork: bool = True
    gpus: str | None = None
    cpus: int | None = None
    memory: str | None = None
    salloc: str | None = None
    address: str | None = None
    link_timeout: float = LINK_TIMEOUT
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    detach: bool = False
    sync_code: bool = False
