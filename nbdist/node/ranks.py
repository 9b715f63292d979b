"""The workers of one machine: started together, made whole together, ended together."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nbdist.layout import gpus_of
from nbdist.node.calling_off import CallOff
from nbdist.node.logs import attempt_folder, drop_old_runs
from nbdist.node.nursery import has_imported_for
from nbdist.node.port import HeldPort
from nbdist.node.processes import Nursery, ProcessSource, Spawner
from nbdist.node.rank import Emit, Rank
from nbdist.wire.environ import torchrun_variables
from nbdist.wire.messages import (
    Healed,
    LivingGroups,
    RankStart,
    StartFailure,
    Starting,
    WorldSpec,
    WorldStarted,
    over_file,
)

START_TIMEOUT = 180.0
"""Seconds for all workers to import, bind and meet; a spawned world on a busy disk is slow."""

HEAL_TIMEOUT = 30.0
"""Seconds for survivors and new workers to meet."""

HEAL_TRIES = 3
"""As many times as further workers may die while that is under way."""

CHECK_TIMEOUT = 1.0
"""Seconds for a worker to say what its libraries lack; where it takes longer, nobody learns."""

LEAVE_GRACE = 0.5
"""Seconds that ranks have to run their exit handlers when the world is to have fewer."""


class Ranks:
    """All workers that an agent has; `all` has them by number.

    `emit` takes what they show, `tell` how their start goes on.
    """

    def __init__(
        self,
        runtime: Path,
        nursery: Nursery | None,
        emit: Emit,
        tell: Callable[[Starting], None],
    ) -> None:
        self.all: dict[int, Rank] = {}
        self._runtime = runtime
        self._nursery = nursery
        self._emit = emit
        self._tell = tell
        self._spawner = Spawner()
        self._port = HeldPort()
        self._spec: WorldSpec | None = None
        self._attempt = self._generation = self._born = 0
        self._logs: Path | None = None

    def __repr__(self) -> str:
        return f"<Ranks {sorted(self.all)} generation {self._generation}>"

    def close(self) -> None:
        """Let go of what is kept from world to world; the workers have been stopped."""
        self._spawner.close()
        self._port.close()

    def living(self, ranks: Iterable[int]) -> list[Rank]:
        """Those of them whose process is there and ready."""
        found = (self.all[rank] for rank in ranks if rank in self.all)
        return [rank for rank in found if rank.state in ("idle", "busy")]

    async def start(self, spec: WorldSpec) -> WorldStarted | StartFailure:
        """Start all ranks at once; when one fails, end the others."""
        self._spec = spec
        self._attempt += 1
        self._generation = self._born = 1
        source = self._source()
        self._logs = self._log_folder(spec)
        self.all = {number: self._rank(spec, number) for number in range(spec.world_size)}
        starts = {asyncio.ensure_future(rank.start(source)): rank for rank in self.all.values()}
        telling = [asyncio.ensure_future(self._tell_up(rank)) for rank in self.all.values()]
        done, pending = await asyncio.wait(
            starts, timeout=START_TIMEOUT, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in telling:
            task.cancel()
        failed = [start for start in done if start.exception()]
        if not failed and not pending:
            return WorldStarted(*self._whereabouts(), await self._lacks())
        late = failed or sorted(pending, key=lambda start: starts[start].rank)
        failure = self._start_failure(starts[late[0]], late[0].exception() if failed else None)
        for start in pending:
            start.cancel()
        if pending:
            await asyncio.wait(pending)
        await self.stop(grace=0.0)
        return failure

    async def _lacks(self) -> tuple[str, ...]:
        """What the libraries of the workers lack; all have the same ones."""
        answer = await self.all[0].ask({"do": "check"}, CHECK_TIMEOUT)
        return tuple(answer["lacks"]) if answer else ()

    async def _tell_up(self, rank: Rank) -> None:
        await rank.up.wait()
        self._tell(Starting(sum(each.up.is_set() for each in self.all.values())))

    async def heal(self) -> Healed:
        """Give all workers a group again, also where more of them die meanwhile."""
        assert self._spec is not None
        everybody = range(self._spec.world_size)
        for _ in range(HEAL_TRIES):
            problem = await self._form_anew(self._spec)
            if not problem or len(self.living(everybody)) == len(everybody):
                break
        return Healed(*self._whereabouts(), problem)

    async def scale(self, spec: WorldSpec) -> Healed:
        """Have as many workers as the spec says, or, where more cannot be had, as before."""
        assert self._spec is not None
        before, self._spec = self._spec, spec
        await self._end_from(spec.world_size, LEAVE_GRACE)
        healed = await self.heal()
        if not healed.problem or spec.world_size < before.world_size:
            return healed
        self._spec = before
        await self._end_from(before.world_size, 0.0)
        return replace(await self.heal(), not_scaled=healed.problem)

    async def _end_from(self, first: int, grace: float) -> None:
        """End the ranks from this one on."""
        leaving = [self.all.pop(number) for number in sorted(self.all) if number >= first]
        await asyncio.gather(*(rank.stop(grace) for rank in leaving))

    async def _form_anew(self, spec: WorldSpec) -> str:
        """Start those that are missing, and form a new generation of the group; a problem or ""."""
        self._generation += 1
        living = self.living(range(spec.world_size))
        missing = [number for number in range(spec.world_size) if self._has_lost(number)]
        ended = [self.all[number] for number in missing if number in self.all]
        await asyncio.gather(*(rank.stop(0.0) for rank in ended))
        sizes, groups = await self._groups(living)
        # Where all have a group of that size it is made whole, with what was made from it.
        if is_other := any(size != spec.world_size for size in sizes):
            self._born, groups = self._generation, LivingGroups({})
        new = [self._rank(spec, number, groups) for number in missing]
        self.all.update({rank.rank: rank for rank in new})
        form = {"do": "form", "generation": self._generation, **asdict(groups)}
        if is_other:
            form |= {"do": "scale", "world_size": spec.world_size, "threads": spec.threads}
            form |= {"newcomers": missing}
        with CallOff(over_file(self._store(), self._generation), living) as call_off:
            source = self._source()
            answers, starts = await asyncio.gather(
                asyncio.gather(
                    *(rank.ask(self._form_for(rank, form), HEAL_TIMEOUT) for rank in living)
                ),
                asyncio.gather(*(call_off.start(rank, source, HEAL_TIMEOUT) for rank in new)),
            )
        problems = [
            a.get("error", "") if a is not None else "a rank did not answer" for a in answers
        ]
        return next(filter(None, [*starts, *problems]), "")

    def _has_lost(self, number: int) -> bool:
        """Whether there is no living worker of this rank."""
        return not self.living([number])

    def _form_for(self, rank: Rank, form: Mapping[str, Any]) -> dict[str, Any]:
        """With what differs from rank to rank."""
        assert self._spec is not None
        return {**form, "environ": dict(self._orders(self._spec, rank.rank).environ)}

    async def _groups(self, living: Sequence[Rank]) -> tuple[set[int], LivingGroups]:
        """Of how many ranks the survivors' group is, and all others that they hold."""
        answers = await asyncio.gather(
            *(rank.ask({"do": "living"}, HEAL_TIMEOUT) for rank in living)
        )
        members: dict[str, tuple[int, ...]] = {}
        for answer in filter(None, answers):
            members.update({name: tuple(ranks) for name, ranks in answer["members"].items()})
        return {answer["world_size"] for answer in filter(None, answers)}, LivingGroups(members)

    def _source(self) -> ProcessSource:
        spec = self._spec
        if spec and spec.use_nursery and self._nursery and has_imported_for(spec.environ):
            return self._nursery
        return self._spawner

    def _whereabouts(self) -> tuple[dict[int, int], dict[int, str]]:
        """Process and log folder of each rank."""
        pids = {number: rank.pid for number, rank in self.all.items()}
        return pids, {number: str(rank.log.folder or "") for number, rank in self.all.items()}

    def _rank(self, spec: WorldSpec, number: int, living: LivingGroups | None = None) -> Rank:
        """One that has not been started."""
        return Rank(self._orders(spec, number, living), self._logs_of(number), self._emit)

    def _logs_of(self, number: int) -> Path | None:
        return self._logs and self._logs / str(number)

    def _orders(
        self, spec: WorldSpec, number: int, living: LivingGroups | None = None
    ) -> RankStart:
        token = secrets.token_hex(8)
        name = f"{self._runtime}/a{self._attempt}g{self._generation}r{number}"
        seat, logs = spec.seat(number), self._logs_of(number)
        error_file = str(logs / "error.json") if logs else f"{name}.error.json"
        return RankStart(
            rank=number,
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            world=spec,
            connection_file=f"{name}.json",
            token=token,
            store_path=str(self._store()),
            generation=self._generation,
            environ=torchrun_variables(spec, number, self._port.number, error_file),
            living=living,
            gpus=gpus_of(seat, spec.gpus, spec.per_node),
            born=self._born,
        )

    def _store(self) -> Path:
        return self._runtime / f"store{self._attempt}"

    def _log_folder(self, spec: WorldSpec) -> Path | None:
        if not spec.log_dir:
            return None
        root = Path(spec.log_dir)
        drop_old_runs(root)
        return attempt_folder(root / spec.name, self._attempt - 1)

    def _start_failure(self, rank: Rank, error: BaseException | None) -> StartFailure:
        reason = str(error) if error else f"it was not ready after {START_TIMEOUT:.0f} s"
        said = rank.last_lines
        if not said and self._nursery and self._source() is self._nursery:
            said = self._nursery.last_lines()
        return StartFailure(
            rank=rank.rank,
            host=socket.gethostname(),
            command=shlex.join(self._spec.command) if self._spec else "",
            reason=reason,
            last_lines=said,
        )

    async def stop(self, grace: float) -> None:
        ranks, self.all = self.all, {}
        if ranks:
            await asyncio.gather(*(rank.stop(grace) for rank in ranks.values()))
