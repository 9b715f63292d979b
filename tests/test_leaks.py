"""Tests of the guard in tests/conftest.py, which fails a test that leaves something behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import SOON

pytestmark = pytest.mark.world

LEAKY = """
import os, socket, subprocess, sys, threading
from multiprocessing import shared_memory
from pathlib import Path

import pytest

kept = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def sleeper(seconds):
    return subprocess.Popen(["sleep", str(seconds)], start_new_session=True)


def test_process():
    kept.append(sleeper(60))


def test_child():
    subprocess.run(["true"], check=True)


@pytest.mark.own_agent
def test_orphan():
    subprocess.run(["sh", "-c", "setsid sleep 60 &"], stdin=subprocess.DEVNULL,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def test_cleared_environment():
    kept.append(subprocess.Popen(["sleep", "60"], env={}))


def test_thread():
    ended = threading.Event()
    kept.append(ended)
    threading.Thread(target=ended.wait, name="forgotten", daemon=True).start()


def test_socket():
    kept.append(socket.socket(socket.AF_UNIX))


def test_segment():
    fd = os.memfd_create("nbdist")
    kept.append(fd)


def test_shared_memory():
    Path("/dev/shm", os.environ["LEAK"]).write_text("")


def test_folder():
    Path(os.environ["XDG_RUNTIME_DIR"], "nbdist-x").mkdir()


def test_ends_soon():
    kept.append(sleeper(0.3))


def test_garbage():
    one = [socket.socket(socket.AF_UNIX)]
    one.append(one)


@pytest.fixture(scope="module")
def forgetful():
    yield
    kept.append(socket.socket(socket.AF_UNIX))


@pytest.mark.shared_world
def test_of_a_shared_world(forgetful):
    kept.append(sleeper(0.01))
    kept.append(socket.socket(socket.AF_UNIX))


def test_after_it(forgetful):
    pass
"""


LEFT = {
    **dict.fromkeys(
        ("test_process", "test_orphan", "test_cleared_environment"), r"process \d+: sleep 60"
    ),
    "test_thread": "thread forgotten",
    "test_socket": r"descriptor \d+: socket:\[\d+\]",
    "test_segment": r"descriptor \d+: /memfd:nbdist \(deleted\)",
    "test_shared_memory": r"shared memory /dev/shm/nbdist-test-\d+",
    "test_folder": "runtime folder nbdist-x",
}


def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    """A test that leaves something behind has an error that names exactly this thing.

    The guard waits for processes that end a moment later; things that a shared world's tests leave
    are counted when the module ends.  A test of the tier `unit` must not start a process.
    """
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    segment = f"nbdist-test-{os.getpid()}"
    more = {"NBDIST_LEAK_TIMEOUT": "0.6", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "LEAK": segment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-rA"]
    try:
        report = subprocess.run(
            [*command, str(tmp_path)],
            env=os.environ | more,
            capture_output=True,
            text=True,
            timeout=SOON,
            stdin=subprocess.DEVNULL,
        ).stdout
    finally:
        Path("/dev/shm", segment).unlink(missing_ok=True)
    for pid in re.findall(r"process (\d+): sleep 60", report):
        os.kill(int(pid), 9)
    for test, line in LEFT.items():
        section = rf"ERROR at teardown of {test} _+\nleft behind by the test:\n  {line}\n\(after \d"
        assert re.search(section, report), report
    for test in ("test_ends_soon", "test_garbage"):
        assert re.search(rf"^PASSED \S*test_leaky.py::{test}$", report, re.MULTILINE)
        assert f"teardown of {test} " not in report
    assert "teardown of test_of_a_shared_world" not in report
    [section] = re.findall(r"teardown of test_after_it _+\n(.*?)\n[_=]", report, re.DOTALL)
    of_module = r"left behind by the module:\n(  descriptor \S+ \S+\n){2}\(after \S+ s\)"
    assert re.fullmatch(of_module, section)
    assert re.search(r"teardown of test_child _+\nit starts a process: mark it `world`", report)
