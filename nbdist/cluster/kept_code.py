"""The notebook's folder in the head: each node gets from here what it lacks.

Also one that comes later, when the notebook has gone.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable
from dataclasses import replace

from nbdist.cluster.node import Node, NodeLost
from nbdist.wire import messages
from nbdist.wire.messages import CodeFile, part_of

CODE_TIMEOUT = 60.0  # seconds for a node to take some megabytes, perhaps over a slow line


class KeptCode:
    """What is in the notebook's files now, and which nodes have been brought to it."""

    def __init__(self) -> None:
        self._get: messages.GetCode | None = None
        self._contents: dict[CodeFile, bytes] = {}
        self._sharing: weakref.WeakKeyDictionary[Node, bool] = weakref.WeakKeyDictionary()

    def take(self, request: messages.GetCode | messages.PutCode) -> None:
        """Take in which files there are, or what was missing."""
        match request:
            case messages.GetCode(files=files):
                wanted = {*files.values()}
                # New ones: what brings the files as they were may still do so.
                self._get, self._sharing = request, weakref.WeakKeyDictionary()
                self._contents = {f: c for f, c in self._contents.items() if f in wanted}
            case messages.PutCode(contents):
                self._contents |= contents

    async def bring(self, nodes: Iterable[Node]) -> messages.CodeHeld:
        """Bring the files to nodes that lack them, once all are here; the first problem."""
        if (get := self._get) is None:
            return messages.CodeHeld("")
        if missing := {*get.files.values()} - self._contents.keys():
            return messages.CodeHeld("", tuple(missing))
        there, sharing = [*nodes], self._sharing
        new = (self._bring_to(node, get) for node in there if node not in sharing)
        for held in await asyncio.gather(*new):
            if held.problem:
                return held
        return messages.CodeHeld("", is_shared=bool(there) and all(map(sharing.get, there)))

    async def _bring_to(self, node: Node, get: messages.GetCode) -> messages.CodeHeld:
        contents, sharing = self._contents, self._sharing
        try:
            held: messages.CodeHeld = await node.ask(get, CODE_TIMEOUT)
            while part := part_of(held.lacks, contents.get):
                held = await node.ask(messages.PutCode(part), CODE_TIMEOUT)
        except NodeLost as lost:
            held = messages.CodeHeld(node.name, problem=str(lost))
        if not (held.problem or held.lacks):
            sharing[node] = held.is_shared
        return replace(held, host=node.name)
