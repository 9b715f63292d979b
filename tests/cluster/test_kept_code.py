"""Tests of `nbdist.cluster.kept_code`: each node gets what it lacks, whenever it comes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from nbdist.agent.code_folder import CodeFolder
from nbdist.cluster.kept_code import KeptCode
from nbdist.cluster.node import NodeLost
from nbdist.wire.code_tree import CodeFile, CodePart, Landmark, digest_of
from nbdist.wire.messages import CodeHeld, GetCode, PutCode, Request


class Direct:
    """A node without a link: what it is asked it does at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.code = CodeFolder()
        self.sent: list[CodePart] = []
        self.is_lost = False

    async def ask(self, request: Request, timeout: float) -> CodeHeld:
        if self.is_lost:
            raise NodeLost(f"{self.name} is lost")
        if isinstance(request, PutCode):
            self.sent.append(request.part)
            return self.code.take(request)
        assert isinstance(request, GetCode)
        return self.code.look(request)

    @property
    def files(self) -> dict[str, str]:
        """What is there."""
        path = self.code.path
        assert path is not None
        found = (each for each in path.rglob("*") if not each.name.startswith(".nbdist"))
        return {str(each.relative_to(path)): each.read_text() for each in found if each.is_file()}


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are unpacked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def bring(kept: KeptCode, nodes: list[Direct], marks: tuple[Landmark, ...] = (), **files: str):
    """What the notebook does with `a="1"` in `a.py`."""
    texts = {f"{name}.py": text.encode() for name, text in files.items()}
    tree = {path: CodeFile(digest_of(text)) for path, text in texts.items()}
    get = GetCode(marks, tree)

    async def both() -> CodeHeld:
        held = await kept.look(get, nodes)
        if not held.lacks:
            return held
        contents = {digest_of(text): text for text in texts.values()}
        wanted = {digest: contents[digest] for digest in held.lacks}
        return await kept.take(PutCode(CodePart(wanted, tree)), nodes)

    return asyncio.run(both())


def test_each_node_gets_what_it_lacks() -> None:
    """Those that are there at once, others when they come; what is known is not asked for again."""
    kept, first, late = KeptCode(), Direct("a"), Direct("b")
    assert bring(kept, [], a="1", b="2") == CodeHeld("")
    assert asyncio.run(kept.bring([first])) == CodeHeld("")
    assert first.files == {"a.py": "1", "b.py": "2"}
    bring(kept, [first], a="1", c="3")
    assert {*first.sent[-1].contents} == {digest_of(b"3")}
    assert asyncio.run(kept.bring([first, late])) == CodeHeld("")
    assert late.files == first.files == {"a.py": "1", "c.py": "3"}
    assert len(first.sent) == 2
    for node in (first, late):
        node.code.close()


def test_nodes_that_share_the_folder_are_sent_nothing(parent: Path) -> None:
    """Where all do, that is said."""
    (parent / "a.py").write_text("1")
    marks = (Landmark.of(str(parent / "a.py")),)
    kept, nodes = KeptCode(), [Direct("a"), Direct("b")]
    assert bring(kept, nodes, marks, a="1").is_shared
    assert [node.sent for node in nodes] == [[], []]


def test_problems_are_told_with_the_host(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node without room, and of one that is lost; it is tried again the next time."""
    kept, node = KeptCode(), Direct("b")
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(parent / "gone"))
        held = bring(kept, [node], a="1")
    assert held.host == "b"
    assert held.problem.startswith(str(parent / "gone"))
    node.is_lost = True
    assert asyncio.run(kept.bring([node])).problem == "b is lost"
    node.is_lost = False
    assert asyncio.run(kept.bring([node])) == CodeHeld("")
    assert node.files == {"a.py": "1"}
    node.code.close()
