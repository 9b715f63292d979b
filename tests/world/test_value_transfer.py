"""Tests of `nbdist.world.value_transfer` and `split_join`: values to, from and among ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sparse_arrays
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import (
    BadRanks,
    Interrupted,
    UsageError,
    VariableNotSent,
    WorkerDied,
    WorkerError,
)
from nbdist.wire.messages import Kill
from nbdist.world import dispatch, inbox
from nbdist.world.split_join import join, split
from nbdist.world.states import WorldState
from nbdist.world.value_transfer import Scatter, commit
from nbdist.world.world import World
from tests.waiting import once, press_stop, wait_until

pytestmark = pytest.mark.shared_world(2)

# --- gathered values --------------------------------------------------------------------------


@pytest.fixture
def gathered(world: World) -> World:
    """The world with tensors on all ranks, and with the name `only` on rank 0."""
    world.execute("t = torch.full((2,), float(rank)); big = torch.ones(50_000) * rank")
    world.execute("only = 1", ranks=[0])
    return world


def test_several_names_are_gathered_as_a_tuple(gathered: World) -> None:
    """The tuple has a list for each name; workers keep no memory of values that were read."""
    big, numbers = gathered.gather(["big", "rank"])
    assert [each.sum().item() for each in big] == [0.0, 50_000.0]
    assert numbers == [0, 1]
    assert gathered.gather("rank", rank=1) == 1
    assert gathered.gather(["rank", "world_size"], rank=1) == (1, 2)
    assert gathered.gather("t", join="stack").tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert gathered.gather("t[None]", join="cat", dim=1).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    gathered.execute(
        "import os\nlinks = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]"
    )
    count = "sum('memfd:nbdist' in os.readlink(each) for each in links if os.path.exists(each))"
    assert gathered.gather(count) == [0, 0]


def test_the_error_says_which_rank_has_the_name(gathered: World) -> None:
    """The error is a line with the ranks; a wrong expression is refused before workers start."""
    for name, ranks, message in (
        ("nope", None, "^no rank has `nope`.$"),
        ("nope", [1], "^rank 1 has no `nope`.$"),
        ("only", None, "^rank 1 has no `only`; rank 0 has it: `-r 0`.$"),
        ("1 // rank", None, "^`1 // rank` on rank 0: ZeroDivisionError: .*.$"),
    ):
        with pytest.raises(UsageError, match=message):
            gathered.gather(name, ranks)
    assert gathered.gather("rank") == [0, 1]
    world = World(2, log_dir="")
    with pytest.raises(UsageError, match="`x = 1` is no expression"):
        world.gather(["y", "x = 1"])
    with pytest.raises(UsageError, match='`join=\'concat\'`: use "stack" or "cat"'):
        world.gather("x", join="concat")  # type: ignore[arg-type]
    assert world.state is WorldState.STOPPED


# --- scattered values -------------------------------------------------------------------------


def test_joined_parts_equal_the_scattered_value(world: World) -> None:
    """For each type the joined parts equal the whole; ranks that get no part keep their value."""
    import polars as pl
    from datasets import Dataset

    whole = torch.arange(35.0).reshape(5, 7)
    world.scatter("x", whole)
    assert [len(part) for part in world.gather("x")] == [3, 2]
    assert world.gather("x", join="cat").equal(whole)
    world.scatter("x", whole.numpy(), dim=1)
    assert np.array_equal(world.gather("x", join="cat", dim=1), whole)
    frame = pd.DataFrame({"n": range(3), "s": list("abc")})
    for table in (frame, pl.from_pandas(frame), pa.Table.from_pandas(frame)):
        world.scatter("x", table)
        assert world.gather("x", join="cat").equals(table)
    world.scatter("x", whole.to_sparse())
    assert world.gather("x", join="cat").to_dense().equal(whole)
    world.scatter("x", Dataset.from_dict({"n": [1, 2, 3]}).with_format("numpy"), ranks=[1])
    assert world.gather("x[:]['n'].tolist()", ranks=[1]) == [[1, 2, 3]]
    world.scatter("x", [5])
    assert world.gather("x") == [[5], []]
    world.scatter("x", ["ab"] * 3, ranks=[1])
    assert world.gather("x") == [[5], ["ab", "ab", "ab"]]
    assert world.engine.names.owners()["x"] == ("workers", {0, 1})


def test_no_part_has_memory_of_the_whole(world: World) -> None:
    """All parts together are as big as the value: no part of the value is sent twice."""
    import polars as pl
    from datasets import Dataset

    data = Dataset.from_dict({"n": [*range(500_000)]})
    arrays = torch.ones(1000, 1000), torch.ones(1000, 2000)[:, :1000], np.ones((1000, 500))
    for value, dim in (
        *((array, dim) for array in arrays for dim in (None, 1)),
        (pd.DataFrame(np.ones((1000, 500))), None),
        ([bytes([n % 256]) * 4000 for n in range(1000)], None),
        (pl.DataFrame({"n": range(500_000)}), None),
        (pa.table({"n": range(500_000)}), None),
        (data, None),
        (data.shuffle(seed=1), None),
    ):
        with closing(Scatter(world.engine, "x", value, dim=dim)) as scatter:
            done = [*scatter.packing()]
        assert 3_990_000 <= scatter.bytes <= 4_100_000, (type(value), dim)
        assert done == sorted(done)
        assert scatter.bytes - done[-1] < 100


def test_a_scatter_says_how_much_each_rank_gets(world: World) -> None:
    """The text has each rank's share; if the value cannot be split, ranks keep their old value."""
    assert str(Scatter(world.engine, "x", [1, 2, 3])) == "x: 3 elements, 2 to rank 0, 1 to rank 1"
    even = str(Scatter(world.engine, "x", torch.ones(3, 4), dim=1))
    assert even == "x: 4 along dimension 1, 2 to each of ranks 0-1"
    world.execute("x = 'as it was'")
    with pytest.raises(VariableNotSent, match=r"`x`: `x\[0\]` \(generator\) cannot be sent"):
        world.scatter("x", [1, (i for i in "a")])
    with pytest.raises(UsageError, match="cannot be split"):
        world.scatter("x", 5)
    with pytest.raises(UsageError, match="name the parts"):
        world.scatter("x[0]", [1])
    assert world.gather("x") == ["as it was"] * 2


# --- a scatter binds its parts on all ranks or on none ------------------------------------------


OLD = """
class Old:
    def __del__(self):
        from pathlib import Path; import time
        if self.gate:
            Path(self.gate, "binds").touch()
            while not Path(self.gate, "open").exists(): time.sleep(0.01)
    def __repr__(self): return "old"
Old.gate = ""
x = Old()
"""


class New:
    def __repr__(self) -> str:
        return "new"


class Waits(New):
    """A value that makes the file `takes` when it is rebuilt, and waits for the file `open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        Path(state["folder"], "takes").touch()
        while not Path(state["folder"], "open").exists():
            time.sleep(0.01)


class Bad:
    """A value that cannot be rebuilt."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("x",)


@pytest.fixture
def old(world: World) -> World:
    """The world with the variable `x`, an object of the class `Old`, on both ranks."""
    world.execute(OLD)
    return world


def values(world: World) -> list[str]:
    return world.gather("repr(globals().get('x'))")


def rank_1_alone(world: World, file: Path) -> Callable[[], bool]:
    """Return a condition: only rank 1 still runs the task, and the file exists."""
    return lambda: world.engine.task_table.unfinished == (1,) and file.exists()


def test_a_scatter_stopped_halfway_binds_nothing(old: World, tmp_path: Path) -> None:
    """No rank binds its part or keeps the part in memory, and the same scatter works afterwards."""
    parts = [New(), Waits(tmp_path)]
    stops = once(rank_1_alone(old, tmp_path / "takes"), press_stop)
    with stops, pytest.raises(KeyboardInterrupt) as stopped:
        old.scatter("x", parts)
    assert not isinstance(stopped.value, Interrupted)
    assert values(old) == ["old", "old"]
    parts_in_memory = "[type(o).__name__ for o in __import__('gc').get_objects()].count('New')"
    wait_until(lambda: old.gather(parts_in_memory) == [0, 0], "the ranks have released their parts")
    (tmp_path / "open").touch()
    old.scatter("x", parts)
    assert values(old) == ["[new]", "[new]"]


def test_stop_while_parts_are_bound_is_too_late(old: World, tmp_path: Path) -> None:
    """All ranks bind their parts, and Interrupted says that Stop came too late."""
    engine = old.engine
    old.execute(f"if rank: Old.gate = {str(tmp_path)!r}")
    is_due = lambda: engine.task_table.last and engine.task_table.last.stop.is_stopping  # noqa: E731
    with (
        once(rank_1_alone(old, tmp_path / "binds"), press_stop),
        once(is_due, (tmp_path / "open").touch),
        pytest.raises(Interrupted, match="Stop came too late: ranks 0-1 have bound x"),
    ):
        old.scatter("x", ["new", "new"])
    assert values(old) == ["['new']"] * 2
    assert engine.names.owners()["x"] == ("workers", {0, 1})


def test_a_part_that_cannot_be_rebuilt_binds_nothing(old: World) -> None:
    """If a rank cannot rebuild its part, the other ranks do not bind theirs."""
    with pytest.raises(WorkerError, match=r"rank \d failed, of 2"):
        old.scatter("x", ["new", Bad()])
    assert values(old) == ["old", "old"]


DEATH = r"rank 0 .* killed by SIGKILL .*Rank 0 was restarted"


def test_a_death_while_parts_are_taken_binds_nothing(old: World, tmp_path: Path) -> None:
    """No rank binds its part, and the new worker in the dead rank's place has no `x` at all."""
    with (
        once(rank_1_alone(old, tmp_path / "takes"), lambda: os.kill(old.pids[0], signal.SIGKILL)),
        once(lambda: 0 in old.engine.rank_table.dead, (tmp_path / "open").touch),
        pytest.raises(WorkerDied, match=DEATH),
    ):
        old.scatter("x", ["new", Waits(tmp_path)])
    assert values(old) == ["None", "old"]


def test_a_death_after_parts_are_taken_binds_nothing(old: World) -> None:
    """No rank binds its part, although the task that brought the parts had succeeded."""
    scatter = Scatter(old.engine, "x", ["new", "new"])
    assert [*scatter.packing()] == []
    take, bind = scatter.tasks()
    taking = dispatch.submit(old.engine, take)
    dispatch.finish(old.engine, taking)
    os.kill(old.pids[0], signal.SIGKILL)
    wait_until(lambda: inbox.receive(old.engine, 0.01) or 0 in old.engine.rank_table.dead)
    with pytest.raises(WorkerDied, match=DEATH):
        commit(old.engine, taking, bind)
    assert values(old) == ["None", "old"]


# --- values copied from rank to rank ----------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "source", "ranks", "kind", "message"),
    [
        ([], 0, None, UsageError, "which names"),
        (["x", "mine[0]"], 0, None, UsageError, r"by name: `%dist_sync mine`"),
        (["x"], 3, None, BadRanks, "there is no rank 3"),
        (["x"], 0, [1, 5], BadRanks, "there is no rank 5"),
        (["x", "gone"], 1, None, UsageError, "rank 1: this rank has no `gone`"),
        (["x", "lock"], 0, None, UsageError, "rank 0: `x, lock` cannot be copied: TypeError"),
    ],
)
def test_a_refused_sync_changes_nothing(
    world: World, names: list[str], source: int, ranks: list[int] | None, kind: type, message: str
) -> None:
    """The error is a line that says why the variables cannot be copied."""
    world.execute("import threading; x = rank\nif rank == 0: mine = [1]; lock = threading.Lock()")
    with pytest.raises(kind, match=message) as caught:
        world.sync(names, source=source, ranks=ranks)
    assert "\n" not in str(caught.value)
    assert world.gather("(x, 'mine' in globals())") == [(0, True), (1, False)]


def test_a_sharded_model_cannot_be_synced(world: World) -> None:
    """A sync of a sharded model is refused; a new rank gets its part from a saved full state."""
    world.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.checkpoint import state_dict as states\n"
        "def build(): return fully_shard(torch.nn.Linear(4, 4))\n"
        "net = build(); adam = torch.optim.Adam(net.parameters())\n"
        "options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
        "saved = states.get_model_state_dict(net, options=options)"
    )
    world.execute("weights = {'of': [net.weight]}; net(torch.ones(1, 4)).sum().backward()")
    for names in (["net"], ["adam", "options"], ["options", "weights"]):
        with pytest.raises(UsageError, match="has only its own part") as caught:
            world.sync(names, ranks=[0, 1])
        assert "`fully_shard`" in str(caught.value)
        assert "\n" not in str(caught.value)
    world.engine.connection.link.call(Kill((1,)))
    with pytest.raises(WorkerDied):
        world.execute("pass")
    world.sync(["build", "saved"])
    world.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.checkpoint import state_dict as states\n"
        "net = build()\n"
        "options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)\n"
        "states.set_model_state_dict(net, dict(saved), options=options)"
    )
    are_equal = "bool((net.weight.full_tensor() == saved['weight']).all())"
    assert world.gather(are_equal) == [True, True]


def test_sync_needs_a_process_group(world: World) -> None:
    """Without a process group a sync is refused, and the error names `--backend none`."""
    world.restart(backend="none")
    with pytest.raises(UsageError, match=r"these workers have none \(`--backend none`\)"):
        world.sync(["x"])
    world.restart(backend="gloo")


# --- values that are split and joined -----------------------------------------------------------


LENGTHS, RANKS = st.integers(0, 40), st.integers(1, 9)


@given(st.lists(st.integers(), max_size=20), RANKS)
def test_joined_parts_of_lists_equal_the_whole(values, parts):
    """Lists, tuples, arrays and series are split into parts as long as the parts of torch."""
    lengths = [len(part) for part in torch.arange(len(values)).tensor_split(parts)]
    for kind in (list, tuple, np.array, pd.Series):
        whole = kind(values)
        pieces = split("x", whole, parts)
        assert [len(piece) for piece in pieces] == lengths
        assert all(type(piece) is type(whole) for piece in pieces)
        assert [*join("cat", "x", dict(enumerate(pieces)))] == [*whole]


@given(st.tuples(LENGTHS, st.integers(0, 3)), RANKS, st.sampled_from([0, 1, -1, -2]))
def test_tensors_are_split_along_a_dimension(shape, parts, dim):
    """Parts are views of the tensor, and the joined parts are equal to the tensor."""
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    pieces = split("x", whole, parts, dim)
    assert all(map(torch.equal, pieces, whole.tensor_split(parts, dim)))
    assert all(each.untyped_storage().data_ptr() == whole.data_ptr() for each in pieces)
    assert join("cat", "x", dict(enumerate(pieces)), dim).equal(whole)
    arrays = split("x", whole.numpy(), parts, dim)
    assert np.array_equal(join("cat", "x", dict(enumerate(arrays)), dim), whole)


def test_tables_and_data_sets_are_split_by_rows():
    """Parts have the type of the whole; along dimension 1, tables are joined side by side."""
    import polars as pl
    from datasets import Dataset

    columns = {"a": range(5), "b": list("vwxyz")}
    for whole in (
        pd.DataFrame(columns, index=range(10, 15)),
        *(pl.DataFrame(columns), pl.Series("a", range(5)), pa.table(columns)),
    ):
        for parts, lengths in ((2, [3, 2]), (7, [1] * 5 + [0] * 2)):
            pieces = split("x", whole, parts)
            assert [len(piece) for piece in pieces] == lengths
            assert all(type(piece) is type(whole) for piece in pieces)
            assert join("cat", "x", dict(enumerate(pieces))).equals(whole)
    halves = split("x", Dataset.from_dict({"a": [*range(5)]}), 2)
    assert [[*half["a"]] for half in halves] == [[0, 1, 2], [3, 4]]
    assert [*join("cat", "x", dict(enumerate(halves)))["a"]] == [*range(5)]
    sides = {0: pl.DataFrame({"a": [1]}), 1: pl.DataFrame({"b": [2]})}
    assert join("cat", "x", sides, 1).equals(pl.DataFrame({"a": [1], "b": [2]}))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"])
def test_parts_of_sparse_values_keep_the_layout(layout, dim):
    """Parts and joined parts have the layout of the whole, and with scipy its class."""
    dense = torch.arange(32.0).reshape(8, 4) % 5
    kind = getattr(torch, layout)
    sparse = dense.to_sparse(layout=kind, blocksize=(2, 2) if layout == "sparse_bsr" else None)
    pieces = split("x", sparse, 2, dim)
    assert all(piece.layout is kind for piece in pieces)
    assert [piece.shape[dim] for piece in pieces] == [dense.shape[dim] // 2] * 2
    rejoined = join("cat", "x", dict(enumerate(pieces)), dim)
    assert rejoined.layout is kind
    assert rejoined.to_dense().equal(dense)
    if layout == "sparse_coo":
        assert join("stack", "x", {0: sparse, 1: sparse}).to_dense().equal(torch.stack([dense] * 2))
    for array in (sparse_arrays.csr_matrix, sparse_arrays.csc_array):
        pieces = split("x", array(dense.numpy()), 2, dim)
        joined = join("cat", "x", dict(enumerate(pieces)), dim)
        assert {type(joined), *map(type, pieces)} == {array}
        assert np.array_equal(joined.toarray(), dense)


def test_stacked_values_get_a_dimension_for_ranks():
    """Stacked tensors make a tensor, and stacked numbers an array; masks of arrays are kept."""
    masked = np.ma.array([1, 2], mask=[False, True])
    assert join("cat", "x", {0: masked, 1: masked}).tolist() == [1, None, 1, None]
    assert join("stack", "x", {0: masked, 1: masked}).tolist() == [[1, None]] * 2
    two = {0: torch.ones(2), 2: torch.zeros(2)}
    assert join("stack", "x", two).tolist() == [[1, 1], [0, 0]]
    assert join("stack", "x", two, 1).tolist() == [[1, 0]] * 2
    assert join("stack", "x", {0: 1.5, 1: 2}).tolist() == [1.5, 2]


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_an_unsplittable_value_is_refused():
    """The error says why a value cannot be split, also for too few blocks and nested tensors."""
    import polars as pl

    for value, dim, message in (
        (5, None, r"`x` \(int\) cannot be split: use a tensor, an array"),
        (torch.tensor(1.0), None, r"`x` of shape \(\) has no dimension 0 to split"),
        (torch.ones(3), 1, r"`x` of shape \(3,\) has no dimension 1 to split"),
        ([1, 2], 1, r"`x` \(list\) has no dimension 1 to split"),
        (torch.eye(6).to_sparse_bsr((2, 2)), 0, r"sparse_bsr\) cannot .*: use `x.to_dense\(\)`"),
        (nested(), 0, r"`x` \(torch.Tensor\) cannot be split"),
        (pl.LazyFrame({"a": [1]}), None, r"`x` \(polars.*LazyFrame\) cannot be split"),
    ):
        with pytest.raises(UsageError, match=message):
            split("x", value, 2, dim)


def nested():
    return torch.nested.nested_tensor([torch.ones(2)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_values_that_cannot_be_joined_are_refused():
    """The error says which ranks have which types and shapes."""
    import polars as pl

    one, two = torch.ones(1), torch.ones(2)
    shapes = r"torch.Tensor \(1,\) on ranks 0,2, torch.Tensor \(2,\) on rank 1"
    remedy = r"\. Gather the list inst"
    tables = {0: pl.DataFrame({"a": [1]}), 1: pl.DataFrame({"b": ["x"]})}
    for how, values, message in (
        ("stack", {0: one, 1: two, 2: one}, f"`x` .* by `--stack` .*: {shapes}. .* or `--cat`.$"),
        ("cat", {0: 1, 1: 2}, f"`--cat` .*: int on ranks 0-1{remedy}"),
        ("stack", {0: {}, 1: {}}, f"no array.*: dict on ranks 0-1{remedy}"),
        ("stack", dict.fromkeys((0, 1), pl.LazyFrame({"a": [1]})), f"`x` .* on ranks 0-1{remedy}"),
        ("stack", dict.fromkeys((0, 1), nested()), f"`x` cannot be .*: .* on ranks 0-1{remedy}"),
        ("cat", tables, r"`x` cannot be .* on rank"),
        ("cat", {0: pa.table({"a": [1]}), 1: pa.table({"b": [2]})}, r"`x` cannot be .* on rank"),
    ):
        with pytest.raises(UsageError, match=message):
            join(how, "x", values)
