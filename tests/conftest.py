"""What every test gets: a runtime folder of its own, and a guard against what it leaves behind.

The guard looks from outside, by process id: at processes, wherever they have been
reparented to, and at this process's threads and descriptors, shared memory and runtime
folders.  What is only ending gets some seconds.
"""

from __future__ import annotations

import compileall
import gc
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

import nbdist
from nbdist.world.states import State
from nbdist.world.world import World
from tests import worlds
from tests.worlds import IDLE_IMPORTS, NewWorld, SharedAgent

# Long enough for an agent that ends its workers politely first.
LEAK_TIMEOUT = float(os.environ.get("NBDIST_LEAK_TIMEOUT", "8"))
LONGEST_WAIT = 30.0
POLL_SECONDS = 0.02

# Every process that a test starts inherits this, also when it outlives its parent, or has
# left its session.
MARK = f"NBDIST_TEST_RUN={uuid.uuid4().hex}"

# Kinds of descriptors that somebody has to close.  Others belong to libraries, which
# open them once for the whole process (zmq's eventfds, asyncio's epoll).
CLOSABLE = ("socket:", "pipe:", "anon_inode:[pidfd]", "/memfd:nbdist")

# What lasts as long as the run once a test has asked for it; a module whose fixtures ask for it
# by name says so with a LASTING of its own.
LASTING = ("sshd", "slurm", "etcd", "ray", "network", "jupyter")

# Several run beside one another, a file each: the longest must not be the last to begin.
LONGEST = (
    "hosts/test_ray.py",
    "hosts/test_membership.py",
    "hosts/test_slurm.py",
    "hosts/test_worlds.py",
    "faults/test_nothing_left.py",
    "notebooks/test_notebooks.py",
    "notebook/commands/test_export.py",
    "faults/test_freeing.py",
    "browser/test_tutorials.py",
    "browser/test_cells.py",
    "world/test_workers.py",
    "test_api.py",
    "world/test_world.py",
    "notebook/test_magics.py",
    "node/test_inspect.py",
    "libraries/test_libraries.py",
    "node/test_agent.py",
    "gpu/test_command.py",
    "node/test_processes.py",
    "faults/test_server.py",
    "worker/group/test_gloo.py",
)


# What a test needs and costs: a marker of each test, set by its folder, else by what it asks for.
TIERS = {
    "unit": "starts no process",
    "world": "has workers of the agent that all tests of the process share, or a short process",
    "kernel": "has a notebook kernel",
    "slow": "has agents of its own: starts, deaths, what is left behind",
    "hosts": "needs machines: network namespaces with sshd, Slurm, etcd, Ray",
    "browser": "opens JupyterLab in headless Chromium",
    "gpu": "needs a GPU",
    "matrix": "runs with other versions of what nbdist stands on",
}
OF_FOLDER = {
    **{name: name for name in ("hosts", "browser", "gpu", "matrix")},
    **dict.fromkeys(("attacks", "bench", "faults", "libraries", "notebooks"), "slow"),
}
OF_FIXTURE = {"Notebook": "kernel", "World": "world", "NewWorld": "world"}  # by what it gives
MARKERS = {
    **TIERS,
    "own_agent": "starts agents of its own, so that it is `slow`",
    "smoke": "is run also without `--all`, whatever it costs",
    "shared_world(ranks)": "the `world` of a module's tests, after which leaks are counted",
}
QUICK = "unit or world or smoke"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"all tests, and not only: {QUICK}")


def tier_of(item: pytest.Item) -> str:
    """The first that says so: the test or its module, its folder, a fixture of it."""
    if item.get_closest_marker("own_agent"):
        return "slow"
    for tier in TIERS:
        if item.get_closest_marker(tier):
            return tier
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return OF_FOLDER.get(folder) or min(_tiers_of_fixtures(item), default="unit")


def _tiers_of_fixtures(item: pytest.Item) -> Iterator[str]:
    for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
        given = str(definitions[-1].func.__annotations__.get("return"))
        for word in re.findall(r"\w+", given):
            if word in OF_FIXTURE:
                yield OF_FIXTURE[word]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))
    tests = Path(__file__).parent
    place = {tests / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_configure(config: pytest.Config) -> None:
    for marker, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    asked_for = config.option.all or config.option.markexpr or config.option.keyword
    if not asked_for and config.args_source is not config.ArgsSource.ARGS:
        config.option.markexpr = QUICK
    # Imports for a training's first step, which few tests make: see tests/worlds.py.
    os.environ[IDLE_IMPORTS] = "0"
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    # Tests are of this machine also in an allocation of Slurm's.
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    # A shell's background jobs ignore Ctrl-C, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A short path, because it holds unix sockets, and nobody else's folders beside ours.
    home = tempfile.mkdtemp(prefix="nbt-")
    for name in ("XDG_RUNTIME_DIR", "IPYTHONDIR"):
        folder = Path(home, name[:2].lower())
        folder.mkdir(mode=0o700)
        os.environ[name] = str(folder)
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    # As the wheel that a user installs is: hundreds of processes are to read it and not to compile.
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(nbdist.__file__).parent, quiet=2, workers=0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Whoever is the first to rewrite a test's asserts leaves that to the others beside it."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


@dataclass(frozen=True)
class Traces:
    """What exists now, of everything that a test can leave behind."""

    processes: frozenset[str]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    shared_memory: frozenset[str]
    folders: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        return cls(
            processes=frozenset(name for name in os.listdir("/proc") if name.isdigit()),
            threads=frozenset(threading.enumerate()),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_listing("/dev/shm")),
            folders=frozenset(
                name
                for name in _listing(os.environ.get("XDG_RUNTIME_DIR", ""))
                if name.startswith("nbdist-")  # Other programs keep theirs.
            ),
        )

    def left_since(self, before: Traces) -> list[str]:
        """One line for each thing that is here and was not before, and is ours."""
        processes = (
            pid for pid in self.processes - before.processes if _is_ours(pid) and not _is_spare(pid)
        )
        new = self.shared_memory - before.shared_memory
        memory = (name for name in new if not _is_anothers(name) and _is_unused(name))
        return [
            *(f"process {pid}: {_command(pid)}" for pid in sorted(processes, key=int)),
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"descriptor {fd}: {to}" for fd, to in self.descriptors - before.descriptors),
            *(f"shared memory /dev/shm/{name}" for name in memory),
            *(f"runtime folder {name}" for name in self.folders - before.folders),
        ]


def _listing(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _descriptors() -> Iterator[tuple[str, str]]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # The one of the listing itself.
        # pytest itself puts other files in the place of the standard streams.
        if target.startswith(CLOSABLE) and int(fd) > 2:
            yield fd, target


def _is_ours(pid: str) -> bool:
    """Whether this test run started it and it has not ended.

    By the mark in its environment, or by its parent: one that has only just been started
    shows no environment yet, and a test can start one with an environment of its own.
    """
    if pid == str(os.getpid()):
        return True
    try:
        # What stands before is the program's name, which may hold anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
        marked = MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # It has ended, or belongs to somebody else.
    return state != "Z" and (marked or (parent != "0" and _is_ours(parent)))


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended just now"


def _is_spare(pid: str) -> bool:
    """Whether Ray or Chromium keeps it for what may come, as long as they are up; no actor."""
    spares = r"ray::IDLE|workers/default_worker\.py|/chrom(e|ium) --type="
    return re.search(spares, _command(pid)) is not None


def _waited(pid: str) -> float:
    """Seconds for which its main thread has waited for a processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _doing(pid: str) -> str:
    """Its state, and where in the kernel it waits: for whoever finds out why it is there."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
        return f"{pid} {state} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return f"{pid} has ended"


def _is_anothers(segment: str) -> bool:
    """Whether it is left on purpose in a run that `tests/test_leaks.py` has started."""
    return segment.startswith("nbdist-test-") and segment != os.environ.get("LEAK")


def _is_unused(segment: str) -> bool:
    """Whether no process that is not ours has the segment mapped: they have tests too.

    Told by its inode: glibc makes a semaphore under another name.
    """
    try:
        inode = str(os.stat(f"/dev/shm/{segment}").st_ino)
    except FileNotFoundError:
        return False  # It has gone.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        mapped = any("/dev/shm/" in line and line.split()[4] == inode for line in lines)
        if mapped and not _is_ours(pid):
            return False
    return True


def _complain(before: Traces, where: str, told: set[str]) -> None:
    """Fails unless all that is new has gone, after some seconds at most.

    Seconds in which what is left waits for a processor, since other programs have them, do not
    count.  What a test was blamed for, and `told` holds, the module is not blamed for again.
    """
    begun = time.monotonic()
    first: dict[str, float] = {}
    collected = False
    while left := [line for line in Traces.now().left_since(before) if line not in told]:
        if not collected:
            # Sockets and threads may wait for the cycle that holds them.
            gc.collect()
            collected = True
            continue
        pids = [line.split()[1].rstrip(":") for line in left if line.startswith("process ")]
        waited = max(
            (_waited(pid) - first.setdefault(pid, _waited(pid)) for pid in pids), default=0
        )
        seconds = time.monotonic() - begun
        if seconds > LEAK_TIMEOUT + min(waited, LONGEST_WAIT):
            told.update(left)
            doing = "; ".join([f"after {seconds:.1f} s", *map(_doing, pids)])
            lines = "".join(f"  {line}\n" for line in left)
            pytest.fail(f"left behind by {where}:\n{lines}({doing})", pytrace=False)
        time.sleep(POLL_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_by_all() -> Iterator[set[str]]:
    """What session-wide fixtures leave behind is an error of the last test."""
    before = Traces.now()
    told: set[str] = set()
    yield told
    _complain(before, "the whole run", told)


AGENT = worlds.share_agent()


@pytest.fixture(scope="session")
def agent(nothing_is_left_by_all: set[str]) -> Iterator[SharedAgent]:
    """The agent of all worlds of this process, but of those of tests marked `own_agent`."""
    yield AGENT
    AGENT.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    AGENT.is_offered = not item.get_closest_marker("own_agent")


@pytest.fixture(scope="session")
def new_world(agent: SharedAgent) -> NewWorld:
    """Makes worlds, not started yet."""
    return worlds.new_world


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, new_world: NewWorld) -> Iterator[World]:
    """The world of a module that is marked `shared_world(ranks)`."""
    mark = request.node.get_closest_marker("shared_world")
    with new_world(*mark.args) as world:
        yield world


@pytest.fixture
def world(request: pytest.FixtureRequest, started: World) -> World:
    """It, started anew where a test has lost it, or has given it another size."""
    (ranks,) = request.node.get_closest_marker("shared_world").args
    if started.state is not State.READY or started.size != ranks:
        started.restart(ranks)
    return started


@pytest.fixture
def empty_snapshot_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of this test lie in its own folder."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_by_the_module(
    request: pytest.FixtureRequest, nothing_is_left_by_all: set[str]
) -> Iterator[set[str]]:
    """What a module's fixtures leave behind is an error of its last test."""
    items = [item for item in request.session.items if item.path == request.path]
    if not all(item.get_closest_marker("unit") for item in items):
        request.getfixturevalue("agent").start()
    for name in LASTING:
        asked = name in getattr(request.module, "LASTING", ())
        if asked or any(name in item.fixturenames for item in items):  # type: ignore[attr-defined]
            with suppress(pytest.skip.Exception):  # the test that asks for it says so
                request.getfixturevalue(name)  # before anything is counted
    before = Traces.now()
    yield nothing_is_left_by_all
    _complain(before, "the module", nothing_is_left_by_all)


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, nothing_is_left_by_the_module: set[str]
) -> Iterator[None]:
    """What a test leaves behind is an error of the test.

    Tests whose world is shared by the module say so: `pytestmark = pytest.mark.shared_world(2)`.
    """
    before, children = Traces.now(), getrusage(RUSAGE_CHILDREN).ru_minflt
    yield
    if not request.node.get_closest_marker("shared_world"):
        _complain(before, "the test", nothing_is_left_by_the_module)
    started = getrusage(RUSAGE_CHILDREN).ru_minflt != children
    if started and request.node.get_closest_marker("unit"):
        pytest.fail("it starts a process: mark it `world`, or what it is", pytrace=False)
    if AGENT.has_ended and not request.node.get_closest_marker("own_agent"):
        pytest.fail("it ends the agent that tests share: mark it `own_agent`", pytrace=False)


@pytest.fixture
def idle_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers import while idle what a training's first step needs, as a user's do."""
    monkeypatch.delenv(IDLE_IMPORTS)


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has these lines be all that is typed where the test runs."""
    return lambda *lines: monkeypatch.setattr(
        "sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines))
    )


@pytest.fixture
def traces_left() -> Callable[[], list[str]]:
    """A question to ask in mid-test: what is there that was not when it began?"""
    before = Traces.now()
    return lambda: Traces.now().left_since(before)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file into the folder that is the notebook's own for the time of the test."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str, mode: int = 0o644) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    return write
