"""Hooks and fixtures of all tests: a private runtime folder, and a guard against leftovers."""

from __future__ import annotations

import asyncio
import compileall
import gc
import inspect
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

import nbdist
from nbdist.system.limits import control_groups
from nbdist.world import inbox
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests import worlds
from tests.tiers import (  # noqa: F401 (pytest's hooks)
    choose,
    may_share_agent,
    pytest_addoption,
    pytest_cmdline_main,
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)
from tests.traces import MARK, Traces, complain
from tests.waiting import SOON, wait_until
from tests.worlds import IDLE_IMPORTS, NewWorld, SharedAgent

# Fixtures that last until the run ends once a test has used them; a module whose fixtures request
# them by name lists them in a LASTING of its own.
LASTING = ("sshd", "slurm", "etcd", "ray", "network", "jupyter")


def pytest_configure(config: pytest.Config) -> None:
    choose(config)
    with suppress(ImportError):  # missing in environments of tests/matrix
        from hypothesis import settings

        settings.register_profile("any pace", deadline=None)
        settings.load_profile("any pace")
    # No idle imports for a first training step, which few tests make: see tests/worlds.py.
    os.environ[IDLE_IMPORTS] = "0"
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    # Tests start their workers on this machine, also in an allocation of Slurm.
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    # A shell's background jobs ignore Ctrl-C, and so would all processes that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A new folder, without folders of others, and with a path short enough for unix sockets.
    home = tempfile.mkdtemp(prefix="nbt-")
    for name in ("XDG_RUNTIME_DIR", "IPYTHONDIR"):
        folder = Path(home, name[:2].lower())
        folder.mkdir(mode=0o700)
        os.environ[name] = str(folder)
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    # Compiled once, as pip does for users, because hundreds of processes import the package.
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(nbdist.__file__).parent, quiet=2, workers=0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the process that rewrites a test's asserts first save the bytecode for the others."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def pytest_collection_finish() -> None:
    """Leave all that exists out of later collections, which `complain` makes after most tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, with the `runner` of its fixtures or with a new one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem.funcargs
    arguments = {name: given[name] for name in pyfuncitem._fixtureinfo.argnames}
    runner = given.get("runner")
    with asyncio.Runner() if runner is None else nullcontext(runner) as found:
        found.run(asyncio.wait_for(pyfuncitem.obj(**arguments), SOON))
    return True


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The runner of the event loop of a test and its fixtures."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_by_all() -> Iterator[set[str]]:
    """Fails the last test if session-wide fixtures leave something behind."""
    before = Traces.now()
    told: set[str] = set()
    yield told
    complain(before, "the whole run", told)


AGENT = worlds.share_agent()


@pytest.fixture(scope="session")
def shared_agent(nothing_is_left_by_all: set[str]) -> Iterator[SharedAgent]:
    """The agent of all worlds of this process, except in tests marked `own_agent`."""
    yield AGENT
    AGENT.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    AGENT.is_offered = not item.get_closest_marker("own_agent")
    if front_end := sys.modules.get("tests.notebook.front_end"):
        front_end.KERNELS.is_offered = item.get_closest_marker("kernel") is not None


@pytest.fixture(scope="session")
def kernels(nothing_is_left_by_all: set[str]) -> Iterator[object]:
    """The kernels of all notebooks of this process, except in tests marked `own_agent`."""
    from tests.notebook.front_end import KERNELS

    yield KERNELS
    KERNELS.end()


@pytest.fixture
def control_group() -> Iterator[Callable[..., Path]]:
    """Makes a control group that has one of some files of a controller, or skips the test."""
    made = list[Path]()

    def make(controller: str, *files: str) -> Path:
        found = [each.folder for each in control_groups(controller)]
        group = found[0] / f"nbdist-test-{os.getpid()}" if found else Path("/nowhere")
        try:
            group.mkdir()
        except OSError:
            pytest.skip(f"no cgroup for {controller} can be made here")
        made.append(group)
        if not any((group / file).exists() for file in files):
            pytest.skip(f"cgroups have no {files[0]} here")
        return group

    yield make
    for group in made:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "all have left")  # noqa: B023
        group.rmdir()


@pytest.fixture(scope="session")
def new_world(shared_agent: SharedAgent) -> NewWorld:
    """Makes a world without starting its workers."""
    return worlds.new_world


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, new_world: NewWorld) -> Iterator[World]:
    """The world of a module that is marked `shared_world(ranks)`."""
    mark = request.node.get_closest_marker("shared_world")
    with new_world(*mark.args) as world:
        yield world


@pytest.fixture
def world(request: pytest.FixtureRequest, started: World) -> World:
    """The module's world, restarted if it is not ready or has another size than at first."""
    (ranks,) = request.node.get_closest_marker("shared_world").args
    inbox.receive_waiting(started.engine)
    if started.state is not WorldState.READY or started.size != ranks:
        started.restart(ranks)
    return started


@pytest.fixture
def empty_snapshot_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the snapshots of a test into the test's own folder."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_by_the_module(
    request: pytest.FixtureRequest, nothing_is_left_by_all: set[str]
) -> Iterator[set[str]]:
    """Fails a module's last test if the module's fixtures leave something behind."""
    items = [item for item in request.session.items if item.path == request.path]
    if any(map(may_share_agent, items)):
        request.getfixturevalue("shared_agent").start()
    if kernels := [item for item in items if item.get_closest_marker("kernel")]:
        two = any("fresh" in item.fixturenames for item in kernels)  # type: ignore[attr-defined]
        request.getfixturevalue("kernels").start(1 + two)
    for name in LASTING:
        asked = name in getattr(request.module, "LASTING", ())
        if asked or any(name in item.fixturenames for item in items):  # type: ignore[attr-defined]
            with suppress(pytest.skip.Exception):  # a test that uses the fixture is skipped later
                request.getfixturevalue(name)  # starts before the leftovers are counted
    before = Traces.now()
    yield nothing_is_left_by_all
    complain(before, "the module", nothing_is_left_by_all)


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, nothing_is_left_by_the_module: set[str]
) -> Iterator[None]:
    """Fails a test that leaves something behind.

    In a module with `pytestmark = pytest.mark.shared_world(2)` this counts when the module ends.
    """
    before, children = Traces.now(), getrusage(RUSAGE_CHILDREN).ru_minflt
    yield
    if not request.node.get_closest_marker("shared_world"):
        complain(before, "the test", nothing_is_left_by_the_module)
    started = getrusage(RUSAGE_CHILDREN).ru_minflt != children
    if started and request.node.get_closest_marker("unit"):
        pytest.fail("it starts a process: mark it `world`, or what it is", pytrace=False)
    if AGENT.has_ended and not request.node.get_closest_marker("own_agent"):
        pytest.fail("it ends the agent that tests share: mark it `own_agent`", pytrace=False)


@pytest.fixture
def idle_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets fork servers make the idle imports for a first training step, as those of users do."""
    monkeypatch.delenv(IDLE_IMPORTS)


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the lines that the test's process reads from its stdin."""
    return lambda *lines: monkeypatch.setattr(
        "sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines))
    )


@pytest.fixture
def traces_left() -> Callable[[], list[str]]:
    """Returns, in the middle of a test, the things that did not exist when the test began."""
    before = Traces.now()
    return lambda: Traces.now().left_since(before)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        yield Path(folder)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file into a new folder, which is the working directory during the test."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str, mode: int = 0o644) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    return write
