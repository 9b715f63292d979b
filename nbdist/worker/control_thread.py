"""What a worker does when its agent asks, on the control thread, whatever its task does."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.wire import control
from nbdist.wire.questions import Question
from nbdist.worker.compat import ipython, torch
from nbdist.worker.consulting import Consulting
from nbdist.worker.group.gloo import is_of_others
from nbdist.worker.probe import Probe
from nbdist.worker.process import die_with_parent, reserve

if TYPE_CHECKING:
    from nbdist.worker.environment import Scaling
    from nbdist.worker.group.group import Group
    from nbdist.worker.kernel import WorkerKernel

THREADS = 5
"""As many as a new gloo backend starts, that which waits for it, and one more."""


class ControlThread:
    """Answers the requests of `nbdist.wire.control`."""

    def __init__(self, kernel: WorkerKernel, group: Group | None, scaling: Scaling) -> None:
        self._kernel = kernel
        self._group = group
        self._scaling = scaling
        self._probe = Probe(group)
        self._consulting = Consulting(kernel)
        self._answering: set[asyncio.Task[None]] = set()
        kernel.control_handlers[control.REQUEST] = self.answer

    def __repr__(self) -> str:
        return f"<ControlThread of {self._probe}>"

    def answer(self, stream: Any, ident: Any, message: dict[str, Any]) -> None:
        """Answer a request; called by ipykernel."""
        with reserve():
            request = control.request_from(message["buffers"])
            if isinstance(request, Question):
                self._answer_later(request, partial(self._send, stream, ident, message))
                return
            answer: control.Answer
            try:
                answer = self._answer_to(request)
            except Exception as error:  # noqa: BLE001 (the agent waits for an answer, whatever failed)
                answer = control.Failed(str(error) or repr(error), unfit=not is_of_others(error))
        self._send(stream, ident, message, answer)

    def _answer_later(self, question: Question, send: Callable[[control.Answer], None]) -> None:
        """Answer what takes a while: what comes next, to free this rank for one, does not wait."""

        async def answer() -> None:
            send(await self._consulting.answer(question))

        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _send(
        self, stream: Any, ident: Any, message: dict[str, Any], answer: control.Answer
    ) -> None:
        session = self._kernel.session
        assert session is not None
        buffers: list[Any] = [control.pack(answer)]
        session.send(stream, control.REPLY, {}, message, ident, buffers=buffers)

    def _answer_to(self, request: control.Request) -> control.Answer:
        probe, group = self._probe, self._group
        match request:
            case control.Locate(briefly):
                return probe.locate_briefly() if briefly else probe.locate()
            case control.Trace():
                return probe.trace()
            case control.LastCollective():
                return probe.last_collective() or control.Ok()
            case control.ListGroups():
                members = {} if group is None else group.held()
                return control.HeldGroups(self._scaling.rank, self._scaling.world_size, members)
            case control.Check():
                return control.Lacks((*torch.check(), *ipython.check()))
            case control.Bind(parent):
                die_with_parent(parent)
            case control.LetGo(task_id):
                self._kernel.namespace.let_go(task_id)
            case control.Abort() if group is not None:
                self._abort(group)
            case control.Regroup() as regroup:
                return self._meet(lambda: self._scaling.regroup(regroup))
            case control.Resize() as resize:
                return self._meet(lambda: self._scaling.scale(resize))
        return control.Ok()

    def _abort(self, group: Group) -> None:
        if self._probe.waits_for_nccl:
            # What waited for an aborted collective goes on, with results of no meaning: it must
            # not get as far as to use them, and with them the cell could end before this.
            _thread.interrupt_main()
        group.abort()

    def _meet(self, form: Callable[[], None]) -> control.Ok:
        """Form groups with the other ranks."""
        self._probe.start_over()
        check_room_for_threads()
        form()
        return control.Ok()


def check_room_for_threads() -> None:
    """Raise RuntimeError where gloo could start no threads, and would end the process."""
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
    finally:
        over.set()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join()
