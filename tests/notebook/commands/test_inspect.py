"""Tests of `nbdist.notebook.commands.inspect`: what `%dist_stack` shows of stacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.notebook.commands.inspect import shown_stacks
from nbdist.notebook.outcome import Why
from nbdist.notebook.pool import Pools
from nbdist.wire.views import Place, Stack, StackFrame

CELL = StackFrame("Cell In[5]", 7, "<module>", "dist.all_reduce(t)")
LIBRARY = "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
TORCH = StackFrame(LIBRARY, 83, "wrapper", "return func(*args, **kwargs)")
WAITS = Place(line=7, operation="all_reduce")


def waiting(rank: int) -> Stack:
    return Stack(rank, 100 + rank, "busy", WAITS, (CELL, TORCH))


def test_equal_stacks_are_shown_once() -> None:
    """Ranks with the same calls, but for addresses and pids, are one block."""
    sleep = StackFrame("Cell In[5]", 3, "<module>", "time.sleep(600)")
    stacks = [waiting(3), waiting(0), Stack(1, 101, "busy", Place(line=3), (sleep,)), waiting(2)]
    assert shown_stacks("4 workers", stacks).text.splitlines() == [
        "4 workers",
        "── ranks 0,2-3 same · wait in all_reduce, line 7 ──",
        "  Cell In[5], line 7",
        "    dist.all_reduce(t)",
        "  torch/distributed/distributed_c10d.py, line 83, in wrapper",
        "    return func(*args, **kwargs)",
        "── rank 1 · in line 3: time.sleep(600) ──",
        "  Cell In[5], line 3",
        "    time.sleep(600)",
    ]
    call = StackFrame("Cell In[5]", 1, "<module>", "call()")
    stacks = []
    for rank in range(2):
        own = StackFrame(f"/tmp/{4321 + rank}.py", 9, f"<Call at 0x7f00aabbcc{rank:02x}>")
        stacks.append(Stack(rank, 4321 + rank, "busy", Place(line=1), (call, own)))
    assert "── ranks 0-1 same · in line 1: call() ──" in shown_stacks("", stacks).text


def test_states() -> None:
    """A rank without calls says why it has none."""
    stacks = [
        Stack(0, 100, "idle", Place()),
        Stack(1, 101, "dead", Place()),
        Stack(2, 102, "busy", Place(is_stopped=True)),
        Stack(3, 103, "busy", Place(holds_gil=True), problem="its stack cannot be read"),
        Stack(4, 104, "busy", Place(line=2, holds_gil=True), (CELL,)),
    ]
    assert shown_stacks("5 workers", stacks).text.splitlines()[1:] == [
        "── rank 0 · idle ──",
        "── rank 1 · dead ──",
        "── rank 2 · stopped by a signal ──",
        "  `kill -CONT 102` resumes it",
        "── rank 3 · busy in C code that holds the GIL ──",
        "  its stack cannot be read",
        "── rank 4 · busy in C code that holds the GIL, line 2 ──",
        "  Cell In[5], line 7",
        "    dist.all_reduce(t)",
    ]


def test_html_is_safe() -> None:
    """Code is text in the page, and later blocks are closed once there is much to read."""
    nasty = StackFrame("Cell In[5]", 1, "<lambda>", "f('<script>')")
    deep = [Stack(rank, rank, "busy", Place(line=1), (nasty,) * (40 + rank)) for rank in range(3)]
    html = shown_stacks("3 workers", deep).html
    assert ("<script" in html, "&lt;script&gt;" in html) == (False, True)
    assert (html.count("<details open"), html.count("<details ")) == (1, 3)


def test_without_workers(typed: Callable[[str], str], pools: Pools):
    """How some are started; no name is there, and no failure but in its pool."""
    shown = typed("%dist_status -v").splitlines()
    assert shown[0].startswith("no workers are running · `%%distributed -n 4`")
    assert shown[1:] == ["made on the workers: none", "sent by the notebook: none"]
    assert typed("%dist_stack").startswith("no workers are running")
    assert typed("%dist_why") == "nothing has failed yet\n"
    pools.at("a").why = Why("12:00:00 · rank 1", "bad shard", ("rank 2: the same",), "/x.log")
    assert typed("%dist_why --pool a").splitlines() == [
        "12:00:00 · rank 1", "bad shard", "rank 2: the same", "all of its lines: /x.log"
    ]  # fmt: skip
    assert typed("%dist_why") == "nothing has failed yet\n"


@pytest.mark.world
def test_what_will_not_work_here(
    typed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--doctor` shows what `nbdist doctor` does, of this process's environment; 0.6 s."""
    monkeypatch.setenv("PYTHON_EXEC", "/nowhere/python")
    first, *others = typed("%dist_status --doctor").splitlines()
    assert first.startswith("problem: /nowhere/python cannot be run")
    assert others[-1].startswith("ok: sockets of workers are in ")
