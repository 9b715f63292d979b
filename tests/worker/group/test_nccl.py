"""Tests of `nbdist.worker.group.nccl` without a GPU; tests/gpu has the tests with GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist.wire.places import Begun, Collective
from nbdist.worker.compat import nccl as seam
from nbdist.worker.compat.torch import RECORDS_GLOO, RENEWS_GLOO
from nbdist.worker.group import nccl
from nbdist.worker.group.gloo import is_between_ranks
from nbdist.worker.group.nccl import AbortHangs, Nccl, Pending, Recording, UnderWay
from nbdist.worker.group.stores import Meeting
from tests.waiting import SOON, wait_until

GPU = torch.device("cuda:0")

reconfigures = pytest.mark.skipif(not RENEWS_GLOO, reason="torch has no reconfigure before 2.14")


class Legacy:
    """A stand-in for torch's older class of nccl, whose calls return after `wait`."""

    kind = "nccl"

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait
        self.done: list[object] = []

    def name(self) -> str:
        return self.kind

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.wait()
        self.done.append(device)

    def abort(self) -> None:
        self.wait()
        self.done.append("abort")


class Nccl2(Legacy):
    """A stand-in for the class nccl2, which connects by `reconfigure`."""

    kind = "nccl2"

    def get_reconfigure_handle(self) -> str:
        return f"handle of {id(self)}"

    def reconfigure(self, options: Any) -> Any:
        self.wait()
        self.done.append((options.uuid, options.handles))
        return SimpleNamespace(wait=lambda: None)


def refuse(said: str) -> None:
    raise RuntimeError(said)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """The `Nccl` of a worker, in a process that makes no backend of nccl."""
    monkeypatch.setattr(seam, "when_nccl2_is_made", lambda make: None)
    monkeypatch.setattr(seam, "when_legacy_is_made", lambda made: None)
    return Nccl(GPU)


def connect(made: Nccl, backend: Legacy, timeout: float = 5.0, **more: Any) -> None:
    """Connect a backend as a rank of a group, by default as its only rank."""
    meeting = Meeting(more.get("store") or dist.HashStore(), 7, more.get("over"))
    seat = made.seat(meeting, range(more.get("size", 1)), more.get("rank", 0))
    made.connect(backend, meeting, seat, timeout)


def test_a_backend_connects_on_the_ranks_device(adapter: Nccl) -> None:
    """A backend connects on the rank's device, and an error of nccl is raised in the caller."""
    backend = Legacy()
    connect(adapter, backend)
    assert backend.done == [GPU]
    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        connect(adapter, Legacy(partial(refuse, "Duplicate GPU detected")))


def test_a_rank_that_waits_for_others_can_be_released(adapter: Nccl) -> None:
    """The first rank waits in the store, where an abort releases it, before it calls torch."""
    store, first, second = dist.HashStore(), Legacy(), Legacy()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(connect, adapter, first, store=store, size=2)
        wait_until(lambda: adapter.store.has_waiting_thread)
        adapter.abort([])
        with pytest.raises(ConnectionResetError):
            waits.result(SOON)
        assert first.done == []
        adapter.store.start_over()
        other = Nccl(GPU)
        waits = pool.submit(connect, adapter, first, store=store, size=2)
        connect(other, second, rank=1, store=store, size=2)
        waits.result(SOON)
    assert first.done == second.done == [GPU]


@reconfigures
def test_reconfigure_gets_the_handles_of_all_ranks(adapter: Nccl) -> None:
    """nccl2 is reconfigured with all ranks' handles in rank order, and the group's generation."""
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


@reconfigures
@pytest.mark.parametrize(
    ("said", "is_between"),
    [
        ("failed during reconfigure: remote process exited or there was a network error", True),
        ("failed during reconfigure: unhandled cuda error", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_a_gpus_error_is_not_between_ranks(adapter: Nccl, said: str, *, is_between: bool) -> None:
    """A rank that has died is an error between ranks; a GPU's error is of this process alone."""
    with pytest.raises(RuntimeError, match=said) as found:
        connect(adapter, Nccl2(partial(refuse, said)))
    assert is_between_ranks(found.value) == is_between


def test_connections_and_aborts_do_not_wait_for_ever(
    adapter: Nccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting ends at its timeout, if called off, or by an abort; an abort that hangs raises."""
    end = threading.Event()
    with pytest.raises(RuntimeError, match=r"connecting nccl took more than \d+ s"):
        connect(adapter, Legacy(end.wait), timeout=0.1)
    over = tmp_path / "over"
    over.touch()
    with pytest.raises(ConnectionResetError):
        connect(adapter, Legacy(end.wait), over=over)
    connects = threading.Event()
    with ThreadPoolExecutor() as pool:
        backend = Legacy(lambda: (connects.set(), end.wait()))
        connecting = pool.submit(connect, adapter, backend, timeout=SOON)
        assert connects.wait(SOON)
        adapter.abort([])
        with pytest.raises(ConnectionResetError):
            connecting.result(SOON)
    monkeypatch.setattr(nccl, "NCCL_ABORT_TIMEOUT", 0.2)
    monkeypatch.setattr(nccl, "ABORT_STEP", 0.1)
    with pytest.raises(AbortHangs, match=r"aborting nccl took more than \d+ s"):
        adapter.abort([Nccl2(end.wait)])
    end.set()


def test_backends_of_a_class_are_aborted_together(adapter: Nccl) -> None:
    """All backends of a class are aborted at once: in turn they would wait for one another."""
    together = threading.Barrier(2)
    backends = [kind(together.wait) for kind in (Legacy, Nccl2, Nccl2, Legacy)]
    adapter.abort(backends)
    assert [each.done for each in backends] == [["abort"]] * 4


def test_an_abort_goes_on_while_kernels_end(adapter: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort goes on past its timeout while collectives end, and raises once none ends."""
    monkeypatch.setattr(nccl, "NCCL_ABORT_TIMEOUT", 0.25)
    monkeypatch.setattr(nccl, "ABORT_STEP", 0.1)
    under_way, over = [*range(8)], threading.Event()

    def pending() -> list[int]:
        under_way[:1] = []  # a collective has ended since the last call
        if not under_way:
            over.set()
        return [*under_way]

    monkeypatch.setattr(seam.ADAPTERS["nccl"], "pending", pending)
    never = threading.Event()
    try:
        adapter.abort([Legacy(over.wait)])
        assert over.is_set()
        with pytest.raises(AbortHangs):
            adapter.abort([Legacy(never.wait)])
    finally:  # waiting threads would keep the process alive
        over.set()
        never.set()


Entries = list[dict[str, Any]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Entries]:
    """Entries of Flight Recorder by class of nccl, the newest first, for the test to fill."""
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
    state = {"retired": False, "state": "scheduled"}
    return of | sizes | {"collective_seq_id": number, **state} | more


@pytest.mark.parametrize("kind", seam.ADAPTERS)
def test_pending_is_the_newest_active_collective(recorded: dict[str, Entries], kind: str) -> None:
    """`pending` names the newest active collective, and leaves out earlier generations."""
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


def test_collectives_of_a_cell_are_numbered_from_one(recorded: dict[str, Entries]) -> None:
    """Collectives since a time are numbered from one in each generation, as on a new rank."""
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
    uneven = {"output_sizes": [[1], [2]]}
    new[:] = [
        entry(7, "nccl2:all_to_all_single", **uneven),
        entry(6, "nccl2:all_gather", **uneven),
        entry(5, "nccl2:all_gather", output_sizes=[[2], [2]]),
    ]
    assert [each.sizes for each in UnderWay().begun(0)] == ["[2]", "", ""]


def test_a_legacy_group_counts_anew(recorded: dict[str, Entries]) -> None:
    """A legacy group that is formed again has a new backend, which counts collectives from 1."""
    old, under_way = recorded["nccl"], UnderWay()
    old.append(entry(1, "nccl:all_reduce", number=5))
    under_way.start_over()
    old.insert(0, entry(2, "nccl:all_reduce", number=1))
    assert [each.number for each in under_way.begun(0)] == [1]


def test_the_last_collective_may_be_of_either_class(recorded: dict[str, Entries]) -> None:
    """The last collective is the newest of both classes, ended or not, in this generation."""
    old, new, under_way = recorded["nccl"], recorded["nccl2"], UnderWay()
    assert under_way.last() is None
    old.append(entry(1, "nccl:barrier", number=4, retired=True))
    assert under_way.last() == Collective("barrier", 4, True, 1)  # noqa: FBT003
    new[:0] = [entry(3, "nccl2:send 0->1", is_p2p=True), entry(2, "nccl2:all_reduce", number=9)]
    assert under_way.last() == Collective("all_reduce", 9, False, 2)  # noqa: FBT003
    new[1]["state"] = "completed"  # and not retired: no watchdog has looked
    assert under_way.last() == Collective("all_reduce", 9, True, 2)  # noqa: FBT003
    under_way.start_over()
    assert under_way.last() is None


@pytest.mark.skipif(not RECORDS_GLOO, reason="this torch records nothing of gloo's")
def test_a_collective_read_as_it_begins_is_soon_right() -> None:
    """A reader soon sees a new collective, though torch counts a collective before recording it."""
    backend, recording = dist.ProcessGroupGloo(dist.HashStore(), 0, 1), Recording()
    recording.start_over()  # forget collectives of other tests
    looks, over = list[tuple[Any, ...]](), threading.Event()

    def look() -> None:
        while not over.is_set():
            looks.append((recording.last(), recording.begun(recording.counts(), 0)))

    def agree(number: int) -> bool:
        last, begun = looks[-1] if looks else (None, ())
        seen = [each.number for each in begun if each.is_done]
        return bool(last and last.number == number and seen == [*range(1, number + 1)])

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        try:
            for number in range(1, 51):
                backend.allreduce([torch.ones(1)]).wait()
                wait_until(lambda: agree(number), f"the look after collective {number}", 5.0)  # noqa: B023
        finally:
            over.set()
        looking.result(SOON)
