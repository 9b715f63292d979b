"""Tests of `nbdist.worker.group.nccl`, without a GPU; the rest is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist.wire.views import Begun, Collective
from nbdist.worker.compat import nccl as seam
from nbdist.worker.compat.torch import RECORDS_GLOO, RENEWS_GLOO
from nbdist.worker.group import nccl
from nbdist.worker.group.gloo import is_of_others
from nbdist.worker.group.nccl import AbortHangs, Nccl, Pending, UnderWay
from nbdist.worker.group.stores import Meeting
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

GPU = torch.device("cuda:0")

reconfigures = pytest.mark.skipif(not RENEWS_GLOO, reason="torch has no reconfigure before 2.14")


class Legacy:
    """What torch's has of this: connecting, which takes as long as the others take to come."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait
        self.done: list[object] = []

    def name(self) -> str:
        return "nccl"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.wait()
        self.done.append(device)

    def _group_start(self) -> None:
        self.done.append("start")

    def _group_end(self) -> None:
        self.done.append("end")

    def abort(self) -> None:
        self.wait()
        self.done.append("abort")


class Nccl2(Legacy):
    """The other class: reconfigured, and aborted by itself."""

    def name(self) -> str:
        return "nccl2"

    def get_reconfigure_handle(self) -> str:
        return f"handle of {id(self)}"

    def reconfigure(self, options: Any) -> Any:
        self.wait()
        self.done.append((options.uuid, options.handles))
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """What workers have, in a process that makes no nccl."""
    monkeypatch.setattr(seam, "when_nccl2_is_made", lambda make: None)
    return Nccl(GPU)


def connect(
    made: Nccl,
    backend: Legacy,
    *,
    rank: int = 0,
    over: Path | None = None,
    timeout: float = 5.0,
    store: Any = None,
    size: int = 1,
) -> None:
    meeting = Meeting(store or dist.HashStore(), 7, over)
    made.connect(backend, meeting, made.seat(meeting, range(size), rank), timeout)


def test_all_come(adapter: Nccl) -> None:
    """It is connected on the rank's device."""
    backend = Legacy()
    connect(adapter, backend)
    assert backend.done == [GPU]


@reconfigures
def test_all_come_to_reconfigure(adapter: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl2 gets the handles of all ranks in their order, under this generation's number."""
    store, backends = dist.HashStore(), [Nccl2(), Nccl2()]
    other = Nccl(GPU)
    first = threading.Thread(
        target=lambda: connect(other, backends[1], rank=1, store=store, size=2), daemon=True
    )
    first.start()
    connect(adapter, backends[0], store=store, size=2)
    first.join()
    handles = [each.get_reconfigure_handle() for each in backends]
    assert [each.done for each in backends] == [[(7, handles)]] * 2
    assert [vars(each)["bound_device_id"] for each in backends] == [GPU, GPU]


def test_what_nccl_says_is_passed_on(adapter: Nccl) -> None:
    """As an error of the thread that has asked."""

    def refuse() -> None:
        raise RuntimeError("Duplicate GPU detected")

    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        connect(adapter, Legacy(refuse))


@reconfigures
@pytest.mark.parametrize(
    ("said", "is_between"),
    [
        ("failed during reconfigure: remote process exited or there was a network error", True),
        ("failed during reconfigure: unhandled cuda error", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_what_keeps_ranks_apart(adapter: Nccl, said: str, *, is_between: bool) -> None:
    """For a rank that has died the others are not to blame; for its own GPU each is."""

    def refuse() -> None:
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said) as found:
        connect(adapter, Nccl2(refuse))
    assert is_of_others(found.value) == is_between


def test_nobody_waits_for_ever(adapter: Nccl, tmp_path: Path) -> None:
    """A rank that does not come in time, or has ended, is told of; the wait is left behind."""
    end = threading.Event()
    with pytest.raises(RuntimeError, match="connecting nccl took more than 0 s"):
        connect(adapter, Legacy(end.wait), timeout=0.1)
    over = tmp_path / "over"
    over.touch()
    with pytest.raises(RuntimeError, match="called off: a rank cannot take part"):
        connect(adapter, Legacy(end.wait), over=over)
    end.set()


def test_what_is_aborted(adapter: Nccl) -> None:
    """The legacy class in one group, nccl2 each by itself and all at once."""
    legacy = [Legacy(), Legacy()]
    together = threading.Barrier(2)  # one after the other would wait here for ever
    adapter.abort([legacy[0], *(new := [Nccl2(together.wait), Nccl2(together.wait)]), legacy[1]])
    assert [each.done for each in legacy] == [["start", "abort", "end"], ["abort"]]
    assert [each.done for each in new] == [["abort"], ["abort"]]


def test_an_abort_that_hangs(adapter: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left behind in time, with an error for which the rank is replaced."""
    monkeypatch.setattr(nccl, "ABORT_TIMEOUT", 0.1)
    end = threading.Event()
    with pytest.raises(AbortHangs, match="aborting nccl took more than 0 s"):
        adapter.abort([Nccl2(end.wait)])
    end.set()


Entries = list[dict[str, Any]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Entries]:
    """What Flight Recorder has of each class, the newest first."""
    found: dict[str, Entries] = {name: [] for name in seam.ADAPTERS}

    def active(name: str) -> Entries:
        return [entry for entry in found[name] if not entry["retired"]]

    for name, adapter in seam.ADAPTERS.items():
        monkeypatch.setattr(adapter, "recorded", partial(iter, found[name]))
        monkeypatch.setattr(adapter, "pending", partial(active, name))
    return found


def entry(record: int, name: str, *, number: int = 0, **more: Any) -> dict[str, Any]:
    of = {"record_id": record, "profiling_name": name, "time_created_ns": record, "is_p2p": False}
    sizes = {"input_sizes": [[2]], "input_dtypes": ["Float"], "process_group": ["0", "world"]}
    sizes["output_sizes"] = sizes["input_sizes"]
    return of | sizes | {"collective_seq_id": number, "retired": False} | more


@pytest.mark.parametrize("kind", seam.ADAPTERS)
def test_what_is_under_way(recorded: dict[str, Entries], kind: str) -> None:
    """The newest of what Flight Recorder has as active, and nothing of earlier generations."""
    recorded[kind].append(entry(7, f"{kind}:all_reduce"))
    under_way = UnderWay()
    assert under_way.pending() == Pending(1, 7, "all_reduce")
    recorded[kind].insert(0, entry(9, f"{kind}:broadcast"))
    assert under_way.pending() == Pending(2, 9, "broadcast")
    under_way.start_over()
    assert under_way.pending() == Pending()
    recorded[kind].insert(0, entry(10, f"{kind}:recv 0<-1", is_p2p=True))
    assert under_way.pending() == Pending(1, 10, "recv")
    recorded[kind].clear()
    under_way.start_over()
    recorded[kind].append(entry(11, f"{kind}:recv 0<-1", retired=True))
    assert under_way.pending().count == 0


def test_what_a_cell_has_begun(recorded: dict[str, Entries]) -> None:
    """The collectives since then, numbered from one in each generation, as on a new rank."""
    new, under_way = recorded["nccl2"], UnderWay()
    new[:0] = [entry(2, "nccl2:all_reduce", number=6), entry(1, "nccl2:all_reduce", number=5)]
    assert [each.number for each in under_way.begun(0)] == [5, 6]
    assert [each.number for each in under_way.begun(2)] == [6]
    under_way.start_over()
    assert under_way.begun(0) == ()
    new.insert(0, entry(3, "nccl2:broadcast", number=7, retired=True))
    new.insert(0, entry(4, "nccl2:send 0->1", is_p2p=True))
    assert under_way.begun(0) == (
        Begun("0 nccl", 1, "broadcast", "[2]", "Float", "2", is_done=True),
    )


def test_ranks_may_have_parts_that_differ(recorded: dict[str, Entries]) -> None:
    """What each is given then says nothing of whether they meet."""
    new, uneven = recorded["nccl2"], {"output_sizes": [[1], [2]]}
    new.append(entry(1, "nccl2:all_gather", output_sizes=[[2], [2]]))
    new.insert(0, entry(2, "nccl2:all_gather", **uneven))
    new.insert(0, entry(3, "nccl2:all_to_all_single", **uneven))
    assert [each.sizes for each in UnderWay().begun(0)] == ["[2]", "", ""]


def test_the_last_one(recorded: dict[str, Entries]) -> None:
    """Of either class, whether it has ended or not; none of an earlier generation."""
    old, new, under_way = recorded["nccl"], recorded["nccl2"], UnderWay()
    assert under_way.last() is None
    old.append(entry(1, "nccl:barrier", number=4, retired=True))
    assert under_way.last() == Collective("barrier", 4, True, 1)  # noqa: FBT003
    new[:0] = [entry(3, "nccl2:send 0->1", is_p2p=True), entry(2, "nccl2:all_reduce", number=9)]
    assert under_way.last() == Collective("all_reduce", 9, False, 2)  # noqa: FBT003
    under_way.start_over()
    assert under_way.last() is None


def test_a_legacy_group_counts_anew(recorded: dict[str, Entries]) -> None:
    """Its backend is another one after each forming, which counts from one itself."""
    old, under_way = recorded["nccl"], UnderWay()
    old.append(entry(1, "nccl:all_reduce", number=5))
    under_way.start_over()
    old.insert(0, entry(2, "nccl:all_reduce", number=1))
    assert [each.number for each in under_way.begun(0)] == [1]


# --- what torch has recorded of this generation -----------------------------------------


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    if not RECORDS_GLOO:
        pytest.skip("this torch records nothing of gloo's")
    with new_world(2) as world:
        world.execute(
            "import time\n"
            "from nbdist.worker.group.nccl import MOST_BEGUN, Counts, Recording\n"
            "recording = Recording()\n"
            "def counts(): return [*recording.counts().values()]"
        )
        yield world


def test_what_was_begun(world: World) -> None:
    """With name, number and sizes, the oldest first, from a time on."""
    world.execute(
        "dist.barrier()\n"
        "recording.start_over()\n"
        "began = time.time_ns()\n"
        "dist.all_reduce(torch.ones(2, 3))\n"
        "dist.broadcast(torch.ones(4, dtype=torch.int64), 0)\n"
        "found = recording.begun(recording.counts(), began)\n"
        "later = recording.begun(recording.counts(), time.time_ns())"
    )
    for found, later in world.gather("found, later"):
        said = [(each.name, each.sizes, each.dtypes, each.elements) for each in found]
        assert said == [("all_reduce", "[2, 3]", "Float", "6"), ("broadcast", "[4]", "Long", "4")]
        assert found[1].number == found[0].number + 1
        assert later == ()


def test_only_the_last_of_many(world: World) -> None:
    """Ranks that do not meet are rarely further apart."""
    world.execute(
        "began = time.time_ns()\n"
        "for _ in range(MOST_BEGUN + 9): dist.all_reduce(torch.ones(1))\n"
        "found = recording.begun(recording.counts(), began)\n"
        "last = recording.begun(recording.counts(), began)[-1].number"
    )
    for found, last in world.gather("found, last"):
        assert [each.number for each in found] == list(range(last - 63, last + 1))


def test_what_is_waited_for(world: World) -> None:
    """The last that has not ended, and how many have not."""
    world.execute(
        "store, recording = dist.group.WORLD.get_group_store(), Recording()\n"
        "if rank == 1: store.wait(['go'])\n"
        "works = [dist.all_reduce(torch.ones(1), async_op=True)]\n"
        "works.append(dist.broadcast(torch.ones(1), 1, async_op=True))\n"
        "if rank == 0:\n"
        "    unfinished = sum(each.unfinished for each in recording.counts().values())\n"
        "    waited_for = recording.waited_for(recording.counts())\n"
        "    store.set('go', '')\n"
        "for work in works: work.wait()"
    )
    assert world.gather("unfinished, waited_for", ranks=[0]) == [(2, "broadcast")]


def test_another_generation(world: World) -> None:
    """Nothing of what has begun before is under way, or the last one."""
    world.execute(
        "recording = Recording()\n"
        "dist.all_reduce(torch.ones(1))\n"
        "before = recording.last()\n"
        "recording.start_over()\n"
        "after, begun = recording.last(), recording.begun(recording.counts(), 0)"
    )
    for before, after, begun in world.gather("before, after, begun"):
        assert before.name == "all_reduce"
        assert (after, begun) == (None, ())
