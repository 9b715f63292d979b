"""What a worker does when its agent asks, on the control thread, whatever its task does."""

from __future__ import annotations

import _thread
import asyncio
import builtins
import inspect
import keyword
import re
import threading
import types
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from IPython.utils.tokenutil import token_at_cursor

from nbdist.wire import control
from nbdist.wire.control import Candidate, Complete, Completions, Description, Question
from nbdist.wire.frames import pack, unpack
from nbdist.wire.spec import WorkerStart
from nbdist.worker.compat import ipython, models
from nbdist.worker.compat import torch as compat
from nbdist.worker.environment import change_environ, ready_names, share_gpu
from nbdist.worker.group.gloo import is_of_others
from nbdist.worker.group.group import Group
from nbdist.worker.kernel import WorkerKernel
from nbdist.worker.ops.memory import own_attributes
from nbdist.worker.probe import Probe
from nbdist.worker.process import reserve

THREADS = 5  # as many as a new gloo backend starts, that which waits for it, and one more


class ControlThread:
    """Answers the requests of `nbdist.wire.control`, on this thread."""

    def __init__(self, kernel: WorkerKernel, start: WorkerStart) -> None:
        self._kernel = kernel
        self._start = start
        self._group: Group | None = kernel.group
        self._loop = asyncio.get_event_loop()  # the main thread's, which makes this
        self._probe = Probe(kernel.group)
        self._full: asyncio.Future[Completions | Description] | None = None
        self._aborting: asyncio.Future[control.Answer] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        kernel.control_handlers[control.REQUEST] = self.answer

    def answer(self, stream: Any, ident: Any, message: dict[str, Any]) -> None:
        """Answer a request; called by ipykernel."""

        def send(answer: control.Answer) -> None:
            session, buffers = self._kernel.session, [pack(answer)]
            session.send(stream, control.REPLY, {}, message, ident, buffers=buffers)

        with reserve():
            request = unpack(message["buffers"][0])
            if isinstance(request, Question):
                # That takes a while: what comes next, to free this rank for one, does not wait.
                return self._answer_later(self._consult(request, send))
            if isinstance(request, control.Abort) and self._probe.uses_nccl:
                return self._answer_later(self._abort(request, send))
            answer = self._tried(request)
        return send(answer)

    def _answer_later(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _abort(
        self, request: control.Request, send: Callable[[control.Answer], None]
    ) -> None:
        """Abort, for which nccl can take seconds: who asks where this rank is does not wait."""
        if self._aborting is None or self._aborting.done():
            loop = asyncio.get_running_loop()
            self._aborting = loop.run_in_executor(None, self._tried, request)
        send(await asyncio.shield(self._aborting))

    def _tried(self, request: control.Request) -> control.Answer:
        try:
            return self._answer_to(request)
        except Exception as error:  # noqa: BLE001 (the agent waits for an answer, whatever failed)
            return control.Failed(str(error) or repr(error), unfit=not is_of_others(error))

    async def _consult(self, question: Question, send: Callable[[control.Answer], None]) -> None:
        """Answer within `FULL_TIMEOUT`; one question at a time gets IPython's answer."""
        kernel: Any = self._kernel
        answer = None
        if not kernel.is_at_work and (self._full is None or self._full.done()):
            loop = asyncio.get_running_loop()
            self._full = loop.run_in_executor(None, answer_in_full, kernel, question)
            await asyncio.wait([self._full], timeout=FULL_TIMEOUT)
            if self._full.done() and self._full.exception() is None:
                answer = self._full.result()
        answer = look_up(kernel.shell.user_ns, question) if answer is None else answer
        if isinstance(answer, Description) and answer:
            text = answer.data.get("text/plain", "").rstrip()
            text = f"{text}\n{'Rank:':<11}{self._start.rank}"
            answer = Description({**answer.data, "text/plain": text})
        send(answer)

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
                # No ranks share a group that could not be formed.
                size = self._start.world.world_size if group is None or group.is_whole else 0
                members = {} if group is None else group.held()
                return control.HeldGroups(self._start.rank, size, members)
            case control.Check():
                return (*compat.check(), *ipython.check())
            case control.LetGo(task_id):
                self._kernel.namespace.let_go(task_id)
            case control.Abort() if group is not None:
                if probe.waits_for_nccl:
                    # What waited for an aborted collective goes on, with results of no meaning:
                    # it must not get as far as to use them, and with them the cell could end
                    # before this.
                    _thread.interrupt_main()
                group.abort()
            case control.Regroup() | control.Resize():
                probe.start_over()
                check_room_for_threads()
                self._form_again(request)
        return control.Ok()

    def _form_again(self, request: control.Regroup | control.Resize) -> None:
        """Reconnect the group, and update what cells see; no task runs meanwhile."""
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
        # CUDA reads it once.
        follows = {k: v for k, v in after.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        change_environ(before.environ, follows)
        for name in ("rank", "local_rank", "world_size"):
            self._kernel.namespace.change(name, ready_names(after)[name])
        self._kernel.session.large.folder = after.log_folder
        if after.rank != before.rank:
            share_gpu(after)
        # Threads are a matter of the thread that starts an operation.  What the loop is
        # given now it does before it takes the next cell.
        self._loop.call_soon_threadsafe(change_threads, before.world.threads, world.threads)


def change_threads(before: int, after: int) -> None:
    """Change torch's number of threads, unless the user has."""
    if torch.get_num_threads() == before:
        torch.set_num_threads(after)


def check_room_for_threads() -> None:
    """Raise RuntimeError where gloo could start no threads, and would end the process."""
    over = threading.Event()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in range(THREADS):
                pool.submit(over.wait)
        finally:
            over.set()


# --- names, for front ends that complete and describe them ------------------------------------

FULL_TIMEOUT = 0.5
"""Seconds for IPython's answer: the front end waits for one second.

A rank's first one takes as long, while jedi reads libraries; `look_up` answers meanwhile.
"""


def answer_in_full(kernel: Any, question: Question) -> Completions | Description:
    """Return what IPython answers; in a thread, while no task runs."""
    ipython.import_jedi()
    match question:
        case Complete(code, cursor):
            found = Completions.read(kernel.do_complete(code, cursor))
            first = own_first(kernel.shell.user_ns, code[:cursor])
            return replace(found, candidates=tuple(sorted(found.candidates, key=first)))
        case control.Inspect(code, cursor, detail):
            reply = kernel.do_inspect(code, cursor, detail)
            data = reply["data"].items() if reply.get("found") else ()
            return Description({kind: text for kind, text in data if isinstance(text, str)})


# --- what can be said of names while the main thread is at work, as no code of users runs -------

BEFORE_CURSOR = re.compile(r"(?<![\w.)\]}'\"])((?:[^\W\d]\w*\.)*)(\w*)$")
"""A dotted name that ends at the cursor, in its last part perhaps."""

KEY = re.compile(r"(?<![\w.)\]])((?:[^\W\d]\w*\.)*[^\W\d]\w*)\[\s*[\"']([^\"'\]]*)$")
"""The beginning of a key, such as `batch["im`."""

MOST = 2000
LONGEST_VALUE = 200
LONGEST_DOC = 20_000

# Types, not their subclasses, whose values are written as they are.
WRITTEN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
IN_C = (types.GetSetDescriptorType, types.MemberDescriptorType)
UNKNOWN = object()  # stands for what is not there, or could only be had by running code


def look_up(names: Mapping[str, Any], question: Question) -> Completions | Description:
    """Answer from what is there."""
    if isinstance(question, Complete):
        return complete(names, question.code[: question.cursor])
    return describe(names, token_at_cursor(question.code, question.cursor))


def complete(names: Mapping[str, Any], text: str) -> Completions:
    """Return what can stand at the end of the text: names, attributes, keys."""
    found: Mapping[Any, Any] = {}
    begun, end = "", len(text)
    if key := KEY.search(text):
        value, begun = find(names, key[1]), key[2]
        found = dict.copy(value) if type(value) is dict else {}
    elif (place := BEFORE_CURSOR.search(text)) and place[0]:
        path, begun = place[1].rstrip("."), place[2]
        built_in = {**dict.fromkeys(keyword.kwlist), **vars(builtins)}
        found = attributes(find(names, path)) if path else {**built_in, **names}
    words = [each for each in found if type(each) is str and each.startswith(begun)]
    words = sorted(each for each in words if begun or each[:1] != "_")[:MOST]
    kinds = (
        "keyword" if keyword.iskeyword(each) else control.kind_of(found[each]) for each in words
    )
    candidates = sorted(map(Candidate, words, kinds), key=own_first(names, text))
    return Completions(tuple(candidates), end - len(begun), end)


def own_first(names: Mapping[str, Any], text: str) -> Callable[[Candidate], bool]:
    """Return a key that sorts first what an object itself holds, as a model its layers."""
    place = BEFORE_CURSOR.search(text)
    value = find(names, place[1].rstrip(".")) if place is not None and place[1] else UNKNOWN
    first = set() if type(value) is types.ModuleType else own(value).keys() - own(_EMPTY).keys()
    return lambda candidate: candidate.text not in first


_EMPTY = torch.nn.Module()  # what every module holds


def describe(names: Mapping[str, Any], path: str) -> Description:
    """Describe the value of a dotted name; empty where there is no such name."""
    value, doc = find(names, path), find(names, f"{path}.__doc__")
    if value is UNKNOWN:
        return Description({})
    signature = ""
    if type(value) in PLAIN:
        with suppress(TypeError, ValueError):  # C code has none
            signature = f"{path.rpartition('.')[2]}{inspect.signature(value)}"
    parts = {
        "Signature": signature,
        "Type": type(value).__name__,
        "Value": _value(value),
        "Docstring": inspect.cleandoc(doc)[:LONGEST_DOC] if type(doc) is str else "",
    }
    lines = [f"{name + ':':<11}{text}" for name, text in parts.items() if text]
    return Description({"text/plain": "\n".join(lines)})


def _value(value: Any) -> str:
    kind = type(value)
    if kind in WRITTEN:
        return repr(value)[:LONGEST_VALUE]
    if kind in (torch.Tensor, torch.nn.Parameter):
        return f"shape {tuple(value.shape)}, {value.dtype}, {value.device}"
    if kind in (list, tuple, dict, set, frozenset):
        return f"{len(value)} entries"
    return ""


def find(names: Mapping[str, Any], path: str) -> Any:
    """Return the value of a dotted name; UNKNOWN if there is none, or only by users' code."""
    first, *rest = path.split(".")
    value = names.get(first, vars(builtins).get(first, UNKNOWN))
    for name in rest:
        holder, found = value, attributes(value).get(name, UNKNOWN)
        kind, value = type(found), found
        if issubclass(kind, IN_C):
            value = UNKNOWN
            with suppress(Exception):  # an empty slot, or an object that is half made
                value = found.__get__(holder, type(holder))
        elif issubclass(kind, (staticmethod, classmethod)):
            value = found.__func__
        elif hasattr(kind, "__get__") and not issubclass(kind, PLAIN):
            value = UNKNOWN
    return value


def attributes(value: Any) -> dict[str, Any]:
    """Return what a value and its classes hold under each name."""
    if value is UNKNOWN:
        return {}
    found: dict[str, Any] = {}
    kind = value if issubclass(type(value), type) else type(value)
    for each in reversed(type.__getattribute__(kind, "__mro__")):
        found |= type.__getattribute__(each, "__dict__").copy()
    return found | own(value)


def own(value: Any) -> dict[str, Any]:
    """Return what an object itself holds: of torch's modules their layers too."""
    held = own_attributes(value)
    return held | models.parts_of(held) if issubclass(type(value), torch.nn.Module) else held
