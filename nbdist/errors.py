"""Errors that nbdist raises for its users.

Every process may import this file, which imports of nbdist only `nbdist.words`.  The constructors
of most classes take facts and write the text; `NbdistError` and `UsageError` take a finished text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, TypeVar

from nbdist.words import LACKED_MEMORY, count, format_ranks, name_ranks, one_line, word_exit

E = TypeVar("E", bound=BaseException)

START_LOG_LINES = 20

NO_VARIABLES_LOST = "; no variables were lost"

MEAN_N = ("workers", "num_workers", "nprocs", "num_processes", "nproc_per_node", "world_size")
"""Arguments of other libraries that mean the number of workers, as `n` does here."""


class NbdistError(Exception):
    """An error of nbdist, which IPython shows without a traceback."""

    def add(self, sentence: str) -> None:
        """Add a sentence to the message, such as what nbdist did about the error."""
        self.args = (f"{str(self).rstrip('.')}. {sentence[:1].upper()}{sentence[1:]}",)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows; `InteractiveShell.showtraceback` calls this."""
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"]

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would call the constructor with the message, but constructors here
        # take other arguments and make the message from them.
        return rebuild, (type(self), self.args), self.__dict__


def rebuild(kind: type[NbdistError], args: tuple[object, ...]) -> NbdistError:
    """Make an error without calling its constructor; unpickling an error calls this function."""
    error = kind.__new__(kind)
    error.args = args
    return error


def bare(kind: type[E], *args: object) -> E:
    """Make an exception of a class without running any code of the class.

    Only `__new__` of the builtin base class is called, such as `ValueError.__new__`.  Raises
    TypeError if the class has a `__new__` that is written in C or Rust.
    """
    base: Any = kind
    while base.__module__ != "builtins":
        base = base.__base__
    made: E = base.__new__(kind, *args)
    return made


# --- what was typed -------------------------------------------------------------------


class UsageError(NbdistError):
    """A command or call cannot be carried out, usually because of what the user has typed."""


class BadTopology(UsageError):
    """An option that describes the world has an impossible value."""

    def __init__(self, option: str, text: str, why: str, forms: str) -> None:
        super().__init__(f"`{option} {text}`: {why}. {forms}")


class UnknownArgument(UsageError, TypeError):
    """A function was called with an unknown argument; `names` are the arguments that it knows."""

    def __init__(self, function: str, name: str, names: Collection[str] = ()) -> None:
        near = ["n"] if name in MEAN_N else get_close_matches(name, names, 1)
        meant = f": did you mean `{near[0]}`?" if near else "."
        super().__init__(
            f"`{function}`: there is no argument `{name}`{meant} `help({function})` shows all."
        )


class NoValue(UsageError, KeyError):
    """A cell's result was asked for the value of a rank that has none; `ranks` have values."""

    __str__ = Exception.__str__  # `KeyError.__str__` would write the message in quotes

    def __init__(self, rank: object, ranks: Iterable[int]) -> None:
        available = f"{name_ranks(some)} have one" if (some := [*ranks]) else "no rank has one"
        super().__init__(f"this result has no value of rank {rank}: {available}.")


class NotEnoughGpus(BadTopology):
    """The backend uses nccl, which needs a GPU for each rank, but there are too few GPUs."""

    def __init__(self, ranks: int, gpus: int, visible_devices: str | None) -> None:
        where = "" if visible_devices is None else f" (CUDA_VISIBLE_DEVICES={visible_devices})"
        shared = "`--share-gpus` for several on one (slow), or `--backend gloo`"
        remedy = f"`-n {gpus}`, {shared}." if gpus else "`--backend gloo`."
        Exception.__init__(
            self,
            f"{count(ranks, 'rank')} asked, {count(gpus, 'GPU')} visible{where}, and nccl needs "
            f"one for each rank. {remedy}",
        )


class BadRanks(UsageError):
    """A selection of ranks cannot be parsed, is empty, or names a rank that does not exist."""

    def __init__(self, text: str, world_size: int, why: str) -> None:
        existing = f"are ranks {format_ranks(range(world_size))}"
        super().__init__(
            f"`{text}` selects no ranks: {why}. "
            f"There {'is only rank 0' if world_size == 1 else existing}; "
            "select with `0`, `0,2-3`, `1:3`, `::2`, `-1` or `all`."
        )


class VariableNotSent(UsageError):
    """A variable that the cell uses cannot be sent to the workers.

    `path` leads to the part that cannot be sent, as in `loader.lock`.  `why` and `remedy` are
    phrases: "a thread lock belongs to one process", "make it in the cell".
    """

    def __init__(self, name: str, path: str, type_name: str, why: str, remedy: str) -> None:
        self.name = name
        culprit = f"`{name}`" if path == name else f"`{name}`: `{path}`"
        super().__init__(
            f"{culprit} ({type_name}) cannot be sent to the workers: {why}; nothing has run. "
            f"{_sentence(remedy)}"
        )


class WrongVersion(UsageError):
    """A library is installed in a version with which nbdist does not run."""

    def __init__(self, library: str, installed: str, required: str) -> None:
        required = ",".join(sorted(required.split(","), key=lambda part: (part[0] == "!", part)))
        super().__init__(
            f"nbdist does not run with {library} {installed}, so nothing was loaded: "
            f"`%pip install '{library}{required}'`, then restart the kernel."
        )


class WorldNotStarted(UsageError):
    """A command or function, named by `what`, needs workers, but none are running."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs workers, and none are running. "
            "A `%%distributed -n 4` cell or `%dist_init -n 4` starts them."
        )


class WorldSizeMismatch(UsageError):
    """A cell or magic asks for another number of workers than the world has."""

    def __init__(self, running: int, size: int, pool: str = "") -> None:
        """`size` is the requested number; `pool` is a name, "" for the default pool."""
        some = f", `-r {format_ranks(range(size))}` runs on some" if size < running else ""
        of = f" --pool {pool}" if pool else ""
        super().__init__(
            f"{_are_running(running)}. `%dist_scale{of} {size}` keeps their variables, "
            f"`%dist_restart{of} -n {size}` clears them{some}."
        )


class NoRuntimeFolder(UsageError):
    """No folder of the file system can hold the runtime folder of a world.

    `problems` maps the path of each folder that was tried to the reason why it is not usable.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        listed = "; ".join(f"{one_line(place, 50)}: {why}" for place, why in problems.items())
        super().__init__(
            f"no folder can hold the sockets of the workers ({listed}). "
            "Set XDG_RUNTIME_DIR to a folder with a short path and 1 MB of room."
        )


class NotEnoughMemory(UsageError):
    """Values cannot be sent, because they need more shared memory than is free.

    `where` is the machine or control group that has too little free memory.  Sizes are in bytes.
    """

    def __init__(self, size: int, where: str, limit: int, free: int) -> None:
        super().__init__(
            f"sending {size / 1e9:.2f} GB needs as much shared memory, but only {free / 1e9:.2f} "
            f"GB of the {limit / 1e9:.2f} GB that {where} may use are free. Load the data on the "
            "workers, send less, or raise the limit."
        )


class ForkedProcess(UsageError):
    """This process was forked from the notebook's process, to which the workers belong.

    `what` names the call that is refused.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: this process is a forked child of the notebook, and the workers belong to "
            "the notebook. Call it in the notebook itself; a new `nbdist.World(n)` works here too."
        )


class WorldBusy(UsageError):
    """Ranks are still running an earlier cell or call, perhaps of another thread."""

    def __init__(self, ranks: Iterable[int], seconds: float) -> None:
        ranks = [*ranks]
        verb = "is" if len(ranks) == 1 else "are"
        super().__init__(
            f"{name_ranks(ranks)} {verb} still running an earlier cell or call ({seconds:.1f} s)."
            " Wait for it: a rank runs one cell or call at a time, and the process group can only"
            " be formed again while no rank runs any. `%dist_interrupt`, or `world.interrupt()` in"
            " Python, stops it."
        )


class RanksNotStopped(UsageError):
    """Ranks are still running a cell that was stopped: they clean up, ignore Stop, or are slow."""

    def __init__(self, ranks: Iterable[int], doing: str = "", *, is_safe: bool = False) -> None:
        """`doing` says where the ranks are.

        `is_safe` is True if the agent kills the ranks only after another Stop.
        """
        ranks = [*ranks]
        is_one = len(ranks) == 1
        verb, them, their = ("has", "it", "its") if is_one else ("have", "them", "their")
        kept = NO_VARIABLES_LOST
        if not is_safe:
            kept = f", and may have to be ended, with {their} variables"
        super().__init__(
            f"{name_ranks(ranks)} {verb} not stopped yet{f' ({doing})' if doing else ''}"
            f"{kept}. The next cell there waits for {them}; `%dist_interrupt` presses Stop again"
            f"{f', which may end {them}' if is_safe else ''}, and "
            f"`%dist_restart -r {format_ranks(ranks)}` restarts {them}."
        )


class WorldBroken(UsageError):
    """The process group of the ranks is lost, and the ranks could not form a new one."""

    def __init__(self, why: str, kept: str = "") -> None:
        """`kept` names the variables that ranks get back as soon as the group is formed."""
        promise = f", and gives back {kept}" if kept else ""
        super().__init__(
            f"the workers could not rebuild their process group: {why}. The next cell tries "
            f"again{promise}; `%dist_restart` restarts all workers, and their variables are lost."
        )


# --- what happened --------------------------------------------------------------------


class StartError(NbdistError):
    """A worker, or an agent if `rank` is None, could not start, so the whole world was ended.

    If the reason alone does not say enough, the message also has the command, and the last lines of
    its log.
    """

    def __init__(
        self, rank: int | None, host: str, command: str, why: str, log_lines: Sequence[str] = ()
    ) -> None:
        self.rank, self.host, self.command = rank, host, command
        self.log_lines = tuple(log_lines[-START_LOG_LINES:])
        if not command:  # the reason says all: the command and its log would not explain more
            super().__init__(f"the workers could not start: {why.rstrip('.')}.")
            return
        who = "the agent" if rank is None else f"rank {rank}"
        log_intro = "its last lines:" if self.log_lines else "it left no output."
        first = f"{who} on {host} could not start: {why}. Started with `{command}`; {log_intro}"
        super().__init__("\n".join([first, *(f"    {line}" for line in self.log_lines)]))


class CodeNotSent(NbdistError):
    """The notebook's folder could not be copied to a node; nothing has run."""

    def __init__(self, host: str, why: str) -> None:
        """`host` is the node; "" if the reason is on the notebook's machine."""
        where = f" to {host}" if host else ""
        super().__init__(f"`--sync-code` could not bring the notebook's folder{where}: {why}.")


class ScaleError(NbdistError):
    """The number of workers could not be changed; the earlier workers keep their variables."""

    def __init__(self, size: int, requested: int, why: str) -> None:
        super().__init__(
            f"the world could not be scaled to {requested}: {one_line(why)}. "
            f"{_are_running(size)}, as before, with their variables."
        )


class RankFailure(Protocol):
    """The error that ended the cell on a rank: `Failure` or `Died` of `nbdist.output.events`."""

    @property
    def time_ns(self) -> int:
        """The time of the error in nanoseconds since 1970."""


class Blame(NamedTuple):
    """The rank, host and pid of a cell's earliest failure, and errors of the cell by rank."""

    rank: int
    host: str
    pid: int
    errors: Mapping[int, RankFailure]


class WorkerError(NbdistError):
    """The cell failed on at least one rank; the output of failed ranks has the tracebacks.

    If the rank that failed first raised ValueError, `except ValueError` catches this error too:
    `nbdist.world.result` makes the error an instance of a class that derives from WorkerError and
    ValueError.  If no such class is possible, `original` is a copy of the rank's exception, or None
    if no copy can be made.  `rank`, `host` and `pid` are those of the rank that failed first.
    `errors` has errors by rank; it can lack those that only follow from another rank's failure.
    """

    original: Exception | None = None

    def __init__(
        self, blame: Blame, ran: int, seconds: float, cause: tuple[str, str], who: str = ""
    ) -> None:
        """`ran` is the number of ranks that ran the cell; `cause` is a class name and a message.

        `who` names the rank of the earliest failure; "" stands for `rank N`.
        """
        self.rank, self.host, self.pid, self.errors = blame
        # IPython shows the class name of this error before the message: do not repeat it.
        name = "" if cause[0] == type(self).__name__ else cause[0]
        cause_text = ": ".join(filter(None, [name, one_line(cause[1])]))
        first = who or f"rank {self.rank}"
        if len(self.errors) > 1:
            failed = f"{name_ranks(self.errors)} failed, of {ran}; first: {first}"
        else:
            failed = f"{first} failed, of {ran}," if ran > 1 else f"{first} failed"
        super().__init__(f"{failed} after {seconds:.1f} s: {cause_text}")

    def show(self, *lines: str) -> None:
        """Add lines that Python and IPython show below the error."""
        self.add_note("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        return [*super()._render_traceback_(), *getattr(self, "__notes__", ())]


class WorkerDied(WorkerError):
    """The process of a rank died: it was killed, crashed or exited, or its machine was lost."""

    def __init__(
        self, blame: Blame, seconds: float | None, exit_code: int | None, end: str = ""
    ) -> None:
        """`seconds` is the time in the cell, None if no cell ran.

        `end` says how the process died, if more is known than the exit code.
        """
        self.rank, self.host, self.pid, self.errors = blame
        self.exit_code = exit_code
        when = "while no cell was running" if seconds is None else f"{seconds:.1f} s into the cell"
        who, ended = f"rank {blame.rank} on {blame.host}", end or word_exit(exit_code)
        NbdistError.__init__(self, f"{who} (pid {blame.pid}) {ended} {when}.")


class RanksReleased(WorkerError):
    """Ranks waited in collectives that could never complete, and were released."""

    def __init__(self, blame: Blame, why: str, recovery: str) -> None:
        """`why` says which ranks waited in vain.

        `recovery` says which ranks were restarted and which variables were damaged, or is "".
        """
        self.rank, self.host, self.pid, self.errors = blame
        NbdistError.__init__(
            self, f"{why}. The waiting ranks were released{'' if recovery else NO_VARIABLES_LOST}."
        )
        if recovery:
            self.add(recovery)


class CellTimeout(NbdistError, TimeoutError):
    """The cell took longer than `--timeout` allows, and nbdist has interrupted it, as Stop does."""

    def __init__(
        self, seconds: float, where: str, running: Iterable[int] = (), *, is_safe: bool = True
    ) -> None:
        """`where` says where the ranks were; `running` are the ranks that have not stopped.

        `is_safe` is True if no variables were lost, and if the agent kills the running ranks only
        after another Stop.
        """
        running, doing = [*running], f": {where}" if where else ""
        kept = NO_VARIABLES_LOST if is_safe else ""
        super().__init__(f"the cell was stopped by `--timeout {seconds:g}`{doing}{kept}.")
        if running:
            verb = "has" if len(running) == 1 else "have"
            self.add(f"{name_ranks(running)} {verb} not stopped yet; the next cell waits.")


class JobTimeout(NbdistError, TimeoutError):
    """A caller has waited for a cell of `--no-wait` up to a timeout, and the cell still runs."""

    def __init__(self, title: str, seconds: float, doing: str) -> None:
        where = f": {doing}" if doing else ""
        super().__init__(f"{title} is still running after {seconds:g} s{where}.")


class JobLost(NbdistError):
    """The workers of a cell of `--no-wait` ended during the cell; `why` says what ended them."""

    def __init__(self, title: str, seconds: float, why: str) -> None:
        super().__init__(f"{title} was lost after {seconds:.1f} s: {why}.")


class JobCancelled(NbdistError, CancelledError):
    """`Job.cancel` has ended a cell of `--no-wait`.

    `outcome` is a text such as "Stopped on ranks 0-3. No variables were lost."
    """

    def __init__(self, title: str, outcome: str) -> None:
        super().__init__(f"{title} was cancelled. {outcome}")


class ValueLost(NbdistError, LookupError):
    """A cell's last value cannot be fetched from some ranks.

    `how` is a phrase that says why, such as "is gone with its worker".
    """

    def __init__(self, ranks: Iterable[int], how: str) -> None:
        super().__init__(
            f"the last value of that cell on {name_ranks(ranks)} {how}. "
            "What a cell binds to a variable stays, and `%dist_gather variable` brings it."
        )


class LocalCellError(NbdistError):
    """A cell with `--here-too` raised `cause` in the notebook; `ran` is how many ranks ran it."""

    def __init__(self, cause: BaseException, ran: int) -> None:
        text = one_line(f"{type(cause).__name__}: {cause}")
        super().__init__(f"the cell raised in the notebook: {text}. {count(ran, 'rank')} ran it.")


class AgentLost(NbdistError):
    """The agent of a machine died, and its workers with it; `last_line` is from the agent's log."""

    def __init__(self, host: str, exit_code: int | None, last_line: str = "") -> None:
        is_why = (exit_code or 0) > 0 or last_line.startswith(LACKED_MEMORY)
        why = f" ({one_line(last_line)})" if last_line and is_why else ""
        super().__init__(
            f"the agent on {host} {word_exit(exit_code)}{why}, and its workers ended with it. "
            "`%dist_restart` starts new workers; the variables are lost."
        )


class Interrupted(KeyboardInterrupt):
    """Stop ended a cell on `ranks` or, without ranks, the start of workers or a wait."""

    def __init__(self, ranks: Iterable[int], outcome: str = "", damage: str = "") -> None:
        """`outcome` says which work Stop has not ended, or how ranks recover; "" for neither.

        `damage` says which variables are incomplete, or differ between ranks, after Stop.
        """
        message = "no workers were started."
        if outcome:
            message = " ".join(filter(None, ["Stopped.", _sentence(outcome), damage]))
        elif on := [*ranks]:
            message = f"Stopped on {name_ranks(on)}. {damage or 'No variables were lost.'}"
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[0m: {self}"]


# --- texts that several errors share --------------------------------------------------


def _are_running(number: int) -> str:
    return "1 worker is running" if number == 1 else f"{number} workers are running"


def _sentence(phrase: str) -> str:
    return f"{phrase[:1].upper()}{phrase[1:].rstrip('.')}."
