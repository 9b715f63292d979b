"""`%dist_memory`: figures of all ranks, names once; and `--free`."""

from __future__ import annotations

from nbdist.notebook.commands.run import freed_rows, headline, names, rows, shown_of
from nbdist.system.limits import MemoryLimit
from nbdist.wire.ops import Cleaned, GpuMemory, Held, Memory, Peak

MIB, GIB = 2**20, 2**30

X = Held("x", 4 * MIB, (1024, 1024), "float32")


def memory(
    pss: int, *held: Held, gpu: GpuMemory | None = None, kept: tuple[Held, ...] = ()
) -> Memory:
    """A rank's, on a machine of 24 GiB."""
    limit = MemoryLimit("this machine", 24 * GIB, 20 * GIB)
    size = sum(each.size for each in held)
    return Memory(pss, Peak(pss), limit, gpu, held, size, kept, sum(each.size for each in kept))


def test_equal_ranks_are_one_row():
    """From which to which in the head; columns of GPUs only where there are some."""
    found = {0: memory(40 * MIB, X), 1: memory(60 * MIB, X), 2: memory(40 * MIB, X)}
    assert headline(found) == "ranks 0-2 · 40-60 MiB · this machine 4 GiB of 24 GiB"
    assert rows(found) == [
        ("ranks", "memory", "peak in last cell", "in variables"),
        ("0,2", "40 MiB", "40 MiB", "4 MiB"),
        ("1", "60 MiB", "60 MiB", "4 MiB"),
    ]
    gpu = GpuMemory("1", 61 * GIB, 80 * GIB, 40 * GIB, Peak(50 * GIB, is_bound=True))
    found = {1: memory(GIB, X, gpu=gpu)}
    assert headline(found).startswith("rank 1 · 1 GiB · GPU 61 GiB of 80 GiB · ")
    assert rows(found)[1][4:] == ("61 GiB of 80 GiB", "40 GiB", "at most 50 GiB")


def test_names():
    """A row for each, with the ranks where it is so; the largest first."""
    small, other = Held("x", MIB, (5,), "int8", "cuda:0"), Held("list", 9 * MIB, count=300)
    found = {0: memory(0), 1: memory(0)}
    held = [(0, X), (1, small), (0, other), (1, other)]
    assert names(found, held) == [
        ("size", "name", "what", "device", "ranks"),
        ("9 MiB", "list", "300 tensors", "cpu", "all"),
        ("4 MiB", "x", "(1024, 1024) float32", "cpu", "0"),
        ("1 MiB", "x", "(5,) int8", "cuda:0", "1"),
    ]
    assert names(found, []) == []


def test_what_is_held_unseen():
    """With the way to let go of it, where there is any."""
    assert "%dist_clean" not in shown_of({0: memory(MIB, X)}).text
    said = "4 MiB that only the last traceback and `Out` hold on rank 1: `%dist_memory --free`"
    assert said in shown_of({0: memory(MIB, X), 1: memory(MIB, kept=(X,))}).text


def test_equal_rows_are_one() -> None:
    """Ranks with the same numbers share a row; GPUs have columns where there are any."""
    alike, other = Cleaned((240 * MIB, 43 * MIB)), Cleaned((2**30, 43 * MIB))
    assert freed_rows({0: alike, 1: other, 2: Cleaned((238 * MIB, 43 * MIB)), 3: alike}) == [
        ("ranks", "memory before", "after"),
        ("0,2-3", "240 MiB", "43 MiB"),
        ("1", "1.0 GiB", "43 MiB"),
    ]
    on_gpu = Cleaned((0, 0), (3 * 2**30, 2**30), (4 * 2**30, 2**30))
    assert freed_rows({0: on_gpu}) == [
        ("ranks", "memory before", "after", "GPU tensors before", "after",
         "GPU held by torch before", "after"),
        ("0", "0 MiB", "0 MiB", "3.0 GiB", "1.0 GiB", "4.0 GiB", "1.0 GiB"),
    ]  # fmt: skip
