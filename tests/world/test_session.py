"""Tests of `nbdist.world.session`: tasks from `submit` to their end, again where they fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.errors import BadRanks, UsageError, WorkerError
from nbdist.values.payload import Identity, pack_names
from nbdist.world.names import Shipped
from nbdist.world.session import Session
from nbdist.world.world import World
from tests.cluster.launchers import install

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with World(1, log_dir="") as world:
        yield world.session


def test_a_task_that_fails_is_run_again(session: Session) -> None:
    """As often as is said, each time under another id; not once it has succeeded."""
    session.run(session.task("tries = 0"))
    failing = session.task("tries += 1\nif tries < 3: raise ValueError('not yet')")
    ids, why = [], []
    for attempt in session.attempts(failing, most=5):
        running = session.submit(attempt)
        session.wait(running)
        ids.append(attempt.id)
        why.append(running.restart)
    assert len({*ids}) == 3
    assert why == [f"rank 0 raised ValueError: not yet: restart {n} of 5" for n in (1, 2)] + [""]
    assert running.error() is None


def test_values_outlive_their_worker(session: Session) -> None:
    """They are taken from one and given to the one after it, as the same objects."""
    session.run(session.task("both = [both_too := [1, 2]]"))
    kept = session.take(["both", "both_too"], [0])
    session.restart()
    session.give_back(kept)
    result = session.run(session.task(fetch=("both[0] is both_too",)))
    assert list(result) == [True]
    assert session.names.owners() == {name: ("workers", {0}) for name in ("both", "both_too")}


def test_names_that_come_along(session: Session) -> None:
    """The table says who has them, unless they could not be rebuilt there; new workers do not."""
    session.restart()
    for value, owners in ((1, {"given": ("notebook", {0})}), (Bad(), {})):
        payload, _ = pack_names({"given": value}, session.namespace)
        shipped = {"given": Shipped(type(value), Identity(value))}
        session.wait(session.submit(session.task(names=payload), shipped=shipped))
        assert session.names.owners() == owners
        session.restart()
        assert session.names.owners() == {}


class Bad:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_what_a_failed_task_has_bound(session: Session) -> None:
    """It is there, also where what was asked for is not."""
    with pytest.raises(WorkerError, match="NameError: name 'nowhere'"):
        session.run(session.task("made = 1", fetch=("nowhere",)))
    assert "made" in session.names.bound(0)


@pytest.mark.own_agent
def test_another_launchers_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that there is not is refused in a line, and leaves the workers as they are."""
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with World(1, log_dir="") as world:
        session = world.session
        session.run(session.task("x = 7"))
        before, agent = session.pids, session.link.agent
        with pytest.raises(
            UsageError, match=r"`--launcher nowhere`: available: here, .*local, .*ssh"
        ):
            session.restart(launcher="nowhere", n=2)
        assert (session.pids, session.size, session.config.launched_by) == (before, 1, "local")
        session.restart(keep=["x"], launcher="here")
        assert "nbdist.cluster" in session.link.agent.command
        assert not psutil.pid_exists(agent.pid)
        assert list(session.run(session.task(fetch=("x",)))) == [7]


@pytest.mark.parametrize("ranks", ["0", [7], [-1], ["0"]])
def test_ranks_that_there_are_not(session: Session, ranks: list[int]) -> None:
    """They are refused in a line, and nothing is sent."""
    with pytest.raises(BadRanks, match="selects no ranks"):
        session.task("x = 1", ranks=ranks)
