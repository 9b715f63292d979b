"""Answers questions about names on the control thread's loop, whatever the main thread does.

IPython's own completer and inspector, in a thread beside, where the worker is idle: they know
most, and may run users' properties.  Else, and where they take long, `known_names`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.wire.questions import Complete, Completions, Description, Inspect, Question
from nbdist.worker import known_names
from nbdist.worker.compat.jedi import import_jedi

if TYPE_CHECKING:
    from nbdist.worker.kernel import WorkerKernel

FULL_TIMEOUT = 0.6
"""Seconds for IPython's answer: the front end waits for one second.

A rank's first one takes as long, while jedi reads libraries; what is known meanwhile is told.
To have the fork server read them took 6 MB a worker, and was no faster.
"""


class Consulting:
    """One question at a time gets IPython's answer."""

    def __init__(self, kernel: WorkerKernel) -> None:
        self._kernel = kernel
        self._full: asyncio.Future[Completions | Description] | None = None

    def __repr__(self) -> str:
        return f"<Consulting, {'asked' if self._is_asked else 'free'}>"

    @property
    def _is_asked(self) -> bool:
        return self._full is not None and not self._full.done()

    async def answer(self, question: Question) -> Completions | Description:
        """Answer within `FULL_TIMEOUT`; other requests are served meanwhile."""
        if not self._kernel.is_at_work and not self._is_asked:
            loop = asyncio.get_running_loop()
            self._full = loop.run_in_executor(None, self._in_full, question)
            await asyncio.wait([self._full], timeout=FULL_TIMEOUT)
            if self._full.done() and self._full.exception() is None:
                return self._of_this_rank(self._full.result())
        shell: Any = self._kernel.shell
        return self._of_this_rank(known_names.answer(shell.user_ns, question))

    def _of_this_rank(self, answer: Completions | Description) -> Completions | Description:
        """Say who says it."""
        if isinstance(answer, Description):
            return replace(answer, rank=int(self._kernel.ident))
        return answer

    def _in_full(self, question: Question) -> Completions | Description:
        import_jedi()
        kernel: Any = self._kernel
        match question:
            case Complete(code, cursor):
                found = Completions.read(kernel.do_complete(code, cursor))
                first = known_names.own_first(kernel.shell.user_ns, code[:cursor])
                return replace(found, candidates=tuple(sorted(found.candidates, key=first)))
            case Inspect(code, cursor, detail):
                found = kernel.do_inspect(code, cursor, detail)
                data = found["data"].items() if found.get("found") else ()
                return Description({kind: text for kind, text in data if isinstance(text, str)})
