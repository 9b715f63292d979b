"""Rows of the comparison: the cells that a user would run, and the answers in the notebook."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.bench.lab import DONE, CellFailed, Lab, Notebook, Sent
from tests.bench.peers.adapters import RANKS, RESTART, Peer
from tests.bench.starting import megabytes

PATIENCE = 60.0
"""Seconds after which a tool counts as not giving control back."""

STOP_AFTER = 3.0
LATE = 10.0
"""Seconds that a tool may be silent before it shows more of what a cell has printed."""

ENDING = 15.0
"""Seconds in which the processes of a killed notebook may end."""

CELLS = 20, 3  # for tools whose workers stay, and for those that start workers each time
LINES = 50_000
BIG = 64 * 1024 * 1024
"""Elements of a float32 tensor of 256 MiB."""

KEPT = "print(f'kept {globals().get(\"kept\")} of {rank}')"
LINE = re.compile(r"rank \d line \d+ end")
BEGUN = re.compile(r"rank \d (?=line|rank)")
SUM = "value = torch.ones(1)\ndist.all_reduce(value)\nprint(f'sum {value.item()} of rank {rank}')"


class Answer(NamedTuple):
    """The text in the table, its number, and the reason for a no."""

    text: str
    value: float | None = None
    reason: str = ""


NOTHING = Answer("-")
"""The answer of a tool that has no command for a row."""


class Bench:
    """A peer in a fresh notebook kernel."""

    def __init__(self, lab: Lab, peer: Peer, python: Path) -> None:
        self.lab = lab
        self.peer = peer
        self.cells = CELLS[not peer.keeps]
        self._python = python
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        peer, folder = self.peer, self.lab.folder / "registry"
        argv = [str(self._python), "-m", peer.kernel, "-f", "{connection_file}"]
        environ = {
            "PATH": f"{self._python.parent}:{os.environ['PATH']}",
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(RANKS),
            "JUPYTER_DISTRIBUTED_REGISTRY_FILE": str(folder / "kernel.json"),
        }
        if peer.server:
            command = [self._python, "-c", peer.server]
            server = subprocess.Popen(command, env=os.environ | environ)
            self._stack.enter_context(server)
            self._stack.callback(server.kill)
        notebook = self.lab.notebook(
            argv, environ, answer="answer", interrupt_mode=peer.interrupt_mode
        )
        self.notebook: Notebook = self._stack.enter_context(notebook)
        if peer.live:
            self.notebook.subscribe(peer.live)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start the peer's ranks; CellFailed unless their sum is right."""
        self.run(*self.peer.start, self.peer.everywhere(SUM), needs="sum 4.0")

    def run(self, *cells: str, needs: str = "", patience: float = PATIENCE) -> Sent:
        """Run several cells; CellFailed if they take too long, or do not show `needs`."""
        self.notebook.elsewhere.clear()
        sent = self.notebook.send(*cells)
        sent.may_fail = True
        self.wait(sent, patience)
        if needs not in self.all_of(sent, needs):
            raise CellFailed(f"no {needs!r} in {self.text(sent)}")
        return sent

    def everywhere(self, source: str, needs: str = "", patience: float = PATIENCE) -> Sent:
        """Run the source on all ranks."""
        return self.run(self.peer.everywhere(source), needs=needs, patience=patience)

    def wait(self, sent: Sent, patience: float = PATIENCE) -> None:
        """Wait until a cell is done; CellFailed if that takes too long, or the kernel ends."""
        deadline = time.monotonic() + patience
        while not self.notebook.look(sent, DONE, 1.0):
            if not self.notebook.is_alive:
                raise CellFailed(f"the notebook's kernel ended: {self.text(sent)}")
            if time.monotonic() > deadline:
                raise CellFailed(f"no reply in {patience:.0f} s: {self.text(sent)}")

    def all_of(self, sent: Sent, *signs: str) -> str:
        """Return all output, also below other cells; wait for the signs while more comes."""
        count, deadline = 0, time.monotonic() + LATE
        while True:
            elsewhere = self.notebook.elsewhere
            shown = sent.raw + "".join(json.dumps(each.content) for each in elsewhere)
            if len(shown) > count:
                count, deadline = len(shown), time.monotonic() + LATE
            if all(sign in shown for sign in signs) or time.monotonic() > deadline:
                return shown
            self.notebook.look(sent, lambda _: False, 0.1)

    def text(self, sent: Sent) -> str:
        """Return the end of the output, for people to read."""
        outputs = [*sent.outputs, *self.notebook.elsewhere]
        return " ".join(str(each.content.get("evalue", each.text)) for each in outputs)[-300:]

    def others(self) -> list[int]:
        """Return the processes that the peer has started, without the notebook's kernel."""
        return [pid for pid in self.lab.processes() if pid != self.notebook.pid]


def _seconds(seconds: float) -> Answer:
    return Answer(f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s", seconds)


def _milliseconds(times: Iterable[float]) -> Answer:
    median = statistics.median(times)
    if median >= 1:
        return _seconds(median)
    digits = ".2g" if median < 0.01 else ".0f"
    return Answer(f"{1000 * median:{digits}} ms", median)


def first(bench: Bench) -> Answer:
    """Seconds from the start of the notebook's kernel to the sum of all ranks."""
    cells = (*bench.peer.start, bench.peer.everywhere(SUM))
    sent = bench.run(*cells, needs="sum 4.0")
    return _seconds(sent.started - bench.notebook.began + sent.seconds)


def _after(cells_of: Callable[[Peer], Iterable[str]]) -> Callable[[Bench], Answer]:
    def measured(bench: Bench) -> Answer:
        bench.start()
        began = time.perf_counter()
        cells = list(cells_of(bench.peer))
        if RESTART in cells:
            cells.remove(RESTART)
            bench.notebook.restart()
        sent = bench.run(*cells, bench.peer.everywhere(SUM), needs="sum 4.0")
        return _seconds(sent.started - began + sent.seconds)

    return measured


def passing(bench: Bench) -> Answer:
    """Seconds of a cell that does nothing."""
    bench.start()
    return _milliseconds(bench.everywhere("pass").seconds for _ in range(bench.cells))


def call(bench: Bench) -> Answer:
    """Seconds until a small value of each rank is in the notebook."""
    if not bench.peer.home:
        return NOTHING
    bench.start()
    source = "value = rank"
    bench.everywhere(source)
    cell = bench.peer.home.replace("SOURCE", repr(source))
    times = [bench.run(cell).seconds for _ in range(bench.cells)]
    bench.run("print('came', sorted(came))", needs="came [0, 1, 2, 3]")
    return _milliseconds(times)


def lines(bench: Bench) -> Answer:
    """Each rank prints 50,000 lines: how long, how many are in no output, how many are mixed."""
    bench.start()
    sent = bench.everywhere(f"for i in range({LINES}): print(f'rank {{rank}} line {{i}} end')")
    bench.all_of(sent, *(f"rank {rank} line {LINES - 1} end" for rank in range(RANKS)))
    outputs = [*sent.outputs, *bench.notebook.elsewhere]
    seconds = max([sent.seconds, *(output.after for output in outputs)])
    if bench.peer.name == "nbdist":
        outputs += bench.run(f"%dist_output --log --tail {LINES}").outputs
    shown = "".join(output.text for output in outputs).splitlines()
    whole = {found for line in shown for found in LINE.findall(line)}
    mixed = sum(len(BEGUN.findall(line)) > max(1, len(LINE.findall(line))) for line in shown)
    lost = RANKS * LINES - len(whole)
    return Answer(f"{seconds:.1f} s, {lost:,} lost, {mixed:,} mixed", seconds)


def out(bench: Bench) -> Answer:
    """Seconds until 256 MiB of the notebook are on all ranks."""
    if not bench.peer.out:
        return NOTHING
    bench.start()
    bench.run(f"import torch; value = torch.ones({BIG})")
    seconds = bench.run(bench.peer.out).seconds
    if bench.peer.keeps:
        bench.everywhere("print('size', value.numel(), 'of', rank)", needs=f"size {BIG}")
    return _seconds(seconds)


def home(bench: Bench) -> Answer:
    """Seconds until 256 MiB of each rank are in the notebook."""
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
    """Return the seconds until control is back, and the state of the ranks afterwards."""
    bench.start()
    bench.everywhere("kept = 42 + rank")
    sent = bench.notebook.send(bench.peer.everywhere(source))
    sent.may_fail = True
    pressed = 0.0
    if stop:
        if bench.notebook.look(sent, DONE, STOP_AFTER):
            raise CellFailed(f"it has ended before: {bench.text(sent)}")
        pressed = time.perf_counter() - sent.started
        bench.notebook.interrupt()
    bench.wait(sent)
    seconds = sent.seconds - pressed
    state, reason = _state(bench)
    return Answer(f"{seconds:.1f} s, {state}", seconds, f"{bench.text(sent)} {reason}")


def _state(bench: Bench) -> tuple[str, str]:
    """Return which ranks have variables a cell later, whether the group works, and why not."""
    state = "runs again"
    try:
        if bench.peer.keeps:
            sent = bench.everywhere(KEPT, patience=20)
            signs = _of_ranks("kept 4{two} of {rank}")
            shown = bench.all_of(sent, *signs)
            kept = sum(sign in shown for sign in signs)
            state = "all kept" if kept == RANKS else f"kept on {kept} of {RANKS}"
    except CellFailed as error:
        return "ranks lost", str(error)
    try:
        bench.everywhere(SUM.replace("ones(1)", "full((1,), 2.0)"), needs="sum 8.0", patience=20)
    except CellFailed as error:
        return f"{state}, group lost", str(error)
    return state, ""


def memory(bench: Bench) -> Answer:
    """Memory for a rank: the proportional set size of all processes but the notebook's kernel."""
    if not bench.peer.keeps:
        return NOTHING
    bench.start()
    total = 0.0
    for pid in bench.others():
        with suppress(psutil.NoSuchProcess):  # the process has just ended
            total += megabytes(pid) / RANKS
    return Answer(f"{total:.0f} MB", 1e6 * total)


def leftovers(bench: Bench) -> Answer:
    """Processes that are left 15 seconds after the notebook's kernel was killed in a cell."""
    bench.start()
    bench.notebook.send(bench.peer.everywhere("import time; time.sleep(600)"))
    time.sleep(STOP_AFTER)  # a moment when the ranks are at work
    os.kill(bench.notebook.pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDING
    while bench.others() and time.monotonic() < deadline:
        time.sleep(0.2)
    count = len(bench.others())
    text = "1 process" if count == 1 else f"{count} processes"
    return Answer(text if count else "none", count)


def _shows(source: str, *signs: str) -> Callable[[Bench], Answer]:
    """Make a row: whether the output of all ranks reaches the notebook."""

    def asked(bench: Bench) -> Answer:
        bench.start()
        sent = bench.everywhere(source, patience=20)
        shown = bench.all_of(sent, *signs)
        missing = [sign for sign in signs if sign not in shown]
        if missing:
            return Answer("no", reason=f"no {missing} in {bench.text(sent)}")
        return Answer("yes" if signs[0] in sent.raw else "in another cell")

    return asked


def _of_ranks(text: str) -> tuple[str, ...]:
    return tuple(text.format(rank=rank, two=2 + rank) for rank in range(RANKS))


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
    "restart": _after(lambda peer: peer.restart or peer.again),
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
    "widget": _shows(WIDGET, "application/vnd.jupyter.widget-view+json", '"jupyter.widget"'),
    "tqdm": _shows(BAR, *_of_ranks("bar {rank}"), "20/20"),
    "stderr": _shows(STDERR, *_of_ranks("error of {rank}")),
    "output of C": _shows(C_OUTPUT, *_of_ranks("bytes of {rank}")),
    "input()": _shows(INPUT, "told answer"),
}
