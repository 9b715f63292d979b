"""Which ranks of a task were released from collectives that could never complete, and why.

Runs in the notebook's process and does no I/O.  The agent decides which collectives to abort
(`nbdist.agent.supervisor`).
"""

from __future__ import annotations

from collections.abc import Mapping

from nbdist.output.events import Failure, Output
from nbdist.output.transcript import Transcript
from nbdist.wire.messages import Decided
from nbdist.wire.places import RankPosition
from nbdist.wire.work import Task
from nbdist.world import hangs


class Releases:
    """The ranks of a task whose waits in collectives were ended, and why.

    A wait ends if the agent aborts the rank's collectives, or if another rank closes the
    connections between them.  Then the rank raises torch's error about connections, or
    KeyboardInterrupt if the backend is nccl.  The user gets a short `Failure` instead.
    """

    def __init__(self, task: Task, transcript: Transcript) -> None:
        self.aborted: dict[int, RankPosition] = {}  # by rank: where its collectives were aborted
        self.why = ""  # why the agent has aborted collectives
        self.differing = ""  # which collective had tensors that differed between ranks
        self._task, self._transcript = task, transcript
        # By rank, torch's own errors about connections that another rank has closed.
        self._closed: dict[int, Failure] = {}

    def record_aborted(self, places: Mapping[int, RankPosition]) -> None:
        """Record that the agent aborts collectives; `places` has by rank where the ranks waited.

        Ranks that do not run the task are left out.
        """
        self.aborted |= {r: place for r, place in places.items() if r in self._task.ranks}

    def record_decision(self, decided: Decided, world_size: int) -> None:
        """Record that the agent has decided to abort collectives of the task, and write why."""
        self.aborted.update(decided.waiting)
        failed = {*self._transcript.errors, *decided.failed, *decided.waiting}
        self.differing = hangs.differing(decided.places)
        facts = self.aborted, decided.places, self._task.ranks, failed, world_size
        self.why = hangs.why_aborted(*facts)

    def shorten(self, rank: int, output: Output, *, is_stopping: bool) -> Output:
        """Return a short `Failure` if the output is an error that the rank's release has caused.

        Other outputs are returned as they are.
        """
        if not isinstance(output, Failure):
            return output
        # After an abort of collectives gloo raises its own error, and with nccl the worker
        # interrupts itself.
        has_interrupted_itself = (
            rank in self.aborted and not is_stopping and output.name == "KeyboardInterrupt"
        )
        if output.connections != "ended" and not has_interrupted_itself:
            return output
        if rank not in self.aborted:
            self._closed[rank] = output
        return self._shortened(rank, output)

    def update_reasons(self) -> None:
        """Update the short errors, once more is known about why other ranks failed."""
        for rank, failure in self._closed.items():
            track, explained = self._transcript[rank], self._shortened(rank, failure)
            if track.failure is not None and track.failure.message != explained.message:
                track.failure, track.version = explained, track.version + 1

    def _shortened(self, rank: int, failure: Failure) -> Failure:
        errors = self._transcript.errors.values()
        return hangs.shorten_error(failure, self.aborted.get(rank), self._task.script, errors)
