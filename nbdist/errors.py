"""Every error that a user can meet: who, what, and what to do now.

Any process may import this; it stands on the lowest floor.  An error is worded here and nowhere
else: constructors take facts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, TypeVar

from nbdist.words import LACKED_MEMORY, count, format_ranks, name_ranks, one_line, word_exit

Made = TypeVar("Made", bound=BaseException)

START_LOG_LINES = 20

KEPT = "; no variables were lost"

MEAN_N = ("workers", "num_workers", "nprocs", "num_processes", "nproc_per_node", "world_size")
"""What others call the number of workers."""


class NbdistError(Exception):
    """What went wrong and what to do: IPython shows this one line, without a traceback."""

    def add(self, sentence: str) -> None:
        """Say more: what was done about it."""
        self.args = (f"{str(self).rstrip('.')}. {sentence[:1].upper()}{sentence[1:]}",)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows.  Called by `InteractiveShell.showtraceback`."""
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"]

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls the constructor with the message, but constructors
        # here take facts.
        return rebuild, (type(self), self.args), self.__dict__


def rebuild(kind: type[NbdistError], args: tuple[object, ...]) -> NbdistError:
    """Make one of this kind with these `args`, as pickles do."""
    error = kind.__new__(kind)
    error.args = args
    return error


def bare(kind: type[Made], *args: object) -> Made:
    """Make an exception by its class's builtin constructor; TypeError where there are two."""
    base: Any = kind
    while base.__module__ != "builtins":
        base = base.__base__
    made: Made = base.__new__(kind, *args)
    return made


# --- what was typed -------------------------------------------------------------------


class UsageError(NbdistError):
    """What was typed cannot be done; nothing has run."""


class BadTopology(UsageError):
    """An option that describes the world has no meaning."""

    def __init__(self, option: str, text: str, why: str, forms: str) -> None:
        super().__init__(f"`{option} {text}`: {why}. {forms}")


class UnknownArgument(UsageError, TypeError):
    """A function was called with an argument that it does not have; it has these `names`."""

    def __init__(self, function: str, name: str, names: Collection[str] = ()) -> None:
        near = ["n"] if name in MEAN_N else get_close_matches(name, names, 1)
        meant = f": did you mean `{near[0]}`?" if near else "."
        super().__init__(
            f"`{function}`: there is no argument `{name}`{meant} `help({function})` shows all."
        )


class NoValue(UsageError, KeyError):
    """A result has no value of this rank."""

    __str__ = Exception.__str__  # KeyError's is for keys

    def __init__(self, rank: object, ranks: Iterable[int]) -> None:
        there = f"{name_ranks(some)} have one" if (some := [*ranks]) else "no rank has one"
        super().__init__(f"this result has no value of rank {rank}: {there}.")


class NotEnoughGpus(BadTopology):
    """More ranks than GPUs were asked for with nccl, which needs one for each rank."""

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
    """A selection of ranks that cannot be read, or that names a rank that is not there."""

    def __init__(self, text: str, world_size: int, why: str) -> None:
        there = f"are ranks {format_ranks(range(world_size))}"
        super().__init__(
            f"`{text}` selects no ranks: {why}. "
            f"There {'is only rank 0' if world_size == 1 else there}; "
            "select with `0`, `0,2-3`, `1:3`, `::2`, `-1` or `all`."
        )


class VariableNotSent(UsageError):
    """A name that the cell uses cannot travel; `path` leads to the culprit, as in `loader.lock`.

    `why` and `remedy` are phrases: "a thread lock belongs to one process", "make it in the cell".
    """

    def __init__(self, name: str, path: str, type_name: str, why: str, remedy: str) -> None:
        self.name = name
        culprit = f"`{name}`" if path == name else f"`{name}`: `{path}`"
        super().__init__(
            f"{culprit} ({type_name}) cannot be sent to the workers: {why}; nothing has run. "
            f"{_sentence(remedy)}"
        )


class WrongVersion(UsageError):
    """A library is too old, or one of a few versions with a fault."""

    def __init__(self, library: str, found: str, wanted: str) -> None:
        wanted = ",".join(sorted(wanted.split(","), key=lambda part: (part[0] == "!", part)))
        super().__init__(
            f"nbdist does not run with {library} {found}, so nothing was loaded: "
            f"`%pip install '{library}{wanted}'`, then restart the kernel."
        )


class WorldNotStarted(UsageError):
    """There are no workers yet, and what was asked for needs some."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs workers, and none are running. "
            "A `%%distributed -n 4` cell or `%dist_init -n 4` starts them."
        )


class WorldSizeMismatch(UsageError):
    """Another number of workers was asked for than is running."""

    def __init__(self, running: int, asked: int, pool: str = "") -> None:
        """`pool` is named where it is not the default one."""
        some = f", `-r {format_ranks(range(asked))}` runs on some" if asked < running else ""
        of = f" --pool {pool}" if pool else ""
        super().__init__(
            f"{_are_running(running)}. `%dist_scale{of} {asked}` keeps their variables, "
            f"`%dist_restart{of} -n {asked}` clears them{some}."
        )


class NoRuntimeFolder(UsageError):
    """No place can hold the folder of a world's sockets; `problems` says why, by place."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        listed = "; ".join(f"{one_line(place, 50)}: {why}" for place, why in problems.items())
        super().__init__(
            f"no folder can hold the sockets of the workers ({listed}). "
            "Set XDG_RUNTIME_DIR to a folder with a short path and 1 MB of room."
        )


class NotEnoughMemory(UsageError):
    """Values to be sent do not fit into the memory of `where`; sizes are bytes."""

    def __init__(self, size: int, where: str, limit: int, free: int) -> None:
        super().__init__(
            f"sending {size / 1e9:.2f} GB needs as much shared memory, but only {free / 1e9:.2f} "
            f"GB of the {limit / 1e9:.2f} GB that {where} may use are free. Load the data on the "
            "workers, send less, or raise the limit."
        )


class ForkedProcess(UsageError):
    """The workers belong to the process that this one was forked from."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: this process is a forked child of the notebook, and the workers belong to "
            "the notebook. Call it in the notebook itself; a new `nbdist.World(n)` works here too."
        )


class WorldBusy(UsageError):
    """The workers have not finished what they were given before, perhaps by another thread."""

    def __init__(self, ranks: Iterable[int], seconds: float) -> None:
        ranks = [*ranks]
        verb = "is" if len(ranks) == 1 else "are"
        super().__init__(
            f"{name_ranks(ranks)} {verb} still running an earlier cell or call ({seconds:.1f} s)."
            " Wait for it: a world runs one cell or call at a time. `%dist_interrupt`, or"
            " `world.interrupt()` in Python, stops it."
        )


class RanksNotStopped(UsageError):
    """Ranks have not ended a cell that was stopped: they clean up, go on, or are slow."""

    def __init__(self, ranks: Iterable[int], doing: str = "", *, is_safe: bool = False) -> None:
        """`doing` says where they are; with `is_safe` they are not ended but by another Stop."""
        ranks = [*ranks]
        is_one = len(ranks) == 1
        verb, them, their = ("has", "it", "its") if is_one else ("have", "them", "their")
        super().__init__(
            f"{name_ranks(ranks)} {verb} not stopped yet{f' ({doing})' if doing else ''}"
            f"{KEPT if is_safe else f', and may have to be ended, with {their} variables'}. "
            f"The next cell waits for {them}; `%dist_interrupt` presses Stop again"
            f"{f', which may end {them}' if is_safe else ''}, and "
            f"`%dist_restart -r {format_ranks(ranks)}` restarts {them}."
        )


class WorldBroken(UsageError):
    """The ranks share no group any more, and could not form one anew."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the workers could not rebuild their process group: {why}. The next cell tries again; "
            "`%dist_restart` restarts all workers, and their variables are lost."
        )


# --- what happened --------------------------------------------------------------------


class StartError(NbdistError):
    """A worker could not start, or (`rank` None) an agent; nothing of the world is left.

    The one error with more than one line: the last lines of its log follow the first.
    """

    def __init__(
        self, rank: int | None, host: str, command: str, why: str, log_lines: Sequence[str] = ()
    ) -> None:
        self.rank, self.host, self.command = rank, host, command
        self.log_lines = tuple(log_lines[-START_LOG_LINES:])
        if not command:  # nothing has run that could have left lines
            super().__init__(f"the workers could not start: {why.rstrip('.')}.")
            return
        who = "the agent" if rank is None else f"rank {rank}"
        said = "its last lines:" if self.log_lines else "it left no output."
        first = f"{who} on {host} could not start: {why}. Started with `{command}`; {said}"
        super().__init__("\n".join([first, *(f"    {line}" for line in self.log_lines)]))


class CodeNotSent(NbdistError):
    """The notebook's folder could not be brought to a node; nothing has run."""

    def __init__(self, host: str, why: str) -> None:
        """`host` is "" where the notebook's machine itself is the reason."""
        where = f" to {host}" if host else ""
        super().__init__(f"`--sync-code` could not bring the notebook's folder{where}: {why}.")


class ScaleError(NbdistError):
    """More workers could not be had; those that were there before are as they were."""

    def __init__(self, size: int, asked: int, why: str) -> None:
        super().__init__(
            f"the world could not be scaled to {asked}: {one_line(why)}. "
            f"{_are_running(size)}, as before, with their variables."
        )


class RankFailure(Protocol):
    """What ended the cell on one rank: `Failure` or `Died` of `nbdist.output.events`."""

    @property
    def time_ns(self) -> int:
        """When, on that rank's clock."""


class Blame(NamedTuple):
    """Where the earliest failure of a cell was, and what ended it on each rank that failed."""

    rank: int
    host: str
    pid: int
    errors: Mapping[int, RankFailure]


class WorkerError(NbdistError):
    """The cell failed on some of the ranks that ran it; their output has the tracebacks.

    `except ValueError` catches it too, where that is what a rank raised (`nbdist.world.result`).
    `rank host pid` are those of the earliest failure, the cause; `errors` has every failed rank.
    `original` is raised in its place where no class can be derived from its own.
    """

    original: Exception | None = None

    def __init__(
        self, blame: Blame, ran: int, seconds: float, cause: tuple[str, str], who: str = ""
    ) -> None:
        """`ran` ranks ran the cell; `cause` is a class name and message; `who` names the rank."""
        self.rank, self.host, self.pid, self.errors = blame
        name = "" if cause[0] == type(self).__name__ else cause[0]  # it is shown before the line
        said = ": ".join(filter(None, [name, one_line(cause[1])]))
        super().__init__(
            f"{len(self.errors)} of {count(ran, 'rank')} failed ({format_ranks(self.errors)}); "
            f"first: {who or f'rank {self.rank}'} after {seconds:.1f} s: {said}"
        )

    def show(self, *lines: str) -> None:
        """Add lines that Python and IPython show under the error."""
        self.add_note("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        return [*super()._render_traceback_(), *getattr(self, "__notes__", ())]


class WorkerDied(WorkerError):
    """The process of a rank ended: killed, crashed, out of memory, or `os._exit`."""

    def __init__(
        self, blame: Blame, seconds: float | None, exit_code: int | None, end: str = ""
    ) -> None:
        """`seconds` into the cell; None when none ran.  `end` says more than the exit code."""
        self.rank, self.host, self.pid, self.errors = blame
        self.exit_code = exit_code
        when = "while no cell was running" if seconds is None else f"{seconds:.1f} s into the cell"
        who, ended = f"rank {blame.rank} on {blame.host}", end or word_exit(exit_code)
        NbdistError.__init__(self, f"{who} (pid {blame.pid}) {ended} {when}.")


class RanksReleased(WorkerError):
    """Ranks waited in collectives for what could never come."""

    def __init__(self, blame: Blame, why: str, fate: str) -> None:
        """`why` says who waited in what, and why in vain; `fate` who was restarted after that."""
        self.rank, self.host, self.pid, self.errors = blame
        NbdistError.__init__(self, f"{why}. The waiting ranks were released{'' if fate else KEPT}.")
        if fate:
            self.add(fate)


class CellTimeout(NbdistError, TimeoutError):
    """The cell took longer than `--timeout` allows, and was stopped as by Stop."""

    def __init__(
        self, seconds: float, where: str, late: Iterable[int] = (), *, is_safe: bool = True
    ) -> None:
        """`where` are its ranks; with `is_safe` the `late` ones are not ended but by Stop."""
        late, doing = [*late], f": {where}" if where else ""
        kept = KEPT if is_safe else ""
        super().__init__(f"the cell was stopped by `--timeout {seconds:g}`{doing}{kept}.")
        if late:
            verb = "has" if len(late) == 1 else "have"
            self.add(f"{name_ranks(late)} {verb} not stopped yet; the next cell waits.")


class JobTimeout(NbdistError, TimeoutError):
    """A cell that was sent with `--no-wait` has not ended in the time that was given to it."""

    def __init__(self, title: str, seconds: float, doing: str) -> None:
        where = f": {doing}" if doing else ""
        super().__init__(f"{title} is still running after {seconds:g} s{where}.")


class JobLost(NbdistError):
    """A cell that was sent with `--no-wait` ended with its workers; `why` says what ended them."""

    def __init__(self, title: str, seconds: float, why: str) -> None:
        super().__init__(f"{title} was lost after {seconds:.1f} s: {why}.")


class ValueLost(NbdistError, LookupError):
    """The last value of a cell cannot be had from these ranks; `how` says why: `is gone ...`."""

    def __init__(self, ranks: Iterable[int], how: str) -> None:
        super().__init__(
            f"the last value of that cell on {name_ranks(ranks)} {how}. "
            "What a cell binds to a variable stays, and `%dist_gather variable` brings it."
        )


class LocalCellError(NbdistError):
    """A cell that ran in the notebook too, by `--here-too`, raised there, as is shown above."""

    def __init__(self, cause: BaseException, ran: int) -> None:
        said = one_line(f"{type(cause).__name__}: {cause}")
        super().__init__(f"the cell raised in the notebook: {said}. {count(ran, 'rank')} ran it.")


class AgentLost(NbdistError):
    """The agent of a machine ended, and its workers with it; `last_line` is that of its log."""

    def __init__(self, host: str, exit_code: int | None, last_line: str = "") -> None:
        is_why = (exit_code or 0) > 0 or last_line.startswith(LACKED_MEMORY)
        why = f" ({one_line(last_line)})" if last_line and is_why else ""
        super().__init__(
            f"the agent on {host} {word_exit(exit_code)}{why}, and its workers ended with it. "
            "`%dist_restart` starts new workers; the variables are lost."
        )


class Interrupted(KeyboardInterrupt):
    """Stop ended the cell on these ranks, which keep their variables; or, of none, a start."""

    def __init__(self, ranks: Iterable[int], fate: str = "", damage: str = "") -> None:
        """`fate` says what became of the ranks instead, where they could not be interrupted.

        `damage` says which variables are incomplete or differ on the ranks since then.
        """
        said = "no workers were started."
        if fate:
            said = " ".join(filter(None, ["Stopped.", _sentence(fate), damage]))
        elif on := [*ranks]:
            said = f"Stopped on {name_ranks(on)}. {damage or 'No variables were lost.'}"
        super().__init__(said)

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[0m: {self}"]


# --- words that several errors share --------------------------------------------------


def _are_running(number: int) -> str:
    return "1 worker is running" if number == 1 else f"{number} workers are running"


def _sentence(phrase: str) -> str:
    return f"{phrase[:1].upper()}{phrase[1:].rstrip('.')}."
