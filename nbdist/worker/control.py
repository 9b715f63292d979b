"""What a worker does when its agent asks, on the control thread, whatever its cell does."""

from __future__ import annotations

import _thread
from typing import TYPE_CHECKING, Any

from nbdist.wire.messages import CONTROL_REQUEST, LivingGroups
from nbdist.worker.compat import ipython, torch
from nbdist.worker.watching import Watcher

if TYPE_CHECKING:
    from nbdist.worker.group import Group
    from nbdist.worker.kernel import WorkerKernel
    from nbdist.worker.scaling import Scaling

REPLY = "nbdist_reply"


def answer_control(kernel: WorkerKernel, group: Group | None, scaling: Scaling) -> None:
    """Have the kernel answer `nbdist_request` on its control channel.

    `{"do": "look"}` asks where the main thread is, `"where"` for less of it, `"stack"` for its
    calls, `"last"` for the last collective, `"living"` for the groups there are, `"check"` for
    what torch and IPython lack; `"let_go"` says that what a cell sent back has been read;
    `"free"` breaks collectives open, `"form"` makes the groups whole again, `"scale"` makes
    another one of another size.  The answer holds `error` where that failed.
    """
    watcher = Watcher(kernel.shell, group, kernel.scripts)

    def do(request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"do": "look"}:
                return watcher.look()
            case {"do": "where"}:
                return watcher.where()
            case {"do": "stack"}:
                return watcher.stack()
            case {"do": "last"}:
                return watcher.last_collective()
            case {"do": "living"}:
                living = {"members": {}} if group is None else group.living()
                return {"world_size": scaling.world_size, **living}
            case {"do": "check"}:
                return {"lacks": [*torch.check(), *ipython.check()]}
            case {"do": "let_go"}:
                kernel.namespace.let_go(request["cell"])
            case {"do": "free"} if group is not None:
                waits = watcher.waits_for_nccl
                ended = group.free()
                if waits:
                    # What waited for an aborted collective goes on, with results of no meaning.
                    _thread.interrupt_main()
                return {"connections": ended}
            case {"do": "form"} if group is not None:
                watcher.start_over()
                members = {name: tuple(ranks) for name, ranks in request["members"].items()}
                try:
                    group.form_again(request["generation"], LivingGroups(members))
                except (RuntimeError, ConnectionResetError) as error:
                    return {"error": str(error)}
            case {"do": "scale"}:
                watcher.start_over()
                try:
                    scaling.scale(request)
                except (RuntimeError, ConnectionResetError) as error:
                    return {"error": str(error)}
        return {}

    def answer(stream: Any, ident: Any, request: dict[str, Any]) -> None:
        content = do(request["content"])
        assert kernel.session is not None
        kernel.session.send(stream, REPLY, content, request, ident)

    kernel.control_handlers[CONTROL_REQUEST] = answer
