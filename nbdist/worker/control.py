"""Answers requests of the agent on a control thread, while a task runs or not.

Requests ask where the rank is, or for completions, or to abort collectives, or to change the group
or the size of the world. `nbdist.worker.main` starts it in each rank.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nbdist.output.events import TOPIC
from nbdist.system.secrets import secret_values
from nbdist.wire import control
from nbdist.wire.control import Complete, Completions, Description, Inspect, Question
from nbdist.wire.frames import FrameCutter, framed, pack, unpack
from nbdist.wire.spec import WorkerStart
from nbdist.worker.compat import ipython
from nbdist.worker.compat import torch as compat
from nbdist.worker.environment import change_environ, ready_names, share_gpu
from nbdist.worker.group import user_stores
from nbdist.worker.group.gloo import is_between_ranks
from nbdist.worker.group.group import Group
from nbdist.worker.kernel import WorkerKernel
from nbdist.worker.probe import Probe, frames_of
from nbdist.worker.process import READ_SIZE, reserve, threads_without_sigint
from nbdist.worker.steps import STEPS

LATE_SECONDS, KEPT_SECONDS = 0.3, 5.0
"""An answer to a front end that took longer is kept for so long: the front end may ask again.

On a busy machine the agent, which waits for 0.4 s (`inspect.CONSULT_TIMEOUT`), never gets an answer
that takes longer, however often somebody presses Tab."""

THREADS = 5  # threads that a new gloo backend starts, the one that waits for it, and one more


class ControlThread:
    """Answers the requests of `nbdist.wire.control`, each connection's on a thread of its own."""

    def __init__(self, kernel: WorkerKernel, start: WorkerStart) -> None:
        self._kernel = kernel
        self._start = start
        self._group: Group | None = kernel.group
        self._loop = asyncio.get_event_loop()  # the main thread's: it makes this object
        self._probe = Probe(kernel.group)
        self._consulting: Future[control.Answer] | None = None
        self._late: tuple[Question, int, float, control.Answer] | None = None
        self._has_jedi = False
        self._aborting: Future[control.Answer] | None = None
        self._others = ThreadPoolExecutor(thread_name_prefix="nbdist-answer")
        self._sending = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Answer all requests that come by a connection."""
        with threads_without_sigint():
            serve = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            serve.start()

    def _serve(self, connection: socket.socket) -> None:
        cutter = FrameCutter()
        while data := connection.recv(READ_SIZE):
            for frame in cutter.feed(data):
                number, request = unpack(frame)
                send = partial(self._send, connection, number)
                try:
                    self._answer(request, send)
                except RuntimeError as error:  # no further thread can be started
                    send(control.Failed(str(error), unfit=False))

    def _send(self, connection: socket.socket, number: int, answer: control.Answer) -> None:
        frame = framed(pack(control.Answered(number, answer)))
        with self._sending, suppress(OSError):  # the agent has ended
            connection.sendall(frame)

    def _answer(self, request: control.Request, send: Callable[[control.Answer], None]) -> None:
        # Completions and nccl's aborts take seconds: they run on other threads, as later requests,
        # such as an abort that frees this rank, must not wait.
        match request:
            case Complete() | Inspect():
                # Two threads cannot ask IPython at once.
                if self._consulting is not None and not self._consulting.done():
                    return send(control.Ok())
                begun = self._consulting = self._others.submit(self._consult, request)
            case control.Abort() if self._probe.uses_nccl:
                if self._aborting is None or self._aborting.done():
                    self._aborting = self._others.submit(self._tried, request)
                begun = self._aborting
            case _:
                with reserve():
                    answer = self._tried(request)
                return send(answer)
        return begun.add_done_callback(lambda done: send(done.result()))

    def _tried(self, request: control.Request) -> control.Answer:
        try:
            return self._answer_to(request)
        except Exception as error:  # noqa: BLE001 (the agent waits for an answer, whatever failed)
            return control.Failed(str(error) or repr(error), unfit=not is_between_ranks(error))

    def _consult(self, question: Question) -> control.Answer:
        """Answer a completion or inspection, and keep an answer that comes late."""
        late, self._late = self._late, None
        # A cell that has run since may have changed the variables.
        shell: Any = self._kernel.shell
        cell, now = shell.execution_count, time.monotonic()
        if late is not None and late[:2] == (question, cell) and now < late[2]:
            return late[3]
        answer = self._tried(question)
        if (over := time.monotonic()) > now + LATE_SECONDS:
            self._late = question, cell, over + KEPT_SECONDS, answer
        return answer

    def _complete(self, code: str, cursor: int) -> Completions:
        kernel: Any = self._kernel
        completer = kernel.shell.Completer
        if completer.use_jedi and not self._has_jedi:
            self._has_jedi, completer.use_jedi = True, False  # `prepare_jedi` turns it on again
            prepare = ipython.prepare_jedi
            threading.Thread(target=prepare, args=(completer,), daemon=True).start()
        found = Completions.read(kernel.do_complete(code, cursor))
        # Without jedi, IPython repeats the dot or all before it, and front ends would show that.
        cut = code[found.start : cursor].rfind(".") + 1
        candidates = tuple(each._replace(text=each.text[cut:]) for each in found.candidates)
        return replace(found, candidates=candidates, start=found.start + cut)

    def _describe(self, code: str, cursor: int, detail: int) -> Description:
        kernel: Any = self._kernel
        reply = kernel.do_inspect(code, cursor, detail)
        found = reply["data"].items() if reply.get("found") else ()
        texts = {kind: text for kind, text in found if isinstance(text, str)}
        if plain := texts.get("text/plain", "").rstrip():
            texts["text/plain"] = f"{plain}\n{'Rank:':<11}{self._start.rank}"
        return Description(texts)

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
                # A group that could not be formed has no ranks in common.
                size = self._start.world.world_size if group is None or group.is_whole else 0
                members = {} if group is None else group.subgroup_members()
                return control.HeldGroups(self._start.rank, size, members)
            case control.Announce():
                kernel = self._kernel
                kernel.session.send(kernel.iopub_socket, "status", {}, ident=TOPIC)
            case control.ListSecrets():
                return tuple(secret_values(os.environ))
            case control.Check():
                return (*compat.check(), *ipython.check())
            case Complete(code, cursor):
                return self._complete(code, cursor)
            case Inspect(code, cursor, detail):
                return self._describe(code, cursor, detail)
            case control.ReleaseValues(task_id):
                self._kernel.namespace.release_values(task_id)
            case control.HoldSteps(task_id):
                return STEPS.hold(task_id)
            case control.StopAtStep(task_id, step):
                STEPS.stop_at(task_id, step)
            case control.ReleaseSteps(task_id):
                return STEPS.release(task_id)
            case control.Abort() if group is not None:
                if probe.waits_for_nccl:
                    # Once a collective is aborted, code that waited for it goes on with meaningless
                    # results. Interrupt it first, so that it does not use them, and the cell does
                    # not end with them.
                    STEPS.raise_at_once()
                    _thread.interrupt_main()
                group.abort()
            case control.EndStoreWait():
                user_stores.end_wait(next(frames_of(threading.main_thread().ident or 0), None))
            case control.Regroup() | control.Resize():
                probe.start_over()
                check_room_for_threads()
                self._form_again(request)
        return control.Ok()

    def _form_again(self, request: control.Regroup | control.Resize) -> None:
        """Connect or resize the group, and update what cells see; no task runs meanwhile."""
        before, world, number = self._start, request.world, request.generation
        after = replace(before, world=world, environ=request.environ)
        if isinstance(request, control.Resize):
            after = replace(after, rank=request.rank, generation=number, sized_in=number)
        if self._group is not None:
            if isinstance(request, control.Resize):
                self._group.resize(after, request.newcomers)
            else:
                self._group.regroup(number, request.members)
        self._start = after
        # CUDA has read CUDA_VISIBLE_DEVICES once and for all, so this process keeps its value.
        follows = {k: v for k, v in after.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        change_environ(before.environ, follows)
        for name in ("rank", "local_rank", "world_size"):
            self._kernel.namespace.change(name, ready_names(after)[name])
        self._kernel.session.large.folder = after.log_folder
        if after.rank != before.rank:
            share_gpu(after)
        # torch keeps the number of threads for each thread that starts operations, so the main
        # thread has to set it. Its loop does so before it reads the next task.
        self._loop.call_soon_threadsafe(change_threads, before.world.threads, world.threads)


def change_threads(before: int, after: int) -> None:
    """Change torch's number of threads, unless the user has changed it."""
    if torch.get_num_threads() == before:
        torch.set_num_threads(after)


def check_room_for_threads() -> None:
    """Raise RuntimeError if `THREADS` threads cannot be started: gloo would end the process."""
    over = threading.Event()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in range(THREADS):
                pool.submit(over.wait)
        finally:
            over.set()
