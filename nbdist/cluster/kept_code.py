"""The notebook's folder in the head's memory, from where each node gets what it lacks.

So that a node which comes later has it too, also when the notebook has gone.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from nbdist.cluster.node import NodeLost
from nbdist.wire.code_tree import Digest, parts
from nbdist.wire.messages import CodeHeld, GetCode, PutCode, Request

CODE_TIMEOUT = 60.0
"""Seconds for a node to take in one part: some megabytes, perhaps over a slow line."""


class CodeNode(Protocol):
    """A node as far as code goes."""

    name: str

    async def ask(self, request: Request, timeout: float) -> CodeHeld:
        """Return the reply; raises NodeLost."""


class KeptCode:
    """What is in the notebook's files now, and which nodes have been brought to it."""

    def __init__(self) -> None:
        self._get: GetCode | None = None
        self._contents: dict[Digest, bytes] = {}
        self._sharing: weakref.WeakKeyDictionary[CodeNode, bool] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        files = len(self._get.files) if self._get else 0
        return f"<KeptCode {files} files, on {len(self._sharing)} nodes>"

    async def look(self, get: GetCode, nodes: Iterable[CodeNode]) -> CodeHeld:
        """Say what is missing here of the notebook's files; where nothing is, nodes get them."""
        self._get = get
        self._sharing.clear()
        wanted = dict.fromkeys(file.digest for file in get.files.values())
        self._contents = {d: c for d, c in self._contents.items() if d in wanted}
        lacks = tuple(digest for digest in wanted if digest not in self._contents)
        return CodeHeld("", lacks) if lacks else await self.bring(nodes)

    async def take(self, put: PutCode, nodes: Iterable[CodeNode]) -> CodeHeld:
        """Take in what was missing; after the last part, nodes get it."""
        self._contents |= put.part.contents
        if put.part.files is None or self._get is None:
            return CodeHeld("")
        wanted = {file.digest for file in put.part.files.values()}
        if lacks := tuple(wanted - self._contents.keys()):
            return CodeHeld("", lacks)
        return await self.bring(nodes)

    async def bring(self, nodes: Iterable[CodeNode]) -> CodeHeld:
        """Bring the files to those nodes that do not have them yet; the first problem, if any."""
        if (get := self._get) is None:
            return CodeHeld("")
        there = [*nodes]
        new = [node for node in there if node not in self._sharing]
        for held in await asyncio.gather(*(self._bring_to(node, get) for node in new)):
            if held.problem:
                return held
        return CodeHeld("", is_shared=bool(there) and all(self._sharing[node] for node in there))

    async def _bring_to(self, node: CodeNode, get: GetCode) -> CodeHeld:
        try:
            held = await node.ask(get, CODE_TIMEOUT)
            if not held.is_shared:
                contents = ((digest, self._contents[digest]) for digest in held.lacks)
                for part in parts(get.files, contents):
                    held = await node.ask(PutCode(part), CODE_TIMEOUT)
                    if held.problem:
                        return replace(held, host=node.name)
        except NodeLost as lost:
            return CodeHeld(node.name, problem=str(lost))
        self._sharing[node] = held.is_shared
        return CodeHeld(node.name)
