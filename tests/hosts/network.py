"""Hosts that are network namespaces of this machine, and the switch that connects them.

Root is needed.  A host has its own addresses, name, `/etc`, `/tmp`, `/dev/shm` and home folder;
all hosts share programs, this repository and `/run`.  The tests' own process has an address at
the switch: its machine is the notebook's.

A process per host holds the namespaces, and ends when its stdin does: when this process ends,
for whatever reason, the hosts end too.
"""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)
NAMESPACES = ("--net", "--uts", "--mount", "--ipc")

COMMAND_TIMEOUT = 60.0
END_TIMEOUT = 5.0
TOOLS = ("ip", "tc", "nft", "nsenter", "unshare", "setpriv")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A path in the mounts of all processes of a host, with the id of the process that made the host.
OF_RUN = re.compile(r"/nbh-([0-9]+)-")

# The kernel's number for a TCP socket that listens, in /proc/net/tcp.
LISTENS = "0A"


def missing() -> str | None:
    """Return why this machine can have no hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 nftables util-linux)"
    tried = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def of_tests() -> dict[str, str]:
    """Return the variables that all processes of tests have, here and on hosts."""
    names = ("NBDIST_TEST_RUN", "NBDIST_IDLE_IMPORTS")
    return {name: os.environ[name] for name in names if name in os.environ}


def sh(*command: str) -> str:
    """Run a command of this machine and return its output; AssertionError if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
    return done.stdout


def end(process: subprocess.Popen[bytes], sign: signal.Signals = signal.SIGTERM) -> None:
    """End a process and its group by `sign`, or after some seconds by SIGKILL, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_TIMEOUT)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()


def hurry(session: int) -> None:
    """Give a session of processes priority over other processes."""
    group = Path(f"/proc/{session}/autogroup")
    if group.exists():
        group.write_text("-10")


class Host:
    """A host of the network, with two addresses that all others reach."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = str(network.subnet[number])
        self.address6 = str(network.subnet6[number])
        self.folder = network.folder / name
        """The host's folder on this machine, with its `/etc`, `/tmp` and home folder."""
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            "HOME": str(HOME),
            "LANG": "C.UTF-8",
            **of_tests(),
        }
        """The whole environment of commands that `run` and `popen` start."""
        self._network = network
        self._port = f"{network.prefix}p{number}"  # the switch's end of the host's cable
        self._lasting: set[int] = set()
        self._lasting_ports: set[int] = set()
        self._holder = self._hold()
        self._plug_in()

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}>"

    # --- making -------------------------------------------------------------------------

    def _hold(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir()
        sh("cp", "-a", "/etc", str(self.folder / "etc"))
        script = "\n".join(
            [
                "set -e",
                "mount --make-rprivate /",
                f"hostname {self.name}",
                *_covering(Path("/tmp"), self.folder / "tmp"),
                *_covering(HOME, self.folder / "home"),
                f"mount --bind {self.folder}/etc /etc",
                "mount -t tmpfs tmpfs /dev/shm",
                "ip link set lo up",
                "echo ready",
                "exec cat",
            ]
        )
        holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n", f"{self.name} could not be made"
        self._lasting.add(holder.pid)
        return holder

    def _plug_in(self) -> None:
        cable = f"{self._port}h"
        sh("ip", "link", "add", self._port, "type", "veth", "peer", "name", cable)
        sh("ip", "link", "set", cable, "netns", str(self._holder.pid))
        sh("ip", "link", "set", self._port, "master", self._network.prefix, "up")
        self.run(f"ip link set {cable} name eth0 && ip link set eth0 up")
        self._give_addresses()

    def _give_addresses(self) -> None:
        self.run(f"ip addr replace {self.address}/24 dev eth0")
        self.run(f"ip -6 addr replace {self.address6}/64 dev eth0 nodad")

    def meet(self, hosts: Sequence[Host]) -> None:
        """Let the host know the names of all `hosts`, and localhost."""
        lines = [f"{host.address} {host.name}\n" for host in hosts]
        local = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
        (self.folder / "etc" / "hosts").write_text(local + "".join(lines))

    # --- processes ----------------------------------------------------------------------

    def argv(
        self, command: str | Sequence[str], environ: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command line of this machine that runs a command, or a line of sh, on the host."""
        words = ["sh", "-c", command] if isinstance(command, str) else command
        variables = [
            f"{name}={value}" for name, value in {**self.environ, **(environ or {})}.items()
        ]
        entered = ["nsenter", "--target", str(self._holder.pid), *NAMESPACES]
        return [*entered, "env", "-i", f"--chdir={HOME}", *variables, *words]

    def run(
        self,
        command: str | Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        timeout: float = COMMAND_TIMEOUT,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, or a line of sh, on the host; `stdout` and `stderr` are text.

        A failure raises AssertionError with the output, unless `check` is False.
        """
        done = subprocess.run(
            self.argv(command, environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}{done.stdout}"
        return done

    def popen(
        self,
        command: str | Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in a session of its own; `options` are those of Popen.

        The command is killed when this process ends; a test ends it before (`network.end`).
        """
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        command = ["setpriv", "--pdeathsig", "KILL", *self.argv(command, environ)]
        return subprocess.Popen(command, **options)  # type: ignore[call-overload, no-any-return]

    def processes(self) -> dict[int, str]:
        """The command line of every process on the host, by its id, daemons included."""
        network = os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                    found[pid] = _command(pid)
        return found

    def listening(self) -> set[int]:
        """The TCP ports that something listens on, whatever the address, daemons' included."""
        ports = set()
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self._holder.pid}/net/{table}").read_text().splitlines()[1:]
            rows = map(str.split, lines)
            ports.update(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS)
        return ports

    def path(self, path: str) -> Path:
        """The path under which this machine sees a file of the host's."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def lasts(self, process: int, *ports: int) -> None:
        """Register a daemon and the ports on which it listens, which are no leftovers of tests."""
        self._lasting.add(process)
        self._lasting_ports.update(ports)

    def left(self) -> list[str]:
        """Return a line for each thing on the host that a test has left behind."""
        processes = self.processes()
        strays = [pid for pid in processes if not self._is_lasting(pid)]
        folders = self.path("/tmp").glob("nbdist-*")
        return [
            *(f"{self.name}: process {pid}: {processes[pid]}" for pid in strays),
            *(f"{self.name}: port {port}" for port in self.listening() - self._lasting_ports),
            *(f"{self.name}: folder {path.name}" for path in folders),
            *(f"{self.name}: /dev/shm/{name}" for name in os.listdir(self.path("/dev/shm"))),
        ]

    def _is_lasting(self, pid: int) -> bool:
        """Whether a process is a daemon, the child of a keeper, or has ended."""
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            return True
        return state == "Z" or pid in self._lasting or int(parent) in self._network.keepers

    # --- trouble ------------------------------------------------------------------------

    def link_down(self) -> None:
        """Pull the cable."""
        sh("ip", "link", "set", self._port, "down")

    def link_up(self) -> None:
        """Plug the cable in again."""
        sh("ip", "link", "set", self._port, "up")
        # The kernel has removed the IPv6 routes with the carrier.
        self._give_addresses()

    def limit(self, megabits: int) -> None:
        """Limit the cable to so many million bits a second, in each direction."""
        self.no_limit()
        shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")
        sh("tc", "qdisc", "add", "dev", self._port, *shape)
        self.run(["tc", "qdisc", "add", "dev", "eth0", *shape])

    def no_limit(self) -> None:
        """Undo the effect of `limit`."""
        self.run("tc qdisc del dev eth0 root", check=False)
        subprocess.run(["tc", "qdisc", "del", "dev", self._port, "root"], capture_output=True)

    def block(self, rule: str, hook: str = "input") -> None:
        """Drop packets that match a rule of nft, as a silent firewall does, until `mend`."""
        self.run(["nft", "add table inet nbt"])
        self.run(["nft", f"add chain inet nbt {hook} {{ type filter hook {hook} priority 0 ; }}"])
        self.run(["nft", f"add rule inet nbt {hook} {rule} drop"])

    def block_from(self, address: str) -> None:
        """Drop packets from another host, which goes on sending."""
        self.block(f"{_family(address)} saddr {address}")

    def block_to(self, address: str, what: str = "tcp flags syn / syn,ack") -> None:
        """Drop packets to another machine: by default only those that open connections."""
        self.block(f"{_family(address)} daddr {address} {what}", "output")

    def mend(self) -> None:
        """Undo the limit, plug the cable in, and remove all rules."""
        self.no_limit()
        self.link_up()
        self.run(["nft", "flush ruleset"])

    # --- ending -------------------------------------------------------------------------

    def kill_all(self, *, daemons: bool = False) -> None:
        """Kill all processes of the host that are no daemons, or the daemons as well."""
        for pid in self.processes():
            if pid != self._holder.pid and (daemons or not self._is_lasting(pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End all processes of the host, and the host itself."""
        self.kill_all(daemons=True)
        end(self._holder, signal.SIGKILL)
        # The kernel removes the namespace, and its cable, some time later.
        subprocess.run(["ip", "link", "delete", self._port], capture_output=True)


class Network:
    """Several hosts and this machine at one switch."""

    def __init__(self, names: Sequence[str]) -> None:
        _remove_abandoned()
        self.prefix = f"nb{os.getpid()}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"nbh-{os.getpid()}-", dir="/run"))
        """A folder that this machine and all hosts share."""
        self.keepers: set[int] = set()
        """Daemons whose children are no leftovers either."""
        self.subnet, self.subnet6 = _free_subnets()
        self.address, self.address6 = str(self.subnet[254]), str(self.subnet6[254])
        """The addresses of this machine at the switch."""
        self.folder.chmod(0o755)
        self._switch_on()
        self.everything: list[Host] = []
        self.hosts: list[Host] = []
        for name in names:
            self.hosts.append(self.add(name))

    def add(self, name: str) -> Host:
        """Add a host to the network, but not to `hosts`."""
        host = Host(self, name, len(self.everything) + 1)
        self.everything.append(host)
        for each in self.everything:
            each.meet(self.everything)
        return host

    def _switch_on(self) -> None:
        kind = ("type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        sh("ip", "link", "add", self.prefix, *kind)
        sh("ip", "link", "set", self.prefix, "up")
        sh("ip", "addr", "add", f"{self.address}/24", "dev", self.prefix)
        sh("ip", "-6", "addr", "add", f"{self.address6}/64", "dev", self.prefix, "nodad")

    def left(self) -> list[str]:
        """Return a line for each thing on any host that a test has left behind."""
        return [line for host in self.everything for line in host.left()]

    def clean(self) -> None:
        """End and remove everything that `left` lists."""
        for host in self.everything:
            host.kill_all()
            places = [host.path("/tmp"), host.path("/dev/shm")]
            for path in [path for place in places for path in place.glob("*")]:
                if path.is_dir() and path.name.startswith("nbdist-"):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.parent.name == "shm":
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """End all hosts, and remove the switch."""
        for host in self.everything:
            host.close()
        sh("ip", "link", "delete", self.prefix)
        shutil.rmtree(self.folder)


def _covering(folder: Path, ours: Path) -> Iterator[str]:
    """Yield lines of sh that put a folder of the host, `ours`, in the place of this machine's.

    Parts that Python and this repository need stay visible.
    """
    ours.mkdir(mode=0o1777 if folder == Path("/tmp") else 0o700)
    needed = {ROOT, Path(sys.prefix), Path(sys.base_prefix), *map(Path, filter(None, sys.path))}
    if any(folder.is_relative_to(path) for path in needed):
        return
    inside = sorted(path for path in needed if path.is_relative_to(folder) and path.exists())
    kept: list[Path] = []
    for path in inside:
        if any(path.is_relative_to(other) for other in kept):
            continue
        kept.append(path)
        place = ours / path.relative_to(folder)
        if path.is_dir():
            yield f"mkdir -p '{place}'"
            yield f"mount --bind '{path}' '{place}'"
    yield f"mount --rbind '{ours}' '{folder}'"


def _family(address: str) -> str:
    return "ip6" if ":" in address else "ip"


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def _free_subnets() -> tuple[ipaddress.IPv4Network, ipaddress.IPv6Network]:
    """Return an IPv4 network in which this machine has no address, and an IPv6 network."""
    links = json.loads(sh("ip", "-json", "addr"))
    taken = [
        ipaddress.ip_interface(f"{each['local']}/{each['prefixlen']}").network
        for link in links
        for each in link["addr_info"]
    ]
    for number in range(os.getpid(), os.getpid() + 1000):
        subnet = ipaddress.IPv4Network(f"10.{128 + (number >> 8) % 64}.{number % 256}.0/24")
        if not any(subnet.overlaps(other) for other in taken if other.version == 4):
            return subnet, ipaddress.IPv6Network(f"fd6e:{number % 0xFFFF:x}::/64")
    raise AssertionError("this machine has an address in every network")


def _remove_abandoned() -> None:
    """End and remove the leftovers of killed runs: processes, switches, folders."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            of_run = OF_RUN.search(Path(f"/proc/{pid}/mountinfo").read_text())
            if of_run and not Path(f"/proc/{of_run[1]}").exists():
                os.kill(int(pid), signal.SIGKILL)
    for link in json.loads(sh("ip", "-json", "link")):
        name = link["ifname"]
        if name[:2] == "nb" and name[2:].isdigit() and not Path(f"/proc/{name[2:]}").exists():
            # Another run that begins just now may delete the switch first.
            subprocess.run(["ip", "link", "delete", name], capture_output=True)
    for folder in Path("/run").glob("nbh-*-*"):
        if not Path(f"/proc/{folder.name.split('-')[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
