"""Tests of `nbdist.cluster.join`: who of a node's processes comes, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from nbdist.cluster import join
from nbdist.cluster.join import Part, part_of, turn_of, without_starters
from nbdist.cluster.ticket import KeyPair, Ticket, listen_with, write_join_key
from nbdist.errors import UsageError
from nbdist.terminal.console import main
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job launcher has started this process, no terminal is there, and no world waits."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nothing\n")))


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody else's, who listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["join", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_stale_place(capsys: pytest.CaptureFixture[str], port: int) -> None:
    """Nobody listens there any more, or there is no key: it is said at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    told = said(capsys, f"127.0.0.1:{gone}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{gone}`: no world waits there (Conn")
    told = said(capsys, f"127.0.0.1:{port}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{port}`: ")
    assert "/nbdist/joins has no key for it. Where the home folder is not" in told


@pytest.fixture
def worlds() -> Iterator[list[tuple[zmq.Socket[bytes], Ticket]]]:
    """Two that wait for agents: where each listens, and its ticket."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as a, context.socket(zmq.ROUTER) as b:
        tickets = []
        for listens in (a, b):
            listen_with(listens, keys := KeyPair.new())
            port = listens.bind_to_random_port("tcp://127.0.0.1", min_port=0)
            tickets.append(Ticket(("127.0.0.1",), port, keys.public, KeyPair.new(), fork=False))
        yield [*zip((a, b), tickets, strict=True)]


@pytest.fixture(params=["another world", "sshd", "nobody who speaks"])
def elsewhere(
    request: pytest.FixtureRequest, worlds: list[tuple[zmq.Socket[bytes], Ticket]]
) -> Iterator[int]:
    """A port at which a world's key is not taken."""
    if request.param == "another world":
        yield worlds[1][1].port
        return
    with socket.create_server(("127.0.0.1", 0)) as server, suppress(OSError):
        if request.param == "sshd":
            threading.Thread(target=greet, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def greet(server: socket.socket) -> None:
    """Say to all who come what sshd does."""
    with suppress(OSError):  # it is over
        while True:
            with server.accept()[0] as one, suppress(ConnectionError):
                one.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                one.recv(1)


def test_a_key_of_elsewhere(
    capsys: pytest.CaptureFixture[str],
    worlds: list[tuple[zmq.Socket[bytes], Ticket]],
    elsewhere: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried at the address that was typed alone, and refused with the name of its world."""
    monkeypatch.setattr("nbdist.cluster.join.REACH_TIMEOUT", 0.5)
    own, ticket = worlds[0]
    (key := tmp_path / "key").touch(0o600)
    key.write_bytes(ticket.to_line())
    told = said(capsys, f"127.0.0.1:{elsewhere}", "--key-file", str(key))
    assert told == (
        f"nbdist: `nbdist join 127.0.0.1:{elsewhere}`: what listens there does not take this key, "
        f"made for the world at 127.0.0.1:{ticket.port}: that one has ended, or the address is "
        "another's."
    )
    assert not own.poll(0)


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, port: int) -> None:
    """A place that is none, a key file that is not there, a key that is none, an unknown name."""
    assert said(capsys, "nowhere") == (
        "nbdist: `nbdist join nowhere`: it is HOST:PORT, as shown by the notebook."
    )
    place = f"127.0.0.1:{port}"
    missing = str(tmp_path / "missing")
    told = said(capsys, place, "--key-file", missing)
    assert told == f"nbdist: `--key-file {missing}`: No such file or directory."
    told = said(capsys, place, "--key-file", "-")
    assert told.startswith(f"nbdist: `nbdist join {place}`: that is no ticket of a world")
    write_join_key(Ticket(("127.0.0.1",), port, KeyPair.new().public, KeyPair.new()))
    told = said(capsys, f"nowhere.invalid:{port}")
    assert told.startswith(f"nbdist: `nbdist join nowhere.invalid:{port}`: ")


TORCHRUN = {"GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("environ", "leads", "node"),
    [
        ({}, True, -1),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, True, 1),
        ({**TORCHRUN, "LOCAL_RANK": "3"}, False, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True, -1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, -1),
        ({**SLURM, "SLURM_LOCALID": "0"}, True, 2),
        ({**SLURM, "SLURM_LOCALID": "1"}, False, 2),
        ({**SLURM, "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, -1),
        ({**SLURM, "SLURM_LOCALID": "0", **TORCHRUN, "LOCAL_RANK": "1"}, False, 1),
        ({"JOB_COMPLETION_INDEX": "3"}, True, 3),
        ({"JOB_COMPLETION_INDEX": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, 3),
        ({"LOCAL_RANK": "zero"}, True, -1),
    ],
)
def test_who_leads_a_node(environ: Mapping[str, str], leads: bool, node: int) -> None:  # noqa: FBT001
    """The first there, by whatever stands nearest; without a number it is alone."""
    part = part_of(environ, "a:1")
    assert (part.leads, part.node) == (leads, node)


def test_processes_meet_their_own() -> None:
    """Those of one job on one node have a key in common, and no others."""
    first = part_of({**TORCHRUN, "LOCAL_RANK": "0"}, "a:1").key
    assert part_of({**TORCHRUN, "LOCAL_RANK": "1"}, "a:1").key == first
    others = [
        part_of({**TORCHRUN, "LOCAL_RANK": "1"}, "a:2"),
        part_of({**TORCHRUN, "LOCAL_RANK": "1", "GROUP_RANK": "0"}, "a:1"),
        part_of({**TORCHRUN, "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}, "a:1"),
        part_of({**SLURM, "SLURM_LOCALID": "1"}, "a:1"),
    ]
    assert len({first, *(part.key for part in others)}) == 5
    assert part_of({}, "a:1") == Part(leads=True, node=-1, key="")


def test_workers_do_not_take_themselves_for_others() -> None:
    """What torchrun or mpirun has said to the process is none of the agent's environment."""
    environ = {
        **{"PATH": "/bin", "HF_HOME": "/hf", "RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "1"},
        **{"TORCHELASTIC_RUN_ID": "none", "OMPI_COMM_WORLD_RANK": "3", "OMP_NUM_THREADS": "1"},
        **{"PMIX_NAMESPACE": "x", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "1"},
    }
    kept = {"PATH": "/bin", "HF_HOME": "/hf", "SLURM_JOB_ID": "7"}
    assert without_starters(environ) == kept
    del environ["TORCHELASTIC_RUN_ID"]
    assert without_starters(environ) == {**kept, "OMP_NUM_THREADS": "1"}


WAIT = "import sys; from nbdist.cluster.join import turn_of\n"
WAIT += "with turn_of(sys.argv[1]) as turn:\n"
WAIT += "    print(flush=True); sys.exit(turn.outcome(float(sys.argv[2])))"
WORK = "import sys, time; from nbdist.cluster.join import turn_of\n"
WORK += "with turn_of(sys.argv[1]) as turn: turn.begin(); print(flush=True); time.sleep(60)"


@pytest.fixture
def process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], subprocess.Popen[str]]:
    """Starts a process that takes part; the folder in which they meet is the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(join.tempfile, "tempdir", None)

    def start(code: str, key: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, key, "0"], stdout=subprocess.PIPE, text=True
        )

    return start


@pytest.mark.world
def test_who_waits_ends_as_who_works(
    process: Callable[[str, str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Also those that came first; the last leaves nothing behind."""
    key = uuid.uuid4().hex
    waiting = [process(WAIT, key), process(WAIT, key)]
    for each in waiting:
        assert each.stdout is not None
        each.stdout.readline()
        each.stdout.close()
    with turn_of(key) as mine:
        mine.begin()
        folder = tmp_path / f"nbdist-join-{os.geteuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        mine.ended(7)
    assert [each.wait(20) for each in waiting] == [7, 7]
    wait_until(lambda: not folder.exists(), "the folder is gone")


@pytest.mark.world
def test_where_who_works_is_killed_the_others_end(
    process: Callable[[str, str], subprocess.Popen[str]],
) -> None:
    """With 1: nobody has said anything."""
    working = process(WORK, "key")
    assert working.stdout is not None
    working.stdout.readline()
    waiting = process(WAIT, "key")
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.stdout.close()
    working.send_signal(signal.SIGKILL)
    assert (working.wait(20), waiting.wait(20)) == (-signal.SIGKILL, 1)
    working.stdout.close()


@pytest.mark.world
def test_what_a_killed_one_has_left_goes_with_the_next(
    process: Callable[[str, str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Whatever their key; where others wait nothing is removed, but for the last of them."""
    killed, waiting = process(WORK, "killed"), process(WAIT, "key")
    for each in (killed, waiting):
        assert each.stdout is not None
        each.stdout.readline()
        each.stdout.close()
    killed.kill()
    killed.wait()
    with turn_of("another"):
        pass
    folder = tmp_path / f"nbdist-join-{os.geteuid()}"
    assert [each.name for each in folder.iterdir()] == ["key"]
    with turn_of("key") as mine:
        mine.begin()
        mine.ended(0)
    assert waiting.wait(20) == 0
    wait_until(lambda: not folder.exists(), "the folder is gone")


def test_where_nobody_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is printed after a while."""
    monkeypatch.setattr(join.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(join, "LEADER_TIMEOUT", 0.2)
    with (
        pytest.raises(UsageError, match="no process with local rank 0 connected"),
        turn_of("k") as mine,
    ):
        mine.outcome(0.0)
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_one_has_left_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All processes of it were killed; the same job is started again."""
    monkeypatch.setattr(join.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(join, "LEADER_TIMEOUT", 0.2)
    with turn_of("k") as earlier, turn_of("k") as mine:
        earlier.begin()
        earlier.ended(3)
        assert mine.outcome(0.0) == 3
        with pytest.raises(UsageError, match="no process with local rank 0 connected"):
            mine.outcome(time.time() + 1.0)


def test_a_folder_of_others_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user may have made one of that name, to see or steer what happens."""
    monkeypatch.setattr(join.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"nbdist-join-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"nbdist-join-{os.geteuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="is not a folder that only this user"), turn_of("k"):
        pass
