"""The control thread of a worker, which answers requests of the agent even while a task runs.

The agent asks, for example, in which line the main thread is. Other requests complete what the user
types, abort collectives, or form the process group again. `nbdist.worker.main` makes one
`ControlThread` in each worker.
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
from nbdist.wire.control import Complete, Completions, Description, Inspect, TypingQuestion
from nbdist.wire.frames import FrameCutter, framed, pack, unpack
from nbdist.wire.spec import WorkerStart
from nbdist.worker.compat import ipython
from nbdist.worker.compat import torch as compat
from nbdist.worker.debugging import DEBUGGER, CannotDebug
from nbdist.worker.environment import change_environ, ready_names, share_gpu
from nbdist.worker.group import user_stores
from nbdist.worker.group.gloo import is_between_ranks
from nbdist.worker.group.group import Group
from nbdist.worker.kernel import WorkerKernel
from nbdist.worker.probe import Probe, frames_of
from nbdist.worker.process import SOCKET_READ_SIZE, allow_more_descriptors, threads_without_sigint
from nbdist.worker.steps import STEPS

LATE_SECONDS, KEPT_SECONDS = 0.3, 5.0
"""An answer to Tab or Shift-Tab is kept for `KEPT_SECONDS` if it took longer than `LATE_SECONDS`.

The agent waits only 0.4 s for an answer (`CONSULT_TIMEOUT` in `nbdist.agent.inspect`). On a busy
machine every answer may take longer. A kept answer is there in time when the user presses the same
key again."""

SPARE_THREADS = 5
"""How many threads must be able to start before the process group is formed again.

A new gloo backend starts threads, another thread waits for the backend, and one thread is spare.
"""


class ControlThread:
    """Answers the agent's requests (`nbdist.wire.control`) on threads beside the main thread.

    Each connection that the agent opens for requests is served by a thread of its own.
    """

    def __init__(self, kernel: WorkerKernel, start: WorkerStart) -> None:
        self._kernel = kernel
        self._start = start
        self._group: Group | None = kernel.group
        self._loop = asyncio.get_event_loop()  # the loop of the main thread, which runs this line
        self._probe = Probe(kernel.group)
        self._consult_future: Future[control.ControlReply] | None = None
        self._late_answer: tuple[TypingQuestion, int, float, control.ControlReply] | None = None
        self._has_jedi = False
        self._abort_future: Future[control.ControlReply] | None = None
        self._executor = ThreadPoolExecutor(thread_name_prefix="nbdist-answer")
        self._send_lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Start a thread that answers the requests on this connection until the agent closes it."""
        with threads_without_sigint():
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        cutter = FrameCutter()
        while data := connection.recv(SOCKET_READ_SIZE):
            for frame in cutter.feed(data):
                number, request = unpack(frame)
                send = partial(self._send, connection, number)
                try:
                    self._answer(request, send)
                except RuntimeError as error:  # no further thread can be started
                    send(control.Failed(str(error), unfit=False))

    def _send(self, connection: socket.socket, number: int, answer: control.ControlReply) -> None:
        frame = framed(pack(control.ControlReplyTo(number, answer)))
        with self._send_lock, suppress(OSError):  # the agent has closed the connection
            connection.sendall(frame)

    def _answer(
        self, request: control.ControlRequest, send: Callable[[control.ControlReply], None]
    ) -> None:
        # Completions, descriptions, nccl's aborts and the end of an earlier debugger can take
        # seconds, so they run on threads of the executor. Otherwise a later request, such as an
        # abort that releases this rank, would wait for them.
        match request:
            case Complete() | Inspect():
                # Two threads must not call IPython's completer at once. So while one question is
                # answered, answer any other with `Ok`, which brings the user nothing.
                if self._consult_future is not None and not self._consult_future.done():
                    return send(control.Ok())
                future = self._consult_future = self._executor.submit(self._consult, request)
            case control.AbortCollectives() if self._probe.uses_nccl:
                if self._abort_future is None or self._abort_future.done():
                    self._abort_future = self._executor.submit(self._answer_or_failure, request)
                future = self._abort_future
            case control.StartDebugger():
                future = self._executor.submit(self._answer_or_failure, request)
            case _:
                with allow_more_descriptors():
                    answer = self._answer_or_failure(request)
                return send(answer)
        return future.add_done_callback(lambda finished: send(finished.result()))

    def _answer_or_failure(self, request: control.ControlRequest) -> control.ControlReply:
        try:
            return self._perform(request)
        except CannotDebug as error:
            return control.Failed(str(error), unfit=False)
        except Exception as error:  # noqa: BLE001 (the agent waits for an answer, whatever failed)
            return control.Failed(str(error) or repr(error), unfit=not is_between_ranks(error))

    def _consult(self, question: TypingQuestion) -> control.ControlReply:
        """Return completions for the code that the user types, or a description of a name in it.

        An answer that took longer than `LATE_SECONDS` is kept. It is returned again if the next
        question comes within `KEPT_SECONDS` and is the same, and no cell has run since.
        """
        kept, self._late_answer = self._late_answer, None
        # Use a kept answer only if no cell has run since: a cell may have changed variables.
        shell: Any = self._kernel.shell
        cell, began = shell.execution_count, time.monotonic()
        if kept is not None and kept[:2] == (question, cell) and began < kept[2]:
            return kept[3]
        answer = self._answer_or_failure(question)
        if (ended := time.monotonic()) > began + LATE_SECONDS:
            self._late_answer = question, cell, ended + KEPT_SECONDS, answer
        return answer

    def _complete(self, code: str, cursor: int) -> Completions:
        kernel: Any = self._kernel
        completer = kernel.shell.Completer
        if completer.use_jedi and not self._has_jedi:
            # Complete without jedi for now, as importing jedi takes seconds. `prepare_jedi` imports
            # jedi in a thread, and then turns `use_jedi` on again.
            self._has_jedi, completer.use_jedi = True, False
            prepare = ipython.prepare_jedi
            threading.Thread(target=prepare, args=(completer,), daemon=True).start()
        completions = Completions.read(kernel.do_complete(code, cursor))
        # Without jedi, IPython's candidates begin with the text before the dot: cut this text off.
        cut = code[completions.start : cursor].rfind(".") + 1
        candidates = tuple(c._replace(text=c.text[cut:]) for c in completions.candidates)
        return replace(completions, candidates=candidates, start=completions.start + cut)

    def _describe(self, code: str, cursor: int, detail: int) -> Description:
        kernel: Any = self._kernel
        reply = kernel.do_inspect(code, cursor, detail)
        items = reply["data"].items() if reply.get("found") else ()
        texts = {kind: text for kind, text in items if isinstance(text, str)}
        if plain := texts.get("text/plain", "").rstrip():
            texts["text/plain"] = f"{plain}\n{'Rank:':<11}{self._start.rank}"
        return Description(texts)

    def _perform(self, request: control.ControlRequest) -> control.ControlReply:
        probe, group = self._probe, self._group
        match request:
            case control.LocateMainThread(briefly):
                return probe.locate_briefly() if briefly else probe.locate()
            case control.Trace():
                return probe.trace()
            case control.LastCollective():
                return probe.last_collective() or control.Ok()
            case control.ListGroups():
                # Report size 0 if a resize has ended the old group and not formed the new one.
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
            case control.StartDebugger(path):
                DEBUGGER.open(path, self._loop)
            case control.ReleaseTaskValues(task_id):
                self._kernel.namespace.release_values(task_id)
            case control.HoldSteps(task_id):
                return STEPS.hold(task_id)
            case control.StopAtStep(task_id, step):
                STEPS.stop_at(task_id, step)
            case control.ReleaseSteps(task_id):
                return STEPS.release(task_id)
            case control.AbortCollectives() if group is not None:
                DEBUGGER.record_abort()
                if probe.waits_for_nccl:
                    # Code that waits for an aborted collective of nccl goes on with a meaningless
                    # result. So interrupt the cell first: then it does not use this result.
                    STEPS.raise_at_once()
                    _thread.interrupt_main()
                group.abort()
            case control.EndStoreWait():
                user_stores.end_wait(next(frames_of(threading.main_thread().ident or 0), None))
            case control.Regroup() | control.Resize():
                probe.start_over()
                check_room_for_threads()
                self._change_group(request)
        return control.Ok()

    def _change_group(self, request: control.Regroup | control.Resize) -> None:
        """Form the world's group again, of the same size (Regroup) or of another size (Resize).

        Then update what cells can read: variables such as `rank`, and environment variables such as
        RANK. No task runs meanwhile.
        """
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
        # Keep this process's CUDA_VISIBLE_DEVICES: CUDA reads the variable only once in a process.
        environ = {k: v for k, v in after.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        change_environ(before.environ, environ)
        for name in ("rank", "local_rank", "world_size"):
            self._kernel.namespace.change_ready(name, ready_names(after)[name])
        self._kernel.session.large_outputs.folder = after.log_folder
        if after.rank != before.rank:
            share_gpu(after)
        # How many threads torch uses for the main thread's operations can be set only on the main
        # thread. Its loop calls `change_threads` before the next task.
        self._loop.call_soon_threadsafe(change_threads, before.world.threads, world.threads)


def change_threads(before: int, after: int) -> None:
    """Change torch's number of threads from `before` to `after`.

    If torch has another number than `before`, user code has set that number, and it stays.
    """
    if torch.get_num_threads() == before:
        torch.set_num_threads(after)


def check_room_for_threads() -> None:
    """Raise RuntimeError if this process cannot start `SPARE_THREADS` threads now.

    Without this check, gloo would try to start its threads, fail, and end the process.
    """
    all_started = threading.Event()
    with ThreadPoolExecutor(SPARE_THREADS) as pool:
        try:
            for _ in range(SPARE_THREADS):
                pool.submit(all_started.wait)
        finally:
            all_started.set()
