"""Tests of `nbdist.cluster.launcher`: commands that run agents, and machines that join."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nbdist import __version__
from nbdist.cluster import launcher
from nbdist.cluster.launcher import AgentCommand, LaunchError, SshLauncher, find_launcher
from nbdist.cluster.ticket import SUFFIX, KeyPair, Ticket, read_key_file
from nbdist.config import WorldConfig
from nbdist.errors import WorkerDied
from nbdist.topology import parse_hosts
from nbdist.world import inbox, lifecycle
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.cluster.conftest import install
from tests.traces import shows
from tests.waiting import SOON, once, wait_until

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new())


@contextmanager
def running(program: str, folder: Path, timeout: float = SOON) -> Iterator[AgentCommand]:
    """Runs a program in the place of an agent."""
    command = AgentCommand("a", [sys.executable, "-c", program], TICKET, folder)
    try:
        yield command
    finally:
        command.end(timeout)
        command.close()


@pytest.mark.world
def test_an_agents_command_gets_a_ticket_and_ends(tmp_path: Path) -> None:
    """The command ends with its stdin or by force, and reports how it has ended."""
    program = "import sys; print(len(sys.stdin.readline())); sys.stdout.flush(); sys.stdin.read()"
    with running(program, tmp_path) as command:
        assert command.exit_code() is None
        assert repr(command) == f"<AgentCommand {command.pid} exit code None>"
        assert TICKET.keys.secret not in command.command
    assert command.exit_code() == 0
    assert (tmp_path / "a.log").read_text().split() == [str(len(TICKET.to_line()))]
    with running("import sys; sys.exit('no torch here')", tmp_path) as command:
        assert select.select([command], [], [], SOON)[0] == [command]
        assert (command.exit_code(), command.last_lines()[-1]) == (1, "no torch here")
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile 1: signal.pause()"
    with running(f"import signal, sys; {deaf}", tmp_path, 0.1) as command:
        pass
    assert command.exit_code() in (-signal.SIGKILL, -signal.SIGTERM)
    with pytest.raises(FileNotFoundError):
        AgentCommand("a", ["/nowhere/ssh"], TICKET, tmp_path)


def test_launchers_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher is an entry point; if the point cannot be loaded, the error says why."""
    assert isinstance(find_launcher("ssh"), SshLauncher)
    install(tmp_path)
    (tmp_path / "my_launcher.py").write_text("from nbdist.cluster.launcher import Gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match=r"`--launcher here` cannot be loaded: .*Gone"):
        find_launcher("here")


def test_ssh_asks_nothing_and_outlasts_the_link() -> None:
    """ssh asks for no password, and bears a silent machine at least as long as the link does."""
    host = parse_hosts("root@b:2")[0]
    wanted = WorldConfig(hosts="b", python="/venv/bin/python", wrap="nice -n 5", link_timeout=60)
    command = launcher.ssh_command(host.destination, 1, wanted)
    assert command[:2] == ["ssh", "-T"]
    assert {"BatchMode=yes", "ServerAliveInterval=60"} < {*command}
    run = "nice -n 5 /venv/bin/python -P -m nbdist.agent --ticket --node 1"
    assert command[-3:] == ["--", "root@b", f"exec {run}"]
    plain = launcher.ssh_command("b", 0, WorldConfig(hosts="b"))
    assert "ServerAliveInterval=15" in plain
    assert f"exec {sys.executable} " in plain[-1]  # the path of the notebook's interpreter


def test_this_machine_is_known_by_its_names() -> None:
    """`localhost`, the host name and addresses are this machine, unless ssh logs in as a user."""
    name = socket.gethostname()
    found = parse_hosts(f"LOCALHOST,127.0.0.1:2,{name},{name}-2,192.0.2.1")
    own = [True, True, True, False, False]
    assert [launcher.is_this_machine(host) for host in found] == own
    assert not launcher.is_this_machine(parse_hosts("me@localhost")[0])


pytestmark = pytest.mark.own_agent

COMMAND = (sys.executable, "-m", "nbdist.terminal", "join")


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of join keys, in a state folder of the test; hides job launchers' variables."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", "/tmp")
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "state" / "nbdist" / "joins"


@pytest.fixture
def world(offers: Path) -> Iterator[World]:
    """A world of two nodes for `nbdist join`, which has not started."""
    world = World(layout="2x1", launcher="join", address="127.0.0.1", log_dir="", show=False)
    yield world
    world.shutdown()


def place_in(offers: Path) -> str:
    """Wait for the key of a world, and return the place that the world shows."""
    wait_until(lambda: list(offers.glob(f"*{SUFFIX}")), "a key is there")
    (file,) = offers.glob(f"*{SUFFIX}")
    return ":".join(file.stem.rsplit("-", 1))


def twice_by_torchrun(place: str) -> list[str]:
    """Return a command that starts `nbdist join` twice by torchrun, or by torchx if installed."""
    if torchx := shutil.which("torchx"):
        ddp = ["run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "-m", "nbdist.terminal"]
        return [torchx, *ddp, "--", "join", place]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--master-port=0"]
    return [*torchrun, "--log-dir=.", "--nproc-per-node", "2", *COMMAND, place]


def twice_by_mpirun(place: str) -> list[str]:
    """Return a command that starts `nbdist join` twice by mpirun, or once without mpirun."""
    if shutil.which("mpirun") is None:
        return [*COMMAND, place]
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *COMMAND, place]


def test_join_starts_one_agent_per_node(
    world: World, offers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several commands of torchrun or mpirun start one agent, and all end with the world."""
    # Torchx calls the torchrun on the path, and copies the current folder.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (folder := tmp_path / "cwd").mkdir()
    said: list[str] = []
    start = threading.Thread(target=lambda: said.extend(lifecycle.starting_texts(world.engine)))
    start.start()
    place = place_in(offers)
    joined = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, cwd=folder)
        for command in (twice_by_torchrun(place), twice_by_mpirun(place))
    ]
    start.join(SOON)
    world.execute("import os, torch, torch.distributed as dist; t = torch.ones(1)")
    world.execute("dist.all_reduce(t); mpi = [n for n in os.environ if n.startswith('OMPI_')]")
    seen = world.gather("(float(t), world_size, os.environ['GROUP_WORLD_SIZE'], mpi)")
    assert seen == [(2.0, 2, "2", [])] * 2
    assert world.engine.resolve("auto") == 2  # for a cell that asks for `auto` again
    host = os.uname().nodename
    texts = [text for text in said if text]
    assert f"starting: run `nbdist join {place}` on each machine · 0 of 2 nodes" in texts
    assert any(text.startswith(f"starting: 2 of 2 nodes: {host} #0 (1), {host}") for text in texts)
    world.shutdown()
    assert [each.wait(SOON) for each in joined] == [0, 0]
    assert list(offers.iterdir()) == []
    stale = subprocess.run([*COMMAND, place], capture_output=True, text=True, timeout=SOON)
    assert stale.stderr.startswith(f"nbdist: `nbdist join {place}`: no world waits there (Conn")


def test_only_a_machine_with_the_key_joins(world: World, offers: Path) -> None:
    """A machine with an old key tries the typed address alone, and is refused in a line.

    Ranks of a machine end with its command, and the same command brings new ranks.
    """
    start = threading.Thread(target=world.start)
    start.start()
    place = place_in(offers)
    (file,) = offers.iterdir()
    ticket = read_key_file(file)
    assert all(secret not in place for secret in (ticket.keys.secret, ticket.keys.public))
    command = [*COMMAND, place, "--key-file", "-"]
    with socket.create_server(("127.0.0.9", ticket.port)) as elsewhere:
        elsewhere.settimeout(0)
        for changes in ({"keys": KeyPair.new()}, {"server_key": KeyPair.new().public}):
            old = replace(ticket, addresses=("127.0.0.9",), **changes).to_line()
            refused = subprocess.run(command, input=old, capture_output=True, timeout=SOON)
            said = f"nbdist: {place} does not take this key: a world that has ended had it, or ano"
            assert (refused.returncode, said in refused.stderr.decode()) == (1, True)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()

    def join(index: int) -> subprocess.Popen[bytes]:
        command = [*COMMAND, place, "--index", f"{index}"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    right = [join(index) for index in (0, 1)]
    start.join(SOON)
    world.execute("kept = rank")
    no_secret_is_to_be_seen(ticket, world)
    is_running = lambda: world.state is WorldState.RUNNING  # noqa: E731
    rejoin_hint = rf"rank 1 .*now 1 worker; .*`nbdist join {place}` on a machine has it come"
    with once(is_running, right[1].terminate), pytest.raises(WorkerDied, match=rejoin_hint):
        world.execute("import torch.distributed as dist\nwhile True: dist.barrier()")
    assert right[1].wait(SOON) == 128 + signal.SIGTERM
    right.append(join(1))
    wait_until(
        lambda: inbox.receive(world.engine, 0.01) or world.engine.rank_table.joined,
        "it comes again",
    )
    assert world.gather("globals().get('kept')") == [0, None]
    world.shutdown()
    assert [right[index].wait(SOON) for index in (0, 2)] == [0, 0]
    assert list(offers.iterdir()) == []


def no_secret_is_to_be_seen(ticket: Ticket, world: World) -> None:
    """Check that no process and no file shows a key, and that only the user can read folders."""
    keys = (ticket.keys.secret, ticket.keys.public)
    found = [shows(pid, key) for pid in psutil.pids() for key in keys]
    assert found.count("") > 20
    assert not any(found)
    head = Path(world.engine.connection.link.socket.address.removeprefix("ipc://")).parent
    world.execute("import os; folder = os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])")
    folders = [head, *map(Path, world.gather("folder"))]
    files = [each for folder in folders for each in folder.rglob("*") if each.is_file()]
    assert head / "agent.log" in files
    assert not [file for file in files for key in keys if key.encode() in file.read_bytes()]
    assert {each.stat().st_mode & 0o777 for each in folders} == {0o700}


WRAPPED = "ssh b -- 'exec no-such /no/img /etc/passwd /no/python -P -m nbdist.agent --ticket'"

REASONS = [
    ("ssh: Could not resolve hostname b.invalid: Name or service not known",
     "the name b.invalid cannot be resolved: "),
    ("root@10.0.0.2: Permission denied (publickey).", "it refused the login (publickey): `ssh"),
    ("@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.",
     "its host key is not the one that ssh knows: `ssh b` in"),
    ("No ED25519 host key is known for b and you have requested strict checking.\n"
     "Host key verification failed.", "ssh does not know its host key yet: `ssh b` once"),
    ("ssh: connect to host 10.0.0.2 port 22: No route to host",
     "ssh cannot reach 10.0.0.2:22: No route to host"),
    ("/usr/bin/python3: Error while finding module specification for 'nbdist.agent' "
     "(ModuleNotFoundError: No module named 'nbdist')",
     f"the interpreter there has no nbdist: `pip install nbdist=={__version__}` there"),
    ("ModuleNotFoundError: No module named 'zmq'", "the interpreter there has no zmq: "),
    ("bash: line 1: /no/python: No such file or directory", "there is no /no/python there: "),
    ("sh: 1: exec: /no/python: not found", "there is no /no/python there: `--python` names the in"),
    ("env: \u2018pythonx\u2019: No such file or directory", "there is no pythonx there: "),
    ("sh: 1: exec: /bin/x: Permission denied", "/bin/x cannot be executed there: `--python` names"),
    ("nbdist: b cannot reach the notebook's machine at 10.0.0.1:4000: no answer within 5 s",
     "b cannot reach the notebook's machine at 10.0.0.1:4000: no answer within 5 s"),
    # A wrapper is not the interpreter.
    ("apptainer: /no/img: No such file or directory", "there is no /no/img there: `--wrap`"),
    ("sh: 1: /etc/passwd: Permission denied", "/etc/passwd cannot be executed there: `--wrap`"),
    # An unknown line is shown as it is.
    ("Segmentation fault", ""),
]  # fmt: skip


def test_known_lines_become_reasons() -> None:
    """The first known line of a failed start becomes the reason; an option that fits is named."""
    for line, said in REASONS:
        found = launcher.why_refused("b", ["Welcome to b", *line.splitlines(), "bye"], WRAPPED)
        assert (found[: len(said)], bool(found)) == (said, bool(said))
        assert "\n" not in found
