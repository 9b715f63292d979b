"""Tests of `nbdist.world.calling`: finding what is to be run, and running it again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.errors import RanksReleased, UsageError, WorkerError
from nbdist.wire.work import Attempt, Kind
from nbdist.world.calling import find_script
from nbdist.world.world import World
from tests.cells import Write, said

pytestmark = pytest.mark.shared_world(2)

N = 2


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("file", "nope.py", "there is no script `nope.py` in /.+`-m nope.py` runs a module"),
        ("file", "folder", "`folder` is a directory"),
        ("file", "wrong.py", "`wrong.py` is no Python: line 2: .+; nothing has run"),
        ("module", "folder/x.py", "give either a script or `-m module`.+`-m folder.x`"),
        ("module", "no.such", "there is no module of this name"),
        ("module", "folder", "it is a package without a `__main__` module"),
        ("executable", "no-such-thing", "there is no such executable on PATH"),
        ("executable", "wrong.py", r"on PATH. `./wrong.py` runs the one in this folder"),
        ("executable", "./wrong.py", "it is not executable. `!chmod"),
        ("executable", "./folder", "it is a directory"),
        ("executable", "./nope", "there is no such file"),
    ],
)
def test_what_is_not_there(write: Write, kind: Kind, name: str, words: str) -> None:
    """One line says what is wrong before anything runs."""
    write("folder/__init__.py", "")
    write("wrong.py", "x = 1\nx = = 2\n")
    with pytest.raises(UsageError, match=words) as error:
        find_script(kind, name)
    assert "\n" not in str(error.value)


def test_finding_a_module_imports_nothing(write: Write) -> None:
    """Neither it nor the packages that it is in."""
    for name in ("loud/__init__.py", "loud/deep/mod.py", "loud/__main__.py"):
        write(name, "raise AssertionError")
    for name, file in (("loud", "loud/__main__.py"), ("loud.deep.mod", "loud/deep/mod.py")):
        assert find_script("module", name).file == str(Path(file).absolute())


def test_wrong_number_of_restarts(world: World, write: Write) -> None:
    """It is told before anything runs."""
    write("fine.py", "")
    with pytest.raises(UsageError, match="`--max-restarts -1`: a number of attempts"):
        world.run_script("fine.py", max_restarts=-1)


# --- restarts -----------------------------------------------------------------------------

TRAINER = """
import os, signal, sys, torch, torch.distributed as dist

class Trainer:
    def __init__(self, path):
        self.path, self.model, self.epoch = path, torch.nn.Linear(4, 1), 0
        if os.path.exists(path):
            found = torch.load(path)
            self.model.load_state_dict(found["model"])
            self.epoch = found["epoch"]
            print("resumes at", self.epoch)
        for weight in self.model.parameters():  # DDP would import for seconds, in each new rank
            dist.broadcast(weight.data, 0)

    def save(self):
        if dist.get_rank() == 0:
            found = {"model": self.model.state_dict(), "epoch": self.epoch}
            torch.save(found, self.path + ".new")
            os.replace(self.path + ".new", self.path)
        dist.barrier()

    def train(self, epochs, every, dies_at):
        while self.epoch < epochs:
            for step in range(3):
                if (self.epoch, step, dist.get_rank()) == (*dies_at, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                self.model(torch.ones(2, 4)).sum().backward()
                for weight in self.model.parameters():
                    dist.all_reduce(weight.grad)
                    weight.data -= 0.01 * weight.grad
                    weight.grad = None
            self.epoch += 1
            if self.epoch % every == 0:
                self.save()
        print("done", self.epoch, count, os.environ["TORCHELASTIC_MAX_RESTARTS"])

count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dies_at = [(4, 1), (7, 2), (8, 0), (-1, 0)][count]
dist.init_process_group("gloo")
trainer = Trainer(sys.argv[3])
trainer.train(int(sys.argv[1]), int(sys.argv[2]), dies_at)
dist.destroy_process_group()
"""


def test_trainer_with_snapshots_resumes_by_itself(world: World, write: Write) -> None:
    """Killed three times in mid-epoch, it goes on from its last snapshot each time."""
    path = write("trainer.py", TRAINER)
    before = dict(world.pids)
    result = world.run_script("trainer.py", 10, 2, path.with_suffix(".pt"), max_restarts=3)
    assert [text.splitlines()[-2:] for text in said(result)] == [
        ["resumes at 8", "done 10 3 3"]
    ] * N
    assert world.pids[0] == before[0]
    assert world.pids[1] != before[1]
    counts = "os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS']"
    world.execute("import os")
    assert world.gather(counts) == [("0", "0")] * N


def test_the_last_failure_fails(world: World, write: Write) -> None:
    """After as many restarts as are allowed the next failure is the script's."""
    write(
        "fails.py",
        "import os, sys\n"
        f"with open(f'{os.getcwd()}/{{rank}}.txt', 'a') as file:\n"
        "    file.write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if rank == 1: os._exit(3)\n"
        "dist.barrier()\n",
    )
    with pytest.raises(WorkerError, match=r"rank 1 .+"):
        world.run_script("fails.py", max_restarts=2)
    assert [Path(f"{rank}.txt").read_text() for rank in range(N)] == ["012"] * N
    world.execute("dist.barrier()")


def test_stop_is_not_retried(world: World, write: Write) -> None:
    """Whoever stops a script does not want it again."""
    write("sleeps.py", "import time\nprint('started')\ntime.sleep(600)\n")
    task = world.task(find_script("file", "sleeps.py"))
    running = world.submit(replace(task, attempt=Attempt(0, 3)))
    for _ in world.follow(running):
        if said(running) == ["started"] * N:
            break
    world.interrupt()
    world.session.wait(running)
    assert running.restart == ""


def test_wait_in_vain_is_not_retried(world: World, write: Write) -> None:
    """It would wait in vain again."""
    write(
        "waits.py", "import os\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])\ndist.barrier()\n"
    )
    with pytest.raises(RanksReleased, match=r"rank 1 waits in barrier, waits.py line 3"):
        world.run_script("waits.py", ranks=[1], max_restarts=3)
    assert world.session.running is not None
    assert said(world.session.running) == ["0"]
