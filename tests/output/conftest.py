"""Settings for all tests of this folder: fixed examples, and nothing that tqdm starts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from tqdm.std import tqdm

settings.load_profile("ci")  # the same examples each time, however slow the machine is

# tqdm's own lock contains a lock of multiprocessing: with forkserver, the default of Python 3.14,
# that lock starts a process, which would outlive the test.
tqdm.set_lock(threading.RLock())


@pytest.fixture(autouse=True)
def no_tqdm_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tqdm from starting a thread that would outlive the test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
