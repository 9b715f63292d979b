"""The core suite: one test per capability, which is a column of the table, in a real notebook.

The suite runs in every row's environment, which has only pytest and nbdist's requirements.  The
run of all tests leaves it out, since other tests prove the same more closely.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world

WORKS = "%%distributed\nt = torch.ones(8)\ndist.all_reduce(t)\nassert t[0] == world_size, t"

TRAINING = """%%distributed
def make(wrap):
    torch.manual_seed(1)
    layers = torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    net = wrap(torch.nn.Sequential(*layers))
    return net, torch.optim.SGD(net.parameters(), lr=0.01)

def train(net, optimizer, steps):
    for step in steps:
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()

def weights(net):
    found = [getattr(each, "full_tensor", lambda: each)() for each in net.parameters()]
    return float(torch.cat([each.detach().flatten() for each in found]).double().sum())
"""

FSDP2 = """from torch.distributed.fsdp import fully_shard
def wrap(net):
    for each in net[0], net[2], net: fully_shard(each)
    return net
"""


class Pool:
    """The notebook that the tests share, until one of them fails in it."""

    def __init__(self, snapshots: Path) -> None:
        self._env = {"NBDIST_SNAPSHOT_DIR": str(snapshots)}
        self._notebook: Notebook | None = None

    def notebook(self) -> Notebook:
        """Return the shared notebook, in which nbdist is loaded."""
        if self._notebook is None:
            self._notebook = Notebook("%load_ext nbdist", env=self._env)
        return self._notebook

    def clear(self) -> None:
        if self._notebook is not None:
            self._notebook.close()
        self._notebook = None


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    found = Pool(tmp_path_factory.mktemp("snapshots"))
    yield found
    found.clear()


@pytest.fixture
def notebook(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """The shared notebook with four working ranks; after a failed test the next gets a new one."""
    failures = request.session.testsfailed
    notebook = pool.notebook()
    assert notebook.run("%%distributed -n 4\npass").errors == []
    yield notebook
    if request.session.testsfailed > failures:
        pool.clear()


def goes_on(notebook: Notebook) -> None:
    """Assert that a cell works on all ranks, and that each rank has the test's variable `kept`."""
    assert notebook.run(WORKS).errors == []
    assert notebook.run("%%distributed\nassert kept == rank").errors == []


def gathered(notebook: Notebook, expression: str) -> list[object]:
    assert notebook.run(f"%dist_gather {expression} --as gathered").errors == []
    return list(notebook.value("list(gathered)"))


def test_start(pool: Pool) -> None:
    """After `%load_ext` a single cell starts the ranks and uses their group."""
    notebook = pool.notebook()
    first = "%%distributed -n 4\nt = torch.ones(1) * rank\ndist.all_reduce(t)\nprint(t.item())"
    assert body(notebook.run(first))[:2] == ["── ranks 0-3 (same) ──", "6.0"]


def test_names(notebook: Notebook) -> None:
    """Values, tensors, functions and classes of the notebook are sent with a cell."""
    notebook.run(
        "import torch\nnumbers, tensor = [1, 2], torch.arange(4)\n"
        "class Pair:\n    def __init__(self, a): self.a = a\n"
        "def scaled(x): return Pair(x * scale)"
    )
    cell = "%%distributed\nscale = rank\nresult = scaled(numbers[1] + int(tensor.sum())).a"
    assert notebook.run(cell).errors == []
    assert gathered(notebook, "result") == [0, 8, 16, 24]
    notebook.run("numbers.append(5)")
    assert notebook.run("%%distributed\nassert numbers == [1, 2, 5]").errors == []


def test_output(notebook: Notebook) -> None:
    """Text is shown by rank, equal text once, beside results, stderr and child processes."""
    cell = (
        "import os, sys\nprint('hello')\nif rank == 3: print('warned', file=sys.stderr)\n"
        "if rank == 2: os.system('echo child')\nrank // 2"
    )
    assert body(notebook.run(f"%%distributed\n{cell}")) == [
        *("── ranks 0-1 (same) ──", "hello", "0"),
        *("── rank 2 ──", "hello", "child", "1"),
        *("── rank 3 ──", "hello", "warned", "1"),
    ]


def test_raise(notebook: Notebook) -> None:
    """If a rank raises, ranks that wait for it are released, and keep their variables."""
    cell = "%%distributed\nkept = rank\nif rank == 1: raise ValueError('bad')\ndist.all_reduce(t)"
    assert notebook.run(WORKS).errors == []
    error = notebook.run(cell).error
    assert "ValueError: bad" in error
    assert "Ranks 0,2-3 were waiting in all_reduce (line 4) and were released" in error
    goes_on(notebook)


def test_skip(notebook: Notebook) -> None:
    """If a rank skips a barrier, the others are released; the error has the line of their wait."""
    error = notebook.run("%%distributed\nkept = rank\nif rank != 2: dist.barrier()").error
    assert "wait in barrier, line 3; rank 2 finished the cell without it" in error
    goes_on(notebook)


def test_kill(notebook: Notebook) -> None:
    """A rank that is killed in a collective is restarted; the others keep their variables."""
    cell = "import os, signal\nkept = rank\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)"
    error = notebook.run(f"%%distributed\n{cell}\ndist.barrier()").error
    assert "rank 2 on " in error
    assert "was killed by SIGKILL" in error
    assert "Rank 2 was restarted" in error
    assert notebook.run("%%rank 2\nassert 'kept' not in globals(); kept = rank").errors == []
    goes_on(notebook)


def test_heal(notebook: Notebook) -> None:
    """After each of five failures in a row, an earlier subgroup and an earlier mesh work."""
    made = (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "kept, pair = rank, dist.new_group([1, 3])\nmesh = init_device_mesh('cpu', (world_size,))"
    )
    assert notebook.run(f"%%distributed\n{made}").errors == []
    used = (
        "t = torch.ones(1)\ndist.all_reduce(t, group=mesh.get_group())\n"
        "if rank % 2: dist.all_reduce(t, group=pair)\n"
        "assert t.item() == (8 if rank % 2 else 4), t"
    )
    for time in range(5):
        failing = f"if rank == {time % 4}: raise ValueError({time})\ndist.all_reduce(torch.ones(9))"
        assert f"ValueError: {time}" in notebook.run(f"%%distributed\n{failing}").error
        assert notebook.run(f"%%distributed\n{used}").errors == []
        goes_on(notebook)


def test_ddp(notebook: Notebook) -> None:
    """Training with DDP goes on after a failure as if nothing had failed."""
    _trains(notebook, "wrap = torch.nn.parallel.DistributedDataParallel")


def test_fsdp2(notebook: Notebook) -> None:
    """Training with FSDP2 goes on after a failure as if nothing had failed."""
    _trains(notebook, FSDP2)


def _trains(notebook: Notebook, wrap: str) -> None:
    """Assert that ten steps with a failure after the fifth give the weights of ten without it."""
    for cell in (
        TRAINING + wrap,
        "%%distributed\nkept, (net, optimizer) = rank, make(wrap)",
        "%%distributed\ntrain(net, optimizer, range(5))",
    ):
        assert notebook.run(cell).errors == []
    failing = "if rank == 1: raise ValueError('bad')\ntrain(net, optimizer, [5])"
    assert "ValueError: bad" in notebook.run(f"%%distributed\n{failing}").error
    goes_on(notebook)
    again = "train(net, optimizer, range(5, 10))\nwhole = make(wrap)\ntrain(*whole, range(10))"
    assert notebook.run(f"%%distributed\n{again}").errors == []
    assert len({*gathered(notebook, "weights(net)"), *gathered(notebook, "weights(whole[0])")}) == 1


def test_scale(notebook: Notebook) -> None:
    """Ranks that stay while the world is scaled keep variables, and their DDP model trains on."""
    cell = "kept = rank\nnet = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))"
    assert notebook.run(f"%%distributed\n{cell}").errors == []
    assert "now 5 workers" in notebook.run("%dist_scale +1").text
    assert notebook.run(WORKS).errors == []
    assert "now 2 workers" in notebook.run("%dist_scale 2").text
    goes_on(notebook)
    assert notebook.run("%%distributed\nnet(torch.ones(2, 4)).sum().backward()").errors == []
    assert notebook.run("%dist_scale 4").errors == []


def test_restart(notebook: Notebook) -> None:
    """A restart gives all ranks new processes, with only the variables of `--keep`."""
    notebook.run("%%distributed\nimport os\nkept, gone, pid = rank, 1, os.getpid()")
    before = gathered(notebook, "pid")
    assert "4 workers ready" in notebook.run("%dist_restart --keep kept").text
    assert notebook.run("%%distributed\nimport os\nassert 'gone' not in globals()").errors == []
    assert not {*before} & {*gathered(notebook, "os.getpid()")}
    goes_on(notebook)


@pytest.mark.parametrize("waits", ["while True: pass", "if rank: dist.barrier()\nwhile True: pass"])
def test_stop(notebook: Notebook, waits: str) -> None:
    """The Stop button ends Python code and waiting in a collective; variables are kept."""
    bound = "kept = rank\ndist.barrier()\nprint('running')"
    cell = f"%%distributed\n{bound}\n{waits}"
    outcome = notebook.run(cell, notebook.stop_at("running"))
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-3. No variables were lost."
    goes_on(notebook)


def test_snapshot(notebook: Notebook) -> None:
    """A snapshot of all ranks is restored into new workers, and an FSDP2 model trains on."""
    made = "kept, state, (net, optimizer) = rank, torch.arange(rank), make(wrap)"
    for cell in (TRAINING + FSDP2, f"%%distributed\n{made}\ntrain(net, optimizer, range(5))"):
        assert notebook.run(cell).errors == []
    names = "kept state net optimizer train weights"
    said = notebook.run(f"%dist_snapshot {names} --name night").text
    assert "of 4 ranks · snapshot `night`" in said
    goes_on_training = "%%distributed\ntrain(net, optimizer, range(5, 10))"
    assert notebook.run(goes_on_training).errors == []
    expected = gathered(notebook, "weights(net)")
    assert "4 workers ready" in notebook.run("%dist_restart").text
    said = "restored kept, net, optimizer, state, train and weights on ranks 0-3"
    assert said in notebook.run("%dist_restore --name night").text
    assert gathered(notebook, "len(state)") == [0, 1, 2, 3]
    assert notebook.run(goes_on_training).errors == []
    assert gathered(notebook, "weights(net)") == expected
    goes_on(notebook)


def test_end(pool: Pool) -> None:
    """`%dist_shutdown` ends the workers; nothing outlives the notebook, which the guard checks."""
    notebook = pool.notebook()
    assert notebook.run("%dist_shutdown").errors == []
    pool.clear()
