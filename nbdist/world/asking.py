"""Asks whoever sits at the notebook, or at a script's terminal, for what ranks want typed.

On the thread that follows the task.  `input` and `getpass` are those of this process: in a
kernel they open the front end's input box, in a terminal they read a line.
"""

from __future__ import annotations

import getpass
import time

from nbdist.errors import UsageError
from nbdist.world.running import RunningTask
from nbdist.world.sent import NOBODY
from nbdist.world.session import Session


def ask(session: Session, running: RunningTask, rank: int) -> None:
    """Have somebody type what this rank asks for, and send it; blocks as long as that takes.

    Where nobody can, the rank is told so.  KeyboardInterrupt is Stop: then nothing is sent.
    """
    request, prompt = running.prompts[rank], running.prompts.prompt(rank)
    while True:
        try:
            typed = getpass.getpass(prompt) if request.secret else input(prompt)
            answers = running.prompts.answers(rank, typed, session.size)
        except UsageError as error:
            prompt = f"{error} {running.prompts.prompt(rank)}"
            continue
        except EOFError:
            session.reply(running, {rank: None})
        # Without a box IPython raises NotImplementedError, without a stdin Python these.
        except (NotImplementedError, OSError, RuntimeError, ValueError):
            session.refuse(running, NOBODY)
        else:
            session.reply(running, answers)
        return


def next_to_ask(running: RunningTask) -> int | None:
    """Choose the rank that is to be answered now, if any."""
    return running.prompts.next(time.monotonic(), running.unfinished)
