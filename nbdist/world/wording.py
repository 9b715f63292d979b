"""What is said of errors and of lines that are not shown, wherever they are shown."""

from __future__ import annotations

from nbdist.errors import one_line, word_exit
from nbdist.wire.outputs import Died, Failure
from nbdist.world.sgr import strip


def error_text(error: Failure | Died) -> str:
    """The error in one line: `ValueError: bad shard`, `process was killed by SIGKILL`."""
    match error:
        case Failure(name=name, message=message):
            line = one_line(strip(message))
            return f"{name}: {line}" if line else name
        case Died(exit_code=code):
            return f"the process {word_exit(code)}"


def traceback_text(failure: Failure) -> str:
    """The traceback as IPython prints it, colours and all."""
    return "\n".join(failure.traceback).strip("\n") or error_text(failure)


def in_log_only(lines: int, path: str | None = None) -> str:
    """`… 1,200 lines only in the log: logs/rank3.log`."""
    return f"… {lines_text(lines)} only in the log{f': {path}' if path else ''}"


def lines_text(number: int) -> str:
    """`1 line`, `1,200 lines`."""
    return f"{number:,} {'line' if number == 1 else 'lines'}"
