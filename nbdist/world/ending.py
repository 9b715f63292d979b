"""How a task ended: a record with the facts and sentences for the task's error.

Runs in the notebook's process.  `TaskRun` and the modules that follow a task, such as
`nbdist.world.recovery`, write the record.  `nbdist.world.task_error` makes the error from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.errors import AgentLost


@dataclass(frozen=True, slots=True)
class Ending:
    """What ended a task, what the task has left on its ranks, and what was done about it.

    `timed_out` is None if the task's timeout has not expired.  Any other text is "" if there is
    nothing to say.  Add facts by `dataclasses.replace`:

        running.ending = replace(running.ending, recovery_text="Rank 2 was restarted.")
    """

    lost: AgentLost | None = None  # the agent has ended, and the ranks with it
    timed_out: str | None = None  # where unfinished ranks were when the timeout expired
    why_died: str = ""  # why gloo ended the process of a rank
    replicas_text: str = ""  # at which steps the ranks of a training ended, and the remedy
    incomplete_text: str = ""  # which variables may hold a part of a collective's result
    recovered_ranks: tuple[int, ...] = ()  # the ranks that died or were restarted
    recovery_text: str = ""  # what was done about `recovered_ranks`
    restart_text: str = ""  # why the task is run again; "" if it is not
    lacking_text: str = ""  # where to find a name, module or file that a rank lacked
    item_text: str = ""  # which item of `World.map` has failed

    @property
    def damage(self) -> str:
        """Sentences about variables that the task has left incomplete or different; "" for none."""
        return " ".join(filter(None, (self.incomplete_text, self.replicas_text)))
