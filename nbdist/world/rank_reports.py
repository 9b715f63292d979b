"""The newest reports about the ranks of a running task: where they are, and what they use.

Runs in the notebook's process and does no I/O.  The agent sends the reports while the task runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nbdist.output.events import TransferProgress
from nbdist.wire.messages import Located, UnresponsiveHosts, UsageReport
from nbdist.wire.places import RankPosition
from nbdist.wire.status import Usage


class RankReports:
    """Where the ranks of a running task are, their memory, and their progress with big values.

    Both `places` and `present_places` have, by rank, the newest answer about where ranks are in
    their code.  `places` is empty from `record_request` until the next answer.  `present_places` is
    empty from an abort of collectives until the next answer, because the abort moves ranks on.
    """

    def __init__(self) -> None:
        self.places: Mapping[int, RankPosition] = {}
        self.present_places: Mapping[int, RankPosition] = {}
        # Where ranks were that the agent has killed, because several aborts have not ended their
        # waits.
        self.unwoken: Mapping[int, RankPosition] = {}
        self.requested_at = 0.0  # monotonic seconds; answers to earlier requests are ignored
        self.silent = UnresponsiveHosts((), 0.0)
        self.usage: Mapping[int, Usage] = {}
        self.moved: dict[int, TransferProgress] = {}  # see `bytes_moved`

    @property
    def is_stalled(self) -> bool:
        """Whether the network between two ranks is stalled."""
        return any(place.stalled for place in self.places.values())

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """The bytes of values that all ranks have packed so far, and the total to be packed."""
        moved = self.moved.values()
        return sum(each.done for each in moved), sum(each.total for each in moved)

    def record_request(self, now: float) -> None:
        """Record that the agent is asked at `now` where the ranks are, and empty `places`.

        Answers to earlier requests are ignored from then on.
        """
        self.places, self.requested_at = {}, now

    def handle(
        self, message: Located | UnresponsiveHosts | UsageReport, ranks: Collection[int]
    ) -> None:
        """Update the reports from a message of the agent; `ranks` are those of the task."""
        match message:
            case Located(places, requested_at) if requested_at >= self.requested_at:
                self.places = self.present_places = dict(places)
            case UnresponsiveHosts():
                self.silent = message
            case UsageReport(usage):  # a message covers the ranks of one machine
                self.usage = {**self.usage, **{r: each for r, each in usage.items() if r in ranks}}
