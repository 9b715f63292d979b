"""The guard of tests/conftest.py: each kind of thing left behind fails the test that left it."""

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


@pytest.mark.world
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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says about the tests above, in a process of its own."""
    folder = tmp_path_factory.mktemp("leaky")
    shutil.copy(Path(__file__).parent / "conftest.py", folder)
    (folder / "test_leaky.py").write_text(LEAKY)
    segment = f"nbdist-test-{os.getpid()}"
    environ = os.environ | {"NBDIST_LEAK_TIMEOUT": "0.6", "LEAK": segment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    try:
        done = subprocess.run(
            [*command, "-rA", str(folder)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=SOON,
            stdin=subprocess.DEVNULL,
        )
    finally:
        Path("/dev/shm", segment).unlink(missing_ok=True)
    for pid in re.findall(r"process (\d+): sleep 60", done.stdout):
        os.kill(int(pid), 9)
    return done.stdout


@pytest.mark.parametrize(
    ("test", "line"),
    [
        ("test_process", r"process \d+: sleep 60"),
        ("test_orphan", r"process \d+: sleep 60"),
        ("test_cleared_environment", r"process \d+: sleep 60"),
        ("test_thread", "thread forgotten"),
        ("test_socket", r"descriptor \d+: socket:\[\d+\]"),
        ("test_segment", r"descriptor \d+: /memfd:nbdist \(deleted\)"),
        ("test_shared_memory", r"shared memory /dev/shm/nbdist-test-\d+"),
        ("test_folder", "runtime folder nbdist-x"),
    ],
)
def test_what_is_left_behind_is_an_error(report, test, line):
    """The test that left something behind has an error that names it, and nothing else."""
    section = rf"ERROR at teardown of {test} _+\nleft behind by the test:\n  {line}\n\(after \d"
    assert re.search(section, report), report


@pytest.mark.parametrize("test", ["test_ends_soon", "test_garbage"])
def test_what_is_ending_is_waited_for(report, test):
    """A process that ends a moment later, and what the collector finds, are no errors."""
    assert f"PASSED ../test_leaky.py::{test}\n" in re.sub(
        r"\S*/test_leaky", "../test_leaky", report
    )
    assert f"teardown of {test} " not in report


def test_a_shared_world_is_counted_with_its_module(report):
    """What a marked test leaves is an error when the module ends, together with the fixture's."""
    assert "teardown of test_of_a_shared_world" not in report
    [section] = re.findall(r"teardown of test_after_it _+\n(.*?)\n[_=]", report, re.S)
    assert re.fullmatch(
        r"left behind by the module:\n  descriptor \S+ \S+\n  descriptor \S+ \S+\n\(after \S+ s\)",
        section,
    )


def test_a_unit_test_that_starts_a_process(report):
    """It has to say so, since the tests without a process are run everywhere at any time."""
    assert re.search(r"teardown of test_child _+\nit starts a process: mark it `world`", report)
