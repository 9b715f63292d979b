"""Tests of `nbdist.world.remote_call`: functions and scripts on all ranks, and their input."""

from __future__ import annotations

import functools
import io
import os
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import nbdist
from nbdist.errors import RanksReleased, UsageError, VariableNotSent, WorkerError
from nbdist.output.screen import Screen
from nbdist.wire.work import ProgramKind
from nbdist.world.moving_line import REDRAW_SECONDS, MovingLine
from nbdist.world.remote_call import find_script, title_of
from nbdist.world.task_error import error_of
from nbdist.world.world import World
from tests.cells import Write, said
from tests.waiting import once, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)

N = 2


@pytest.fixture
def main(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The namespace of a script's `__main__`, in which tests run code by `exec`."""
    module = types.ModuleType("__main__")
    module.__file__ = "/somewhere/script.py"
    monkeypatch.setitem(sys.modules, "__main__", module)
    before, world.engine.names.namespace = world.engine.names.namespace, vars(module)
    yield vars(module)
    world.engine.names.namespace = before  # not in the old `names`: a restart makes a new object


def my_rank(*args: Any, plus: int = 0) -> int:
    return int(os.environ["RANK"]) + sum(args) + plus


class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def add(self, more: int) -> int:
        return my_rank(self.amount, more)

    __call__ = add


def closure(amount: int) -> Callable[[int], int]:
    return lambda more: my_rank(amount, more)


def test_calls_and_gathered_values_are_no_cells(world: World) -> None:
    """IPython does not count calls and gathers as cells, but runs `post_execute` after a call."""
    world.execute(
        "cells, shown, events = [], [], get_ipython().events\n"
        "events.register('pre_run_cell', lambda info: cells.append(info.raw_cell))\n"
        "events.register('post_execute', lambda: shown.append(1))\n"
        "inputs = len(In)"
    )
    world.run(my_rank)
    assert world.gather("len(cells), len(In) - inputs") == [(0, 0)] * 2
    assert world.gather("len(shown)") == [2] * 2  # after the first cell and after the call


def test_any_callable_runs_on_all_ranks(world: World) -> None:
    """Results come by rank, by machine and local rank, and in order; a title names the callable."""
    results = world.run(my_rank, 10, plus=5)
    assert (list(results), results.rank(1), results.errors) == ([15, 16], 16, {})
    assert results.index(socket.gethostname(), 0) == 15
    for function, title in (
        (functools.partial(my_rank, 3), "my_rank"),
        (Adder(3).add, "Adder.add"),
        (Adder(3), "Adder"),
        (closure(3), "<lambda>"),
    ):
        assert (list(world.run(function, 4)), title_of(function)) == ([7, 8], title)


def scale_by(x: int, *, rank: int = 1) -> int:
    return x * rank


def return_options(**options: int) -> dict[str, int]:
    return options


def test_a_function_with_an_argument_rank_gets_it_by_partial(world: World) -> None:
    """An ambiguous `rank=` is refused; the error says how to pass it on and how to select ranks."""
    for function, name, value in (
        (scale_by, "rank", 1),
        (return_options, "rank", 0),
        (return_options, "ranks", [0]),
        (functools.partial(scale_by, 3), "rank", 1),
        (scale_by, "rank", None),
    ):
        with pytest.raises(UsageError) as caught:
            world.run(function, **{name: value})
        title = title_of(function)
        assert str(caught.value) == (
            f"`{name}={value!r}` selects ranks, but `{title}` can take a `{name}` too. "
            f"`run(functools.partial({title}, {name}=...))` passes it to the function, "
            f"`run(lambda: {title}(...), {name}={value!r})` selects ranks."
        )
    assert dict(world.run(functools.partial(scale_by, rank=5), 2, rank=-1)) == {1: 10}
    assert dict(world.run(lambda: scale_by(4), rank=0)) == {0: 4}
    assert dict(world.run(functools.partial(return_options, rank=7), rank=0)) == {0: {"rank": 7}}
    assert dict(world.run(scale_by, 3, ranks=[1])) == {1: 3}
    assert dict(world.run(scale_by, 3, ranks=None)) == {0: 3, 1: 3}


def first_of(values: list[int]) -> int:
    return values[0]


def test_values_go_to_the_ranks_of_a_call(world: World) -> None:
    """A call sends its rank a change of a value even if another rank has got the change before."""
    values = [5, 6]
    world.execute("kept = values", names={"values": values})
    values[0] = 9
    for rank in (0, 1):
        assert dict(world.run(first_of, values, rank=rank)) == {rank: 9}
        assert world.gather("kept[0]", rank=rank) == 9


@dataclass
class Fit:
    loss: float = field(init=False)


def test_results_of_any_shape_come_back(world: World) -> None:
    """An object that was made without arguments, or that contains itself, comes back unchanged."""

    def fit() -> tuple[Fit, list[Any]]:
        fit, kept = Fit(), list[Any]()
        fit.loss = 0.5
        kept.append(kept)
        return fit, kept

    fitted, kept = world.run(fit).rank(1)
    assert (fitted.loss, kept[0] is kept) == (0.5, True)


def test_options_are_checked_where_they_are_written() -> None:
    """A wrong option raises at the decorator, not at the first call, which may be hours later."""
    with pytest.raises(UsageError, match="`--cpus 0`: a number of cores"):
        nbdist.distributed(cpus=0)(my_rank)
    with pytest.raises(TypeError, match="bogus"):
        nbdist.distributed(bogus=1)(my_rank)


# --- the names of __main__ --------------------------------------------------------------


SCRIPT = """
import os
from pathlib import Path
K = 7
class Base:
    size = K
class Model(Base):
    def forward(self, x): return helper(x) + self.size
def helper(x): return x + K
def main(x): return Model().forward(x), Path(__file__).name
"""


def names_of(world: World) -> list[str]:
    """List the names in the workers' `__main__`."""
    first, second = world.gather("sorted(globals())")
    assert first == second
    return list(first)


def test_a_function_finds_the_names_that_it_uses(world: World, main: dict[str, Any]) -> None:
    """A function finds the worker's names, else the script's, and leaves no name on the worker."""
    exec(SCRIPT, main)
    before = names_of(world)
    assert list(world.run(main["main"], 1)) == [(15, "script.py")] * 2
    assert names_of(world) == before
    main["K"] = 8  # `helper` reads K anew; the ranks keep the class with `size` 7
    assert world.run(main["main"], 1).rank(0) == (16, "script.py")
    world.execute("counter = 10 + rank")
    exec("counter = rank = 99\ndef f(): return counter, rank", main)
    assert list(world.run(main["f"])) == [(10, 0), (11, 1)]
    exec("def g():\n    global counter\n    counter += 1", main)
    world.run(main["g"])
    assert world.gather("counter") == [11, 12]
    world.execute("del counter")


# --- memory is released -----------------------------------------------------------------


def maps_of_segments(world: World) -> list[str]:
    """List the shared memory that workers have mapped or hold open."""
    entries = []
    for pid in world.pids.values():
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        entries += [line for line in lines if "memfd:nbdist" in line]
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                entries += [str(fd)] if "memfd:nbdist" in os.readlink(fd) else []
    return entries


def fails_watched(tensor: torch.Tensor) -> None:
    """Fail after the frame and its locals were stored, as if another thread looked at the frame."""
    sys.watched_frame = sys._getframe()  # type: ignore[attr-defined]
    assert sys.watched_frame.f_locals["tensor"] is tensor  # type: ignore[attr-defined]
    try:
        raise KeyError("first")
    except KeyError:
        raise ValueError(f"of {len(tensor)}") from None


@pytest.mark.parametrize("function", [lambda tensor: tensor + 1, fails_watched])
def test_no_value_of_a_call_is_kept(world: World, function: Callable[[torch.Tensor], Any]) -> None:
    """Neither arguments nor results stay in the memory of workers, even if the function fails."""
    results, tensor = None, torch.ones(2**20)
    with suppress(ValueError):
        results = world.run(function, tensor)
    wait_until(lambda: not maps_of_segments(world), "no shared memory is held")
    assert results is None or torch.equal(results.rank(1), tensor + 1)


# --- errors -----------------------------------------------------------------------------


class Link:
    """A link of a chain, which pickle makes from its number and the next link."""

    def __init__(self, number: int, following: Link | None) -> None:
        self.number, self.following = number, following

    def __reduce__(self) -> Any:
        return Link, (self.number, self.following)

    def numbers(self) -> list[int]:
        return [self.number, *(self.following.numbers() if self.following else ())]


def keep(link: Link) -> list[int]:
    sys.kept = link  # type: ignore[attr-defined]
    return link.numbers()


@pytest.mark.parametrize("is_call", [True, False])
def test_a_deep_change_renews_all_objects_above(world: World, is_call: bool) -> None:  # noqa: FBT001
    """Each object that contains the changed object is made anew on the ranks, at any depth."""
    chain = last = Link(0, None)
    for number in range(1, 12):
        chain = Link(number, chain)
    for last.number in (0, 100):
        if is_call:
            numbers = world.run(keep, chain)
        else:
            world.execute("chain", names={"chain": chain})
            numbers = world.gather("chain.numbers()")
        assert [*numbers] == [[*range(11, 0, -1), last.number]] * 2


def test_an_unsendable_value_is_named_in_one_line(world: World) -> None:
    """A one-line error names the argument, before anything runs, or the part of the result."""
    running, lock = world.engine.task_table.last, threading.Lock()

    def train(model: Any, steps: int = 1) -> None: ...

    for call, words in (
        (lambda: world.run(train, lock), "`model` (thread lock)"),
        (lambda: world.run(train, 1, steps={"a": lock}), "`steps`: `steps['a']` (thread lock)"),
        (lambda: world.run(lambda: lock), ".<closure>.lock` (thread lock)"),
        (lambda: world.run(print, lock), "`args`: `args[0]` (thread lock)"),
    ):
        with pytest.raises(VariableNotSent) as caught:
            call()
        message = str(caught.value)
        assert words in message
        assert "nothing has run. Make it inside the function, or" in message
        assert "\n" not in message
    assert world.engine.task_table.last is running
    pattern = r"what <lambda> returned: `result\['a'\]\[1\]` \(generator\) cannot be sent back: how"
    with pytest.raises(WorkerError, match=pattern) as failed:
        world.run(lambda: {"a": [1, (i for i in ())]})
    assert "\n" not in str(failed.value)


def test_an_exception_group_ends_a_cell(world: World) -> None:
    """An exception group ends a cell like any other exception."""
    with pytest.raises(WorkerError, match="ExceptionGroup: two") as caught:
        world.execute("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])", ranks=[1])
    error = caught.value
    assert "| KeyError: 2" in error.__notes__[0]
    assert (error.rank, error.pid, [*error.errors]) == (1, world.pids[1], [1])


def test_ranks_that_wait_for_a_failed_rank_are_released(world: World) -> None:
    """The error says at which line of the function the released rank was waiting."""

    def meet() -> None:
        if my_rank() == 1:
            raise ValueError("bad")
        torch.distributed.barrier()

    line = meet.__code__.co_firstlineno + 3
    with pytest.raises(
        ValueError, match=rf"bad. Rank 0 was waiting in barrier \(line {line}\) and was released"
    ):
        world.run(meet)
    assert list(world.run(my_rank)) == [0, 1]


# --- input on ranks ---------------------------------------------------------------------


Enter = Callable[..., None]


def test_ranks_ask_in_order(world: World, enter: Enter, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts come in rank order, with the rank, below the output; end of input is EOFError."""
    enter("ada", "bob", "cy", "dan")
    world.execute("print('who?')\nname = input('name? '), input('next? ')")
    assert world.gather("name") == [("ada", "bob"), ("cy", "dan")]
    output = capsys.readouterr().out
    prompts = "[rank 0] name? [rank 0] next? [rank 1] name? [rank 1] next? "
    assert output == f"[0-1] who?\n{prompts}"
    enter("only one")
    world.execute("try:\n    said = input()\nexcept EOFError:\n    said = 'end'")
    assert world.gather("said") == ["only one", "end"]


def test_input_without_a_front_end_raises(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody can type, `input` raises an error with the remedy at once."""
    monkeypatch.setattr("sys.stdin", None)
    for source in ("input('name? ')", "breakpoint()\nx = 1"):
        with pytest.raises(WorkerError, match=r"need JupyterLab or a terminal.*variable"):
            world.execute(source)


def test_a_forked_child_cannot_read_input(world: World, enter: Enter) -> None:
    """In a forked child `input` raises, because the connection belongs to the rank itself."""
    enter("for the rank")
    world.execute(
        "import os\nr, w = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    try: input()\n"
        "    except BaseException as error: os.write(w, str(error).encode())\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\ntold, mine = os.read(r, 999).decode(), input()",
        ranks=[0],
    )
    child_error, typed = world.gather("(told, mine)", rank=0)
    assert child_error.startswith("a process forked by the rank cannot read input")
    assert typed == "for the rank"


# --- scripts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("file", "nope.py", "there is no script `nope.py` in /.+`-m nope.py` runs a module"),
        ("file", "wrong.py", "`wrong.py` is no Python: line 2: .+; nothing has run"),
        ("module", "folder/x.py", "give either a script or `-m module`.+`-m folder.x`"),
        ("module", "no.such", "there is no module of this name"),
        ("module", "folder", "it is a package without a `__main__` module"),
        ("executable", "no-such-thing", "there is no such executable on PATH"),
        ("executable", "wrong.py", r"on PATH. `./wrong.py` runs the one in this folder"),
        ("executable", "./wrong.py", "it is not executable. `!chmod"),
        ("executable", "./nope", "there is no such file"),
    ],
)
def test_a_wrong_program_is_refused(write: Write, kind: ProgramKind, name: str, words: str) -> None:
    """The error is a single line that says why a script, module or executable cannot run."""
    write("folder/__init__.py", "")
    write("wrong.py", "x = 1\nx = = 2\n")
    with pytest.raises(UsageError, match=words) as error:
        find_script(kind, name)
    assert "\n" not in str(error.value)


def test_finding_a_module_imports_nothing(write: Write) -> None:
    """Neither the module nor a package that contains the module is imported."""
    for name in ("loud/__init__.py", "loud/deep/mod.py", "loud/__main__.py"):
        write(name, "raise AssertionError")
    for name, file in (("loud", "loud/__main__.py"), ("loud.deep.mod", "loud/deep/mod.py")):
        assert find_script("module", name).file == str(Path(file).absolute())


TRAINER = """
import os, signal, sys, torch, torch.distributed as dist

path, count = sys.argv[3], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dies_at = [(4, 1), (7, 2), (-1, 0)][count]
dist.init_process_group("gloo")
model, epoch = torch.nn.Linear(4, 1), 0
if os.path.exists(path):
    found = torch.load(path)
    model.load_state_dict(found["model"])
    epoch = found["epoch"]
    print("resumes at", epoch)
while epoch < int(sys.argv[1]):
    for step in range(3):
        if (epoch, step, dist.get_rank()) == (*dies_at, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).sum().backward()
        for weight in model.parameters():  # DDP would import for seconds, in each new rank
            dist.all_reduce(weight.grad)
            weight.data -= 0.01 * weight.grad
            weight.grad = None
    epoch += 1
    if epoch % int(sys.argv[2]) == 0 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "epoch": epoch}, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
print("done", epoch, count, os.environ["TORCHELASTIC_MAX_RESTARTS"])
dist.destroy_process_group()
"""


def test_trainer_with_snapshots_resumes_by_itself(world: World, write: Write) -> None:
    """A trainer that is killed twice in mid-epoch goes on from its last checkpoint each time."""
    path = write("trainer.py", TRAINER)
    before = dict(world.pids)
    result = world.run_script("trainer.py", 8, 2, path.with_suffix(".pt"), max_restarts=3)
    lines = [text.splitlines()[-2:] for text in said(result)]
    assert lines == [["resumes at 6", "done 8 2 3"]] * N
    assert world.pids[0] == before[0]
    assert world.pids[1] != before[1]
    counts = "os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS']"
    world.execute("import os")
    assert world.gather(counts) == [("0", "0")] * N


def test_a_script_runs_again_once_another_task_has_ended(
    world: World, write: Write, tmp_path: Path
) -> None:
    """After a death a script waits for other ranks' tasks, because healing needs all ranks."""
    end = tmp_path / "may-end"
    waits = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
    other = world.submit(world.task(waits, ranks=[0]))
    count = "os.environ['TORCHELASTIC_RESTART_COUNT']"
    write("dies.py", f"import os\nif {count} == '0': os._exit(3)\nprint('attempt', {count})")

    def has_died() -> bool:
        running = world.engine.task_table.last
        return running is not None and 1 in running.transcript.deaths

    with once(has_died, end.touch):
        assert world.run_script("dies.py", ranks=[1], max_restarts=1).stdout == {1: "attempt 1\n"}
    for _ in world.follow(other):
        pass
    assert error_of(other) is None


def test_a_failed_script_runs_again_within_its_limit(world: World, write: Write) -> None:
    """A script runs again up to `max_restarts` times, but never after ranks waited in vain."""
    counts = "import os\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    write("waits.py", f"{counts}dist.barrier()")
    with pytest.raises(RanksReleased, match=r"rank 1 waits in barrier, waits.py line 3"):
        world.run_script("waits.py", ranks=[1], max_restarts=3)
    assert said(world.engine.task_table.last) == ["0"]
    write("fails.py", f"{counts}raise ValueError('bad')")
    with pytest.raises(ValueError, match="bad"):
        world.run_script("fails.py", max_restarts=1)
    failed = world.engine.task_table.last
    assert (said(failed), failed and failed.ending.restart_text) == (["1"] * N, "")


# --- a line that is redrawn -------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that shows its text as a terminal does."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        (screen := Screen()).write("stdout", self.getvalue())
        return [line.text for line in screen.tail(9)]


def test_a_moving_line_stays_one_line() -> None:
    """A moving line is redrawn at intervals and makes way for other lines; a file gets none."""
    line = MovingLine(terminal := Terminal())
    line.clear()
    line.show("[0-1] long 10%", 0.0)
    line.show("[0-1] 15%", REDRAW_SECONDS / 2)
    assert (terminal.shown(), line.is_due(REDRAW_SECONDS / 2)) == (["[0-1] long 10%"], False)
    line.show("[0-1] 20%", REDRAW_SECONDS)
    assert terminal.shown() == ["[0-1] 20%"]
    line.clear()
    terminal.write("a\n")
    line.show("[0-1] 30%", REDRAW_SECONDS)  # a cleared line is back at once
    assert terminal.shown() == ["a", "[0-1] 30%"]
    line.show("", 2 * REDRAW_SECONDS)
    assert terminal.shown() == ["a"]
    for stream in (log := io.StringIO(), types.SimpleNamespace()):  # possible values of sys.stdout
        MovingLine(stream).show("10%", 0.0)  # type: ignore[arg-type]
    assert log.getvalue() == ""


def test_a_script_runs_again_after_a_full_restart(new_world: NewWorld, tmp_path: Path) -> None:
    """A script whose death restarts all workers runs again in the new workers."""
    mark, script = tmp_path / "mark", tmp_path / "dies.py"
    script.write_text(
        f"import os, pathlib\nmark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists():\n    mark.touch()\n    os._exit(3)\nprint('again')\n"
    )
    with new_world(1, backend="none", on_failure="restart-all") as world:
        pids = dict(world.pids)
        assert world.run_script(str(script), max_restarts=1).stdout[0] == "again\n"
        assert world.pids != pids
