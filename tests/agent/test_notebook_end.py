"""Tests of `nbdist.agent.notebook_end`: messages both ways."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import zmq

from nbdist import __version__
from nbdist.agent.notebook_end import NOTEBOOK_SOCKET, NotebookEnd
from nbdist.wire.messages import Answer, Ask, Down, GetStatus, Hello, Received, to_bytes, up_from
from tests.waiting import SOON


def test_messages_go_both_ways(runtime: Path) -> None:
    """The hello is first; what the notebook sends is handed on, in its order."""
    came: list[Down] = []

    async def serve() -> None:
        both = asyncio.Event()

        def receive(message: Down) -> None:
            came.append(message)
            if len(came) == 2:
                both.set()

        end = NotebookEnd(runtime, receive)
        assert repr(end) == "<NotebookEnd open>"
        try:
            end.say_hello()
            identity, frame = await asyncio.to_thread(notebook.recv_multipart)
            assert up_from(frame) == Hello(__version__, os.getpid(), socket.gethostname())
            for message in (Ask(1, GetStatus()), Received()):
                notebook.send_multipart([identity, to_bytes(message)])
            async with asyncio.timeout(SOON):
                await both.wait()
            end.send(Answer(1, None))
            _, frame = await asyncio.to_thread(notebook.recv_multipart)
            assert up_from(frame) == Answer(1, None)
        finally:
            end.close()

    with zmq.Context() as context, context.socket(zmq.ROUTER) as notebook:
        notebook.rcvtimeo = SOON * 1000
        notebook.bind(f"ipc://{runtime}/{NOTEBOOK_SOCKET}")
        asyncio.run(serve())
    assert came == [Ask(1, GetStatus()), Received()]
