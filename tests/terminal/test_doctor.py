"""Tests of `nbdist doctor`: the command, as people run it, finds problems that a test has made.

A run takes 0.6 s of a processor with a stub of torch, and 3 s with the real torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from nbdist.terminal.doctor import ask
from tests.sources import PACKAGE
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.world

NOBODY = 65534

# A stub with the parts of torch that `nbdist.worker about` uses.
TORCH = {
    "__init__": """
import warnings
from types import SimpleNamespace
from torch import cuda
__version__, Tensor, device = "{torch}", object, object
version = SimpleNamespace(cuda={cuda!r}, hip=None)
def is_available():
    if {warns!r}: warnings.warn({warns!r})
    return bool({gpus})
accelerator = SimpleNamespace(is_available=is_available, device_count=lambda: len({gpus}),
                              current_accelerator=lambda: SimpleNamespace(type="cuda"))
get_device_module = lambda kind: SimpleNamespace(get_device_name=lambda number: {gpus}[number])
{more}
""",
    "distributed": "is_available = lambda: True\nis_gloo_available = lambda: {gloo}\n"
    "is_nccl_available = lambda: False",
    "cuda": "",
    "profiler": "ProfilerActivity = object",
}

WITHOUT_PIDFD = """
import ctypes, os, struct, sys
# seccomp(2): EPERM for system call 434, pidfd_open.
steps = (0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
assert not prctl(38, 1, 0, 0, 0) and not prctl(22, 2, program, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""

TWO_GPUS = "Driver Version : 550.54\nGPU 0: H100 (UUID: GPU-8f)\nGPU 1: H100 (UUID: GPU-1b)"


def stub(folder: Path, **values: object) -> str:
    """Write a stub of torch into a folder."""
    usual = {"torch": "2.13.0", "cuda": None, "warns": "", "gpus": [], "gloo": True, "more": ""}
    (folder / "torch").mkdir()
    for name, text in TORCH.items():
        (folder / "torch" / f"{name}.py").write_text(text.format(**usual | values))
    return str(folder)


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command, `below` another command if given; returns the exit code and the lines."""

    def examine(
        *words: str,
        below: Sequence[str] = (),
        paths: Sequence[str] = (),
        **environ: str,
    ) -> tuple[int, list[str]]:
        path = os.pathsep.join(paths or (stub(tmp_path), str(PACKAGE.parent)))
        command = [*below, sys.executable, "-P", "-m", "nbdist.terminal", "doctor", *words]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environ},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=2 * SOON,
            stdin=subprocess.DEVNULL,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    return examine


Examine = Callable[..., tuple[int, list[str]]]


def test_a_good_machine_has_no_problems(examine: Examine) -> None:
    """A good machine gives exit code 0, and lines with packages, torch and limits; takes 3 s."""
    code, lines = examine("-n", "1", paths=[str(PACKAGE.parent)], CUDA_VISIBLE_DEVICES="")
    said = "\n".join(lines)
    assert "problem: " not in said
    assert code == 0
    for text in (
        "ok: this is about 1 worker (`-n 1`)",
        f"· ipykernel {version('ipykernel')} · ipython {version('ipython')} · ",
        f"ok: torch {version('torch')}",  # then `+cu132` if PyPI's build is for that CUDA
        "ok: open files: ",
        "ok: /dev/shm has ",
        f"ok: sockets of workers are in {os.environ['XDG_RUNTIME_DIR']}",
        "result: workers can run here: 0 problems, ",
    ):
        assert text in said


UNSHARED = ("unshare", "--mount", "sh", "-c")

LACKS = {
    "open files": (
        {"below": ["sh", "-c", 'ulimit -n 90; exec "$@"', "sh"]},
        [
            r"problem: 2 workers take 130 open files in one process, and `ulimit -Hn` allows 90\. "
            r".*"
        ],
    ),
    "a place for sockets": (
        {"below": ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]},
        [r"problem: no folder can hold the sockets of the workers \(.*/tmp: File too large; .*"],
    ),
    "pidfd_open": (
        {"below": [sys.executable, "-c", WITHOUT_PIDFD]},
        [r"problem: pidfd_open, .* is not possible here \(Operation not permitted\): use Linux .*"],
    ),
    "what variables name": (
        {
            "TMPDIR": "/tmp/" + "deep/" * 20,
            "GLOO_SOCKET_IFNAME": "eth77",
            "CUDA_VISIBLE_DEVICES": "99",
        },
        [
            r"warning: TMPDIR=.* cannot hold sockets \(its path is too long .*\): /.* is used .*",
            r"problem: GLOO_SOCKET_IFNAME=eth77: there is no such network interface\. This .* lo.*",
            r"warning: CUDA_VISIBLE_DEVICES=99 selects 0 of \d+ GPUs?: unset it, or name others.*",
        ],
    ),
    "an interpreter": (
        {"PYTHON_EXEC": "/nowhere/python"},
        [r"problem: /nowhere/python cannot be run \(No such file .*\): PYTHON_EXEC says .*"],
    ),
    "a network": (
        {"below": ["unshare", "--net"]},
        [
            r"problem: gloo cannot connect ranks over 127\.0\.0\.1 \(Network is unreachable\): .*",
            "warning: this machine has no address for others: workers can run here alone",
        ],
    ),
    "shared memory": (
        {"below": [*UNSHARED, 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]},
        [r"warning: /dev/shm has 64 MiB, 64 MiB of them free: too few .* `--shm-size 8g`, or .*"],
    ),
    "a place for it": (
        {
            "below": [
                *UNSHARED,
                *('mount -t tmpfs x /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"', "sh"),
            ]
        },
        [r"problem: /dev/shm cannot be used \(No such file or directory\): mount a tmpfs there"],
    ),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_lack_of_the_machine_has_a_remedy(examine: Examine, lack: str) -> None:
    """Each lack has a line with a remedy, before the good lines; a problem gives exit code 1."""
    how, told = LACKS[lack]
    below = how.get("below", [])
    if "unshare" in below and subprocess.run([*below[:2], "true"], capture_output=True).returncode:
        pytest.skip(f"`{' '.join(below[:2])}` is not possible here")
    code, lines = examine("-n", "2", **how)
    for each in told:
        assert len([line for line in lines if re.fullmatch(each, line)]) == 1, lines
    *levels, last = [line.partition(":")[0] for line in lines]
    assert last == "result"
    problems, warnings = map(levels.count, ("problem", "warning"))
    numbers = re.findall(r"(\d+) (problem|warning)s?\b", lines[-1])
    assert numbers == [(f"{problems}", "problem"), (f"{warnings}", "warning")]
    assert ("can run here" in lines[-1]) == (code == 0)
    assert levels == sorted(levels, key=["problem", "warning", "ok"].index)
    assert code == ("problem" in levels)


def test_too_little_memory_in_a_control_group_is_found(examine: Examine) -> None:
    """Too little free memory in a control group is a problem, and the line names the group."""
    groups = Path("/sys/fs/cgroup")
    groups = groups / "memory" if (groups / "memory").exists() else groups
    group = groups / f"nbdist-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if groups.name == "memory" else "memory.max"
    if not re.search(r"^SwapFree: +0 kB$", Path("/proc/meminfo").read_text(), re.MULTILINE):
        pytest.skip("what the group may use has this machine's swap in it")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("takes the right to make a control group of memory")
    try:
        if not (group / name).exists():
            pytest.skip("control groups do not count memory here")
        (group / name).write_text(str(300 << 20))
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        code, lines = examine("-n", "2", below=["sh", "-c", enter, "sh"])
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "all have ended")
        group.rmdir()
    assert re.fullmatch(
        rf"problem: [\d.]+ MiB of the 300 MiB of memory are free that its group {group} may use; "
        r"workers need some 460 MiB\. Raise the limit, end other processes, or use fewer workers",
        lines[0],
    )
    assert code == 1


TORCHS = {
    "one that is too old": (
        {"torch": "2.3.1"},
        r"problem: nbdist does not run with torch 2\.3\.1: `.* -m pip install 'torch>=.*'`",
    ),
    "one without gloo": ({"gloo": False}, r"problem: torch 2\.13\.0 has no gloo, by which .*"),
    "one that lacks a library": (
        {"more": "raise ImportError('libcudart.so.12: no such file')"},
        r"problem: .* cannot import torch and nbdist: ImportError: libcudart\.so\.12: no such file",
    ),
    "one for the CPU": (
        {},
        r"problem: torch for CPU can use 0 of 2 GPUs, with driver 550\.54: install a torch for .*",
    ),
    "one for another driver": (
        {"cuda": "12.8", "warns": "The NVIDIA driver on your system is too old"},
        r"problem: torch for CUDA 12\.8 can use 0 of 2 GPUs, .*: update the driver, or .*",
    ),
    "one that warns": (
        {"cuda": "12.8", "gpus": ["H100"] * 2, "warns": "H100 is not\n compatible"},
        "warning: torch: H100 is not compatible",
    ),
    "one without nccl": (
        {"cuda": "12.8", "gpus": ["H100"] * 2},
        r"problem: this torch has no nccl: install another build, or use `--backend gloo`",
    ),
    "one for fewer GPUs": (
        {"cuda": "12.8", "gpus": ["H100"] * 2},
        r"problem: 4 ranks asked, 2 GPUs visible, and nccl needs one for each rank\. `-n 2`, .*",
    ),
}


@pytest.mark.parametrize("torch", TORCHS)
def test_a_lack_of_torch_has_a_remedy(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    """A line shows why a torch cannot use the machine's two GPUs, which nvidia-smi lists."""
    values, told = TORCHS[torch]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{TWO_GPUS}'\n")
    program.chmod(0o755)
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a real driver")
    paths = [stub(tmp_path, **values), str(PACKAGE.parent)]
    code, lines = examine(
        "-n", "4", paths=paths, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    )
    assert [line for line in lines if re.fullmatch(told, line)], lines
    assert code == 1  # also for the warning, because nccl is missing too


def test_a_missing_torch_of_another_interpreter_is_found(examine: Examine, tmp_path: Path) -> None:
    """The line has pip's command for PYTHON_EXEC; its environment takes 0.3 s more."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = f"{tmp_path}/env/bin/python"
    code, lines = examine(paths=[str(PACKAGE.parent)], PYTHON_EXEC=python)
    assert lines[0] == f"problem: torch is not installed: `{python} -m pip install torch`"
    assert code == 1


def test_old_packages_are_found(examine: Examine, tmp_path: Path) -> None:
    """Packages with too old metadata are a problem, with a pip command that upgrades all."""
    for name, number in (("pyzmq", "1.0"), ("psutil", "5.0")):
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (folder / "METADATA").write_text(text)
    code, lines = examine()
    assert re.fullmatch(
        r"problem: nbdist does not run with psutil 5\.0, pyzmq 1\.0: "
        r"`.* -m pip install 'psutil>=.*' 'pyzmq>=.*'`",
        lines[0],
    )
    assert code == 1


def test_a_slow_import_of_torch_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of torch that takes too long is ended, and an error says how to examine it."""
    stub(tmp_path, more="import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PACKAGE.parent}")
    with pytest.raises(LookupError, match=r"not imported within 0\.5 s: `.* -X importtime"):
        ask(sys.executable, timeout=0.5)


# Late imports come first, because the other user may have no right to read these modules.
ANOTHER_USER = f"""
import email.parser, encodings.idna, os, packaging.specifiers, resource, sys
from nbdist.terminal.doctor import doctor
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
sys.exit(doctor("2"))
"""


def test_missing_rights_of_a_user_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's small `ulimit -u`, and the missing right to read others' memory, are found."""
    if os.geteuid():
        pytest.skip("takes the right to be another user")
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        os.chmod(folder, 0o755)
        os.chmod(shutil.copy(str(shutil.which("cat")), folder), 0o711)
        monkeypatch.setenv("PATH", folder)
        monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
        command = [sys.executable, "-c", ANOTHER_USER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    assert done.stderr == ""
    limit, memory = (
        r"problem: `ulimit -u` is 40, and \d+ processes and threads are there; workers need some "
        r"50 more\. Raise it before the notebook is started, or use fewer workers",
        r"warning: `%dist_stack` will show no stack of a rank in C code: no process's memory can "
        r"be read \(Permission denied.*\)\. `sysctl kernel\.yama\.ptrace_scope=1`, or .*",
    )
    for told in (limit, memory):
        assert re.search(f"^{told}$", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 1
