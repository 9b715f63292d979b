"""What the head of a world on several machines asks of the part that is on this one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from nbdist.agent.worker_group import WorkerGroup
from nbdist.topology import parse_gpus, usable_cores, visible_gpus
from nbdist.wire.node_messages import (
    CallOff,
    EndRanks,
    Form,
    GetClock,
    GetHeld,
    PartReply,
    PartRequest,
    Prepare,
    Reach,
    Renumber,
    StartPart,
)
from nbdist.wire.spec import WorldSpec


class PartCalls:
    """Answers the head; `address` is that of this machine by which others reach it."""

    def __init__(self, workers: WorkerGroup, address: str) -> None:
        self._workers = workers
        self._address = address

    def __repr__(self) -> str:
        return f"<PartCalls at {self._address} of {self._workers}>"

    async def answer(self, request: PartRequest) -> PartReply:
        """Do what is asked, and return the reply."""
        match request:
            case GetClock():
                return time.time_ns()
            case Reach(targets):
                from nbdist.cluster.client import first_unreached

                return await first_unreached(targets)
            case StartPart(spec, ranks, attempt):
                return await self._workers.start_part(self._here(spec), ranks, attempt)
            case GetHeld():
                return await self._workers.held()
            case Prepare(spec, ranks):
                return await self._workers.prepare(self._here(spec), ranks)
            case Form(plan, ranks):
                return await self._workers.form(replace(plan, spec=self._here(plan.spec)), ranks)
            case CallOff(generation):
                await self._workers.call_off(generation)
            case EndRanks(ranks, grace):
                await self._workers.end(ranks, grace)
            case Renumber(became):
                await self._workers.renumber(became)
        return None

    def _here(self, spec: WorldSpec) -> WorldSpec:
        return spec_here(self._workers.code.moved(spec), os.environ, interface_of(self._address))


def spec_here(spec: WorldSpec, own: Mapping[str, str], interface: str) -> WorldSpec:
    """Make of the spec that all nodes share the one for this: its environment, folder and GPUs.

    The agent runs in the interpreter that workers are to have.
    """
    environ = {**own, **spec.environ}
    cwd = spec.cwd if Path(spec.cwd).is_dir() else str(Path.home())
    here, visible = max(1, len(spec.here)), visible_gpus(environ)
    return replace(
        spec,
        environ=environ,
        cwd=cwd,
        gpus=parse_gpus(spec.gpus_asked, visible) if spec.gpus_asked else visible,
        python=sys.executable,
        threads=spec.threads or max(1, usable_cores() // here),
        interface=interface or spec.interface,
    )


def interface_of(address: str) -> str:
    """Name the network interface that has this address, "" for none."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return name
    return ""
