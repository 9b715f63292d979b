"""Shared memory of worlds on hosts: what is left of it, and when there is some."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from tests.hosts.network import Host, wait_for

MIB = 1 << 20
SIZE = 64 * MIB
"""Bytes of a big value."""

LIMIT = 80
"""Million bits a second: they take some seven seconds."""


def segments(hosts: list[Host]) -> list[str]:
    """The shared memory that processes of the hosts, and the head, have open."""
    pids = [pid for host in hosts for pid in host.processes()]
    found = []
    for pid in [*pids, *heads()]:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("/memfd:nbdist "):
                found.append(f"{pid}: {target}")
    return found


def heads() -> list[int]:
    """The heads that this process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:
            continue
        if "\0nbdist.cluster\0" in command and f"\0{os.getpid()}\0" in command:
            found.append(int(path.parent.name))
    return found


def nothing_is_left(hosts: list[Host]) -> None:
    """All of it goes, as soon as the head has looked."""
    wait_for(lambda: not segments(hosts), "big values are let go of")


def begun(hosts: list[Host], then: Callable[[], None]) -> threading.Thread:
    """Do something as soon as a big value is on its way: to hosts, or without any from them."""
    before = {*segments(hosts)}

    def watch() -> None:
        wait_for(lambda: {*segments(hosts)} - before, "a big value is on its way")
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def stop() -> None:
    """Press Stop, in a script: Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
