"""Hosts that come by themselves, to a world whose notebook has no way to reach them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbdist.wire.offers import SUFFIX, read_key_file, write_offer
from nbdist.wire.ticket import KeyPair, Ticket
from nbdist.world.world import World
from tests.hosts.launched import Joined, lives
from tests.hosts.network import Host, Network, wait_for
from tests.hosts.worlds import TRAIN

JOIN = f"{sys.executable} -m nbdist.terminal join"


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notebook's machine has keys; no host has that folder for its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "nbdist" / "joins"


@contextmanager
def started(
    layout: str, address: str, offers: Path, join: Callable[[str], None]
) -> Iterator[World]:
    """A world for which `join` is called with the place that it shows as soon as it waits."""
    problems: list[BaseException] = []
    has_ended = threading.Event()

    def join_there() -> None:
        try:
            wait_for(lambda: [*offers.glob(f"*{SUFFIX}")], "no key was written")
            (file,) = offers.iterdir()
            join(":".join(file.stem.rsplit("-", 1)))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            problems.append(error)
            signal.raise_signal(signal.SIGINT)  # nobody else will come
        # What is started on a host ends with the thread that starts it.
        has_ended.wait(60)

    joining = threading.Thread(target=join_there)
    joining.start()
    options: dict[str, Any] = {"launcher": "join", "address": address, "log_dir": "", "show": False}
    try:
        with World(layout=layout, **options) as world:
            yield world
    except KeyboardInterrupt:
        raise problems[0] from None
    finally:
        has_ended.set()
        joining.join()


def bring_key(offers: Path, host: Host) -> None:
    """Copy the key to the host, as a user does, as /tmp/key."""
    (file,) = offers.iterdir()
    key = host.path("/tmp/key")
    key.touch(mode=0o600)
    key.write_bytes(file.read_bytes())


def test_a_world(network: Network, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all have the home folder it lives as over ssh."""
    joined = Joined(network)
    for name, value in joined.environ.items():
        monkeypatch.setenv(name, value)
    try:
        lives(joined, network)
    finally:
        joined.close()


def test_hosts_that_share_no_home_folder(network: Network, hosts: list[Host], offers: Path) -> None:
    """With the key from a file, and from stdin; it is in no argument and in no environment."""
    joined: list[subprocess.Popen[bytes]] = []

    def join(place: str) -> None:
        for host in hosts[:2]:
            bring_key(offers, host)
        joined.append(hosts[0].popen(f"{JOIN} {place} --key-file /tmp/key --index 0"))
        joined.append(hosts[1].popen(f"{JOIN} {place} --key-file - --index 1 </tmp/key"))

    with started("2x1", network.address, offers, join) as world:
        world.execute(TRAIN)
        assert world.gather("where") == ["node1", "node2"]
        secret = read_key_file(next(offers.iterdir())).keys.secret.encode()
        for host in hosts[:2]:
            for pid in host.processes():
                assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
                assert secret not in Path(f"/proc/{pid}/environ").read_bytes()
        world.shutdown()
        assert [each.wait(30) for each in joined] == [0, 0]
    assert not [*offers.iterdir()]


def test_who_cannot_come_is_told_in_a_line(
    network: Network, hosts: list[Host], offers: Path
) -> None:
    """No key, a blocked port, a stale place, no network: which place, why, and what to do."""
    with socket.create_server((network.address, 0)) as world:
        port = world.getsockname()[1]
        place = f"{network.address}:{port}"
        write_offer(Ticket((network.address,), port, KeyPair.new().public, KeyPair.new()))
        bring_key(offers, hosts[0])
        assert "has no key for it. Where the home folder is not" in refused(hosts[1], place)
        hosts[0].block_port_of(network.address, port)
        told = refused(hosts[0], f"{place} --key-file /tmp/key")
        assert told.endswith(f"at {place}: no answer within 5 s")
        hosts[0].mend()
    assert "no world waits there (Connection refused)" in refused(hosts[0], place)
    hosts[0].link_down()
    assert "no world waits there (" in refused(hosts[0], place)


def refused(host: Host, words: str) -> str:
    """The last line that the command says where it cannot join."""
    process = host.run(f"{JOIN} {words}", check=False)
    assert process.returncode in (1, 2)
    return process.stderr.splitlines()[-1]
