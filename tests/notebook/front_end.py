"""Runs cells in the kernel of a notebook as a front end does, and collects their output."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from nbdist.notebook.rich_output import EMPTY_HTML
from nbdist.output.ansi import strip
from tests.waiting import SOON

if TYPE_CHECKING:
    from nbformat import NotebookNode

# The blocking calls of jupyter_client share an event loop that is never closed.  Create that loop
# now: otherwise the first test with such a call would seem to leave it behind.
ensure_event_loop()


# The module that runs in shared kernels, and code for these kernels.
REUSED = "tests.notebook.reused"
NO_TORCH = "assert 'torch' not in __import__('sys').modules"
CLEAN = f"__import__('sys').modules[{REUSED!r}].kernel.clean()"

INSIDES = re.compile(r"[^\s\"']*/nbdist/(?:\w+/)*\w+\.py\b")
"""Matches the path of a file of nbdist in a text, such as a traceback."""


@dataclass
class Outcome:
    """The output of a cell, collected from the messages that a front end receives."""

    displays: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)  # texts of all displays and updates
    streams: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def panel(self) -> dict[str, Any]:
        """The last content of the cell's panel; checks that the cell has shown nothing else."""
        assert self.streams == []
        assert self.results == []
        emptied = [each["transient"] for each in self.updates if is_empty(each["data"])]
        (first,) = (each for each in self.displays if each["transient"] not in emptied)
        assert first["transient"]["display_id"].startswith("nbdist-")
        updates = [each for each in self.updates if each["transient"] not in emptied]
        for shown in (first, *updates):
            assert shown["transient"] == first["transient"]
            assert shown["metadata"] == {}
            assert {*shown["data"]} == {"text/html", "text/plain"}
        return (updates or [first])[-1]["data"]

    @property
    def texts(self) -> list[str]:
        """The text of each display, after its last update."""
        newest = {each["transient"]["display_id"]: each for each in self.updates}
        last = (newest.get(each["transient"].get("display_id"), each) for each in self.displays)
        return [each["data"].get("text/plain", "") for each in last]

    @property
    def seen(self) -> str:
        """All output of the cell that a person sees, without colours."""
        # `texts` leaves out an earlier cell's panel, which may change while this cell runs.
        figures = [each["data"] for each in self.figures]
        others = [data.get("text/plain", "") for data in figures + self.results]
        errors = ("\n".join(error["traceback"]) for error in self.errors)
        return strip("\n".join([*self.streams, *self.texts, *others, *errors]))

    @property
    def text(self) -> str:
        """The text of the panel."""
        assert self.errors == [], self.errors
        return self.panel["text/plain"]

    @property
    def error(self) -> str:
        """The line of the only error; checks that the error is one line, without a traceback."""
        (error,) = self.errors
        assert self.reply["status"] == "error"
        assert self.streams == []
        line = strip("\n".join(error["traceback"]))
        # nbdist's `Interrupted` is shown as the KeyboardInterrupt that everybody knows.
        name = error["ename"].replace("Interrupted", "KeyboardInterrupt")
        assert line == f"{name}: {error['evalue']}"
        assert "\n" not in line
        assert len(line) < 500
        return line


def is_empty(data: dict[str, Any]) -> bool:
    """Return True if a page shows nothing for this display."""
    return data.get("text/html") == EMPTY_HTML


def new_manager() -> KernelManager:
    """Make the manager of a kernel with sockets in files: other programs could take its ports."""
    place = f"{os.environ['XDG_RUNTIME_DIR']}/{uuid.uuid4().hex[:8]}"
    return KernelManager(kernel_name="python3", transport="ipc", ip=place)


class SharedKernels:
    """Kernels that notebooks of this process use one after another; each kernel keeps its agent."""

    def __init__(self) -> None:
        self.is_offered = False  # whether the running test may use a shared kernel
        self._free: list[KernelManager] = []
        self._with_torch: list[KernelManager] = []  # at most one
        self._borrowed: list[KernelManager] = []

    def start(self, count: int) -> None:
        """Start kernels until `count` of them are free and have not imported torch."""
        for _ in range(count - len(self._free)):
            cache = f"{os.environ['XDG_RUNTIME_DIR']}/jedi"
            notebook = Notebook()
            self._borrowed.append(notebook.manager)
            code = f"import {REUSED}; {REUSED}.kernel = {REUSED}.Kernel({cache!r})"
            assert not (traceback := notebook.fails_at(code)), traceback
            notebook.close()

    def borrow(self, *, may_have_torch: bool) -> KernelManager | None:
        """Return the manager of a free kernel that is like new; None if there is none.

        With `may_have_torch`, the kernel may have imported torch.
        """
        kernels = (self._with_torch if may_have_torch else []) or self._free
        if not self.is_offered or not kernels:
            return None
        self._borrowed.append(kernels.pop())
        return self._borrowed[-1]

    def give_back(self, notebook: Notebook) -> bool:
        """Clean the notebook's kernel if it is shared; return True if it can be used again."""
        if notebook.manager not in self._borrowed:
            return False
        self._borrowed.remove(notebook.manager)
        if not notebook.manager.is_alive():
            return False
        kernels = self._with_torch if notebook.fails_at(NO_TORCH) else self._free
        if kernels is self._with_torch and kernels:
            return False
        assert not (traceback := notebook.fails_at(CLEAN)), traceback
        kernels.append(notebook.manager)
        return True

    def end(self) -> None:
        """Shut down all free kernels."""
        for kernels in (self._free, self._with_torch):
            for manager in kernels:
                manager.shutdown_kernel(now=True)
            kernels.clear()


KERNELS = SharedKernels()


class Notebook:
    """A notebook kernel, shared with other tests if possible, and its front end."""

    folder: Path  # set by `lasting`

    def __init__(
        self, *first: str, env: dict[str, str] | None = None, may_have_torch: bool = False
    ) -> None:
        borrowed = KERNELS.borrow(may_have_torch=may_have_torch)
        self.is_closed = False
        self.manager = borrowed or new_manager()
        environ = {**os.environ, "NBDIST_LOG_DIR": "", **(env or {})}
        if borrowed is None:
            self.manager.start_kernel(env=environ)
        self.client = self.new_client()
        try:
            self.client.wait_for_ready(timeout=SOON)
            if borrowed is not None:
                # The kernel was started earlier: give it the environment of this process, in
                # which tests may have set variables since.
                self.fails_at(f"__import__('os').environ.update({environ!r})")
            for source in first:
                outcome = self.run(source)
                assert outcome.errors == [], outcome.errors
        except BaseException:
            self.close()
            raise

    def new_client(self) -> BlockingKernelClient:
        """Connect a client under a new session id, as another page does."""
        client = self.manager.client()
        assert isinstance(client, BlockingKernelClient)
        # The session id is the sockets' identity: no two clients of a kernel may share one.
        client.session = client.session.clone()
        client.session.session = uuid.uuid4().hex
        client.start_channels()
        return client

    def fails_at(self, source: str) -> str:
        """Run code silently, not as a cell; return its traceback, or "" if it succeeded."""
        reply = self.reply_to(self.client.execute(source, silent=True, stop_on_error=False))
        return "" if reply["status"] == "ok" else "\n".join(reply.get("traceback", ["aborted"]))

    def reply_to(self, request: str) -> dict[str, Any]:
        """Wait for the reply to the request with this id, and return its content."""
        while (reply := self.client.get_shell_msg(timeout=SOON))["parent_header"]["msg_id"] != (
            request
        ):
            pass
        return {**reply["content"]}

    def run(
        self,
        source: str,
        meanwhile: Callable[[Outcome], None] | None = None,
        typed: Iterable[str] = (),
    ) -> Outcome:
        """Run a cell and collect all its output; `meanwhile` is called after each message.

        Each prompt is answered by the next line of `typed`; if no line is left, Stop is pressed.
        """
        lines = iter(typed)
        # By default, ipykernel 6 aborts a cell that is sent at once after a cell with an error.
        request = self.client.execute(source, stop_on_error=False)
        outcome, deadline = Outcome(), time.monotonic() + SOON
        while True:
            self._answer_prompt(outcome, lines)
            try:
                message = self.client.get_iopub_msg(timeout=0.02 if typed else 0.2)
            except Empty:
                assert time.monotonic() < deadline, f"not done after {SOON} s: {source}"
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            self._record(outcome, kind, content)
            if meanwhile is not None:
                meanwhile(outcome)
        outcome.reply = self.reply_to(request)
        # No output, not even an error, may show a person the files of nbdist.
        assert not (paths := INSIDES.findall(outcome.seen)), (paths, outcome.seen)
        return outcome

    def _answer_prompt(self, outcome: Outcome, lines: Iterator[str]) -> None:
        try:
            request = self.client.get_stdin_msg(timeout=0)
        except Empty:
            return
        outcome.prompts.append(request["content"]["prompt"])
        if (line := next(lines, None)) is None:
            self.manager.interrupt_kernel()
        else:
            self.client.input(line)

    def _record(self, outcome: Outcome, kind: str, content: dict[str, Any]) -> None:
        if kind.endswith("display_data"):
            outcome.drawn.append(content["data"].get("text/plain", ""))
        match kind:
            case "display_data" if is_empty(content["data"]):
                outcome.figures.append(content)
            case "clear_output":  # all displays so far are removed
                cleared = [each["transient"] for each in outcome.displays]
                outcome.updates = [
                    each for each in outcome.updates if each["transient"] not in cleared
                ]
                for shown in (outcome.displays, outcome.streams):
                    shown.clear()
            case "display_data":
                outcome.displays.append(content)
            case "update_display_data":
                outcome.updates.append(content)
            case "stream":
                outcome.streams.append(content["text"])
            case "execute_result":
                outcome.results.append(content["data"])
            case "error":
                outcome.errors.append(content)

    def stop_at(self, text: str) -> Callable[[Outcome], None]:
        """Return a function for `meanwhile` that presses Stop once, as soon as `text` is shown."""
        pressed: list[bool] = []

        def press_stop(outcome: Outcome) -> None:
            shown = [each["data"]["text/plain"] for each in (*outcome.displays, *outcome.updates)]
            if not pressed and any(text in each for each in shown):
                pressed.append(True)
                self.manager.interrupt_kernel()

        return press_stop

    def next_shown(self, *texts: str) -> dict[str, Any]:
        """Wait for the next display or update with all these texts, also while no cell runs."""
        deadline = time.monotonic() + SOON
        while True:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["msg_type"] in ("display_data", "update_display_data"):
                content: dict[str, Any] = message["content"]
                if all(each in content["data"]["text/plain"] for each in texts):
                    return content

    def next_printed(self, text: str) -> str:
        """Wait for the next printed text that has this text in it, also while no cell runs."""
        deadline = time.monotonic() + SOON
        while True:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["msg_type"] == "stream" and text in (printed := message["content"]["text"]):
                return str(printed)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the notebook, made again from its `repr`."""
        outcome = self.run(expression)
        assert outcome.errors == [], outcome.errors
        (result,) = outcome.results
        return eval(result["text/plain"], {"inf": float("inf")})

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    def close(self) -> None:
        """Give a shared kernel back, or shut the kernel down, at the first call only.

        After that, other notebooks may use the kernel.
        """
        if self.is_closed:
            return
        self.is_closed = True
        is_kept = KERNELS.give_back(self)
        self.client.stop_channels()
        if not is_kept:
            self.manager.shutdown_kernel(now=True)


def lasting(*first: str, may_have_torch: bool = False, **env: str) -> Any:
    """Make a fixture: one notebook for all tests of a module, in which the cells `first` have run.

    With `may_have_torch`, the notebook may get a kernel that has imported torch.
    `{folder}` in the cells and in `env` is replaced by the notebook's `folder`, a new folder.
    """

    @pytest.fixture(scope="module")
    def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
        folder = tmp_path_factory.mktemp("notebook")
        cells, texts = ([text.replace("{folder}", str(folder)) for text in each]
                        for each in (first, env.values()))  # fmt: skip
        environ = dict(zip(env, texts, strict=True))
        with closing(Notebook(*cells, env=environ, may_have_torch=may_have_torch)) as made:
            made.folder = folder
            yield made

    return notebook


@contextmanager
def nbclient_manager(kernel: Notebook) -> Iterator[KernelManager]:
    """Adapt a kernel's manager to nbclient and papermill; close their clients at the end."""
    manager, opened = kernel.manager, list[Any]()
    client_class, make = manager.client_class, manager.client

    def client(**options: Any) -> Any:
        opened.append(make(**options))
        return opened[-1]

    manager.client_class = "jupyter_client.asynchronous.AsyncKernelClient"
    manager.client = client  # type: ignore[method-assign]
    try:
        yield manager
    finally:
        manager.client_class, manager.client = client_class, make  # type: ignore[method-assign]
        for each in opened:
            each.stop_channels()


def execute(notebook: NotebookNode, kernel: Notebook) -> None:
    """Run the cells of a notebook file in this kernel, by nbclient."""
    from nbclient import NotebookClient  # the environments of tests/matrix lack nbclient

    with nbclient_manager(kernel) as manager:
        NotebookClient(notebook, km=manager, timeout=SOON).execute()


def body(outcome: Outcome) -> list[str]:
    """Return the lines of the panel below its head."""
    return outcome.text.splitlines()[1:]
