"""The cell of a pool that nobody waits for: who takes its steps, and what Stop does to it.

On IPython's own thread, between cells and while others wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import Interrupted
from nbdist.notebook.stops import counted_stops
from nbdist.world.following import TICK

if TYPE_CHECKING:
    from nbdist.notebook.display import CellDisplay
    from nbdist.notebook.idle import IdleWatch
    from nbdist.notebook.job import Job
    from nbdist.notebook.stops import IdleStop


class Background:
    """What one pool runs that was sent with `--no-wait`; one cell at a time."""

    def __init__(self, idle: IdleWatch, stop: IdleStop) -> None:
        self._idle = idle
        self._stop = stop
        self._job: Job | None = None

    def __repr__(self) -> str:
        return f"<Background {self._job}>"

    @property
    def job(self) -> Job | None:
        """The cell, while it runs."""
        return self._job if self._job is not None and not self._job.has_ended else None

    def begin(self, job: Job) -> None:
        """Have the event loop take its steps from now on, and Stop interrupt it."""
        self._job = job
        self._idle.goes_on = True

    def wait(self, display: CellDisplay) -> None:
        """Wait until the workers are free; Stop ends the waiting, not what is waited for."""
        job, said = self.job, ""
        if job is None:
            return
        with counted_stops() as stops:
            while not (job.has_ended or stops.count):
                text = _waits_text(job)
                if not said or (display.can_change and said != text):
                    said = text
                    display.wait_for(text)
                job.step(TICK)
        if stops.count and not job.has_ended:
            raise Interrupted((), fate=f"This cell has not run; {job.runs_on}")

    def take_failure(self) -> str:
        """Say once that the last one failed, where nobody has waited for it; else ""."""
        job, self._job = self._job, self.job
        return "" if job is None or not job.has_ended else job.take_unheard()

    def show(self) -> Job | None:
        """Show what it has said meanwhile, as part of the cell that runs now.

        Returns it where it has ended between cells: nbclient takes that for nobody's, so it is
        to be drawn again.
        """
        job = self._job
        if job is None:
            return None
        job.step()
        return job if job.has_ended and job.take_drawn_between() else None

    def take_step(self) -> bool:
        """Take in what it has said, between cells; whether it goes on."""
        if (job := self.job) is not None and self._idle.loop is not None:
            self._stop.watch(self._idle.loop, self.stop)
            job.step(in_its_cell=True)
        if self.job is None:
            self._idle.goes_on = False
            self._stop.clear(self.stop)
        return self._idle.goes_on

    def go_on(self) -> None:
        """Go on on the event loop of a terminal's prompt."""
        self._idle.goes_on = self.job is not None

    def stop(self) -> None:
        """Do what Stop does while no cell runs."""
        if (job := self.job) is not None:
            job.running.stops += 1
            self.take_step()

    def lose(self, why: str) -> None:
        """Take no more steps: its workers are gone."""
        self._stop.clear(self.stop)
        if self._job is not None:
            self._job.lose(why)


def _waits_text(job: Job) -> str:
    return (
        f"Waiting for {job.title} ({job.seconds:.0f} s). "
        "Stop cancels this cell only; that one keeps running."
    )
