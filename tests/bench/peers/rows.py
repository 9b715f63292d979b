"""What each peer is asked: the cells that a user would run, and what is seen in the notebook."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.bench.lab import DONE, CellFailed, Lab, Notebook, Sent
from tests.bench.peers.adapters import RANKS, Peer

PATIENCE = 60.0
"""Seconds after which a tool is said not to give control back."""

STOP_AFTER = 3.0
ENDING = 15.0
"""Seconds in which what a notebook has started may end after it."""

CELLS = 20
LINES = 50_000
BIG = 64 * 1024 * 1024
"""Elements of a float32 tensor of 256 MiB."""

SUM = "value = torch.ones(1)\ndist.all_reduce(value)\nprint('sum', value.item(), 'of rank', rank)"


class Answer(NamedTuple):
    """What stands in the table; the number in it; why it is a no."""

    text: str
    value: float | None = None
    reason: str = ""


NOTHING = Answer("-")
"""Of a tool that has no word for it."""


class Bench:
    """One peer in a fresh notebook kernel."""

    def __init__(self, lab: Lab, peer: Peer, python: Path) -> None:
        self.lab = lab
        self.peer = peer
        self._python = python
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        argv = [str(self._python), "-m", self.peer.kernel, "-f", "{connection_file}"]
        path = f"{self._python.parent}:{os.environ['PATH']}"
        environ = {"PATH": path, "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(RANKS)}
        notebook = self.lab.notebook(argv, environ, answer="answer")
        self.notebook: Notebook = self._stack.enter_context(notebook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start its ranks; CellFailed where they do not add up."""
        self.run(*self.peer.start, self.peer.everywhere(SUM), needs="sum 4.0")

    def run(self, *cells: str, needs: str = "", patience: float = PATIENCE) -> Sent:
        """Run cells; CellFailed where they take longer, or do not show what is needed."""
        sent = self.notebook.send(*cells)
        sent.may_fail = True
        self.notebook.wait(sent, DONE, patience)
        if needs and needs not in sent.raw:
            raise CellFailed(f"no {needs!r} in {sent.raw[-600:]!r}")
        return sent

    def everywhere(self, source: str, needs: str = "", patience: float = PATIENCE) -> Sent:
        """Run the source on all ranks."""
        return self.run(self.peer.everywhere(source), needs=needs, patience=patience)

    def others(self) -> list[int]:
        """The processes that it has started, without the notebook's kernel."""
        return [pid for pid in self.lab.processes() if pid != self.notebook.pid]


def _seconds(seconds: float) -> Answer:
    return Answer(f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s", seconds)


def _milliseconds(times: Iterable[float]) -> Answer:
    median = 1000 * statistics.median(times)
    return Answer(f"{median:.2g} ms" if median < 10 else f"{median:.0f} ms", median / 1000)


def first(bench: Bench) -> Answer:
    """From the first cell of a fresh kernel to the sum of all ranks."""
    cells = (*bench.peer.start, bench.peer.everywhere(SUM))
    return _seconds(bench.run(*cells, needs="sum 4.0").seconds)


def _after(cells_of: Callable[[Peer], Iterable[str]]) -> Callable[[Bench], Answer]:
    def measured(bench: Bench) -> Answer:
        cells = tuple(cells_of(bench.peer))
        if not cells:
            return NOTHING
        bench.start()
        return _seconds(bench.run(*cells, bench.peer.everywhere(SUM), needs="sum 4.0").seconds)

    return measured


def passing(bench: Bench) -> Answer:
    """A cell that does nothing."""
    bench.start()
    return _milliseconds([bench.everywhere("pass").seconds for _ in range(CELLS)])


def call(bench: Bench) -> Answer:
    """One small value of each rank in the notebook."""
    if not bench.peer.home:
        return NOTHING
    bench.start()
    source = "value = rank"
    bench.everywhere(source)
    cell = bench.peer.home.replace("SOURCE", repr(source))
    times = [bench.run(cell).seconds for _ in range(CELLS)]
    bench.run("print('came', sorted(came))", needs="came [0, 1, 2, 3]")
    return _milliseconds(times)


def lines(bench: Bench) -> Answer:
    """Each rank prints 50,000 lines: how long, how many are in no output, how many are mixed."""
    bench.start()
    sent = bench.everywhere(f"for i in range({LINES}): print(f'rank {{rank}} line {{i}} end')")
    text = bench.run("%dist_output").raw if bench.peer.name == "nbdist" else sent.raw
    shown = text.replace("\\n", "\n").splitlines()
    wanted = {f"rank {rank} line {i} end" for rank in range(RANKS) for i in range(LINES)}
    whole = wanted & {line.strip() for line in shown}
    parts = sum("rank " in line and line.strip() not in wanted for line in shown)
    lost = len(wanted) - len(whole)
    return Answer(f"{sent.seconds:.1f} s, {lost} lost, {parts} mixed", sent.seconds)


def out(bench: Bench) -> Answer:
    """256 MiB of the notebook on all ranks."""
    if not bench.peer.out:
        return NOTHING
    bench.start()
    bench.run(f"import torch; value = torch.ones({BIG})")
    seconds = bench.run(bench.peer.out).seconds
    if bench.peer.keeps:
        bench.everywhere("print('size', value.numel(), 'of', rank)", needs=f"size {BIG}")
    return _seconds(seconds)


def home(bench: Bench) -> Answer:
    """256 MiB of each rank in the notebook."""
    if not bench.peer.home:
        return NOTHING
    bench.start()
    source = f"value = torch.ones({BIG})"
    bench.everywhere(source)
    seconds = bench.run(bench.peer.home.replace("SOURCE", repr(source))).seconds
    bench.run("print('came', [each.numel() for each in came])", needs=f"came [{BIG}, {BIG}")
    return _seconds(seconds)


def raising(bench: Bench) -> Answer:
    """Rank 1 raises while the others wait for it in a barrier."""
    return _trouble(bench, "if rank == 1: raise ValueError('bad shard')\ndist.barrier()")


def killed(bench: Bench) -> Answer:
    """Rank 1 is killed while the others wait for it in a barrier."""
    source = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    return _trouble(bench, source)


def stop(bench: Bench) -> Answer:
    """Stop is pressed while three ranks wait in a barrier for one that sleeps."""
    source = "import time\nif rank == 1: time.sleep(600)\ndist.barrier()"
    return _trouble(bench, source, stop=True)


def _trouble(bench: Bench, source: str, *, stop: bool = False) -> Answer:
    """Seconds until the notebook's next cell runs, and what of the ranks there is then."""
    bench.start()
    bench.everywhere("kept = 42 + rank")
    sent = bench.notebook.send(bench.peer.everywhere(source))
    sent.may_fail = True
    pressed = 0.0
    if stop and not bench.notebook.look(sent, DONE, STOP_AFTER):
        pressed = time.perf_counter() - sent.started
        bench.notebook.interrupt()
    bench.notebook.wait(sent, DONE, PATIENCE)
    seconds = max(0.0, sent.seconds - pressed)
    return Answer(f"{seconds:.1f} s, {_state(bench)}", seconds, sent.raw[-300:])


def _state(bench: Bench) -> str:
    """Whether the group works and the other ranks' variables are there, a cell later."""
    try:
        bench.everywhere(SUM, needs="sum 4.0", patience=20)
    except CellFailed:
        return "group lost"
    shown = bench.everywhere("print('kept', globals().get('kept', 'lost'), 'of', rank)").raw
    kept = [rank for rank in range(RANKS) if f"kept {42 + rank} of {rank}" in shown]
    return "all kept" if len(kept) == RANKS else f"kept on {len(kept)} of {RANKS}"


def memory(bench: Bench) -> Answer:
    """What a rank costs: the proportional set size of all processes but the notebook's kernel."""
    if not bench.peer.keeps:
        return NOTHING
    bench.start()
    total = sum(map(_proportional, bench.others()))
    return Answer(f"{total / RANKS / 1e6:.0f} MB", total / RANKS)


def _proportional(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # it has just ended
    return 1024 * int(rollup.partition("\nPss:")[2].split()[0])


def leftovers(bench: Bench) -> Answer:
    """What is still there 15 seconds after the notebook's kernel was killed, while a cell ran."""
    bench.start()
    bench.notebook.send(bench.peer.everywhere("import time; time.sleep(600)"))
    time.sleep(STOP_AFTER)  # this is what is measured: ranks at work
    os.kill(bench.notebook.pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDING
    while bench.others() and time.monotonic() < deadline:
        time.sleep(0.2)
    count = len(bench.others())
    return Answer(f"{count} processes" if count else "none", count)


def _shows(source: str, *signs: str) -> Callable[[Bench], Answer]:
    """Whether what all ranks show reaches the notebook."""

    def asked(bench: Bench) -> Answer:
        bench.start()
        shown = bench.everywhere(source).raw
        missing = [sign for sign in signs if sign not in shown]
        return Answer("no", reason=f"no {missing} in {shown[-600:]}") if missing else Answer("yes")

    return asked


def _of_ranks(text: str) -> tuple[str, ...]:
    return tuple(text.format(rank=rank) for rank in range(RANKS))


FIGURE = "import matplotlib; matplotlib.use('module://matplotlib_inline.backend_inline')\n"
FIGURE += "import matplotlib.pyplot as plt; plt.plot([rank, 1]); plt.show()"
MARKDOWN = "from IPython.display import Markdown, display; display(Markdown(f'**bold {rank}**'))"
WIDGET = "import ipywidgets; from IPython.display import display; display(ipywidgets.IntSlider())"
BAR = "import time, sys\nfrom tqdm import tqdm\n"
BAR += "for _ in tqdm(range(20), file=sys.stderr, desc=f'bar {rank}'): time.sleep(0.05)"
STDERR = "import sys; sys.stderr.write(f'error of {rank}\\n')"
C_OUTPUT = "import os; os.write(1, f'bytes of {rank}\\n'.encode())"
INPUT = "if rank == 0: print('told', input('name? '))"

ROWS: dict[str, Callable[[Bench], Answer]] = {
    "first result": first,
    "second start": _after(lambda peer: peer.again),
    "restart": _after(lambda peer: peer.restart),
    "`pass`": passing,
    "a value of each rank": call,
    "4 x 50,000 lines": lines,
    "256 MiB to all ranks": out,
    "256 MiB from each rank": home,
    "a rank raises, others wait": raising,
    "Stop in a barrier": stop,
    "a rank is killed": killed,
    "memory for a rank": memory,
    "left after SIGKILL": leftovers,
    "figure": _shows(FIGURE, "image/png"),
    "Markdown": _shows(MARKDOWN, "text/markdown"),
    "widget": _shows(WIDGET, "application/vnd.jupyter.widget-view+json"),
    "tqdm": _shows(BAR, *_of_ranks("bar {rank}: 100%")),
    "stderr": _shows(STDERR, *_of_ranks("error of {rank}")),
    "output of C": _shows(C_OUTPUT, *_of_ranks("bytes of {rank}")),
    "input()": _shows(INPUT, "told answer"),
}
