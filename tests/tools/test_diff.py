"""Tests of `nbdist.tools.diff`: real ranks, one of which has something else, and what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nbdist.errors import WorldNotStarted
from nbdist.tools.diff import MOST_COMPARED, Comparison
from nbdist.wire.ops import Distance, Looked, Part
from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world

SETUP = """%%distributed -n 3
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.1 if rank < 2 else 0.2)
zeros = torch.zeros(4) * (-1 if rank == 1 else 1)
empty = []
if rank == 2:
    only = 1
    with torch.no_grad():
        model[0].weight[3, 4] += 0.5
"""


def test_without_workers(typed: Callable[[str], str]):
    """It says how to start some."""
    with pytest.raises(WorldNotStarted, match="`%dist_diff` needs workers"):
        typed("%dist_diff x")


@pytest.fixture(scope="module")
def three() -> Iterator[Notebook]:
    notebook = Notebook("%load_ext nbdist", SETUP)
    yield notebook
    notebook.close()


def test_one_weight_changed(three: Notebook):
    """Its row says which rank differs, and how much; nothing stays in shared memory."""
    outcome = three.run("%dist_diff model")
    assert outcome.text.splitlines() == [
        "model: 4 parts, 79.7 KiB · 1 of 4 differs",
        "part      type                ranks",
        "0.weight  float32 (200, 100)  "
        "ranks 0-1 agree, rank 2 differs by at most 5.0e-1 (1 of 20,000)",
    ]
    assert "<table" in outcome.panel["text/html"]
    listed = "[f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]"
    three.run(f"%%distributed\nimport os\nlinks = {listed}")
    held = "sum('memfd:nbdist' in os.readlink(each) for each in links if os.path.exists(each))"
    three.run(f"%dist_gather {held} --as left")
    assert three.value("left") == [0, 0, 0]


def test_agreement_and_plain_values(three: Notebook):
    """Zeros agree whatever their sign; a learning rate is shown itself."""
    assert three.run("%dist_diff zeros").text == "zeros: 1 part, 16 B · ranks 0-2 agree"
    lines = three.run("%dist_diff opt").text.splitlines()
    assert lines[2].split(maxsplit=2) == [
        "param_groups[0]['lr']",
        "float",
        "0.1 on ranks 0-1, 0.2 on rank 2",
    ]
    assert three.run("%dist_diff model[1].bias -r 0,2").text.endswith("ranks 0,2 agree")
    assert (
        three.run("%dist_diff only").text == "only: 1 part · one rank alone · ranks 0-1 have none"
    )
    assert three.run("%dist_diff empty").text == "empty: 0 parts · ranks 0-2 agree"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nope", "UsageError: no rank has `nope`."),
        ("only -r 1", "UsageError: rank 1 has no `only`; rank 2 has it: `-r 2`."),
        ("model.x", "UsageError: `model.x` on ranks 0-2: AttributeError: "),
        ("model[", "UsageError: `model[` is no expression: "),
    ],
)
def test_what_cannot_be_compared(three: Notebook, line: str, said: str):
    """One line says why."""
    assert three.run(f"%dist_diff {line}").error.startswith(said)


def test_several_ranks_differ_in_several_parts(three: Notebook):
    """Each distance is that of its own rank."""
    three.run("%%distributed\nboth = {'a': torch.zeros(2), 'b': torch.zeros(3)}\n"
              "both['a'] += 8.0 * (rank == 2)\nboth['b'] += rank")  # fmt: skip
    assert [
        " ".join(row.split()) for row in three.run("%dist_diff both").text.splitlines()[2:]
    ] == [
        "['a'] float32 (2,) ranks 0-1 agree, rank 2 differs by at most 8.0e0 (2 of 2)",
        "['b'] float32 (3,) compared with rank 0, rank 1 differs by at most 1.0e0 (3 of 3), "
        "rank 2 differs by at most 2.0e0 (3 of 3)",
    ]


def test_sharded_tensors(three: Notebook):
    """Each rank has another part of them by design; what is replicated is compared."""
    three.run(
        "%%distributed\nfrom torch.distributed.tensor import Replicate, Shard, distribute_tensor\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (world_size,))\n"
        "parts = [distribute_tensor(torch.arange(6.0), mesh, [place]) for place in "
        "(Shard(0), Replicate())]\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(model[1])"
    )
    assert three.run("%dist_diff parts").text == (
        "parts: 2 parts, 48 B · ranks 0-2 agree · 1 part not compared: sharded, or of unknown kind"
    )
    assert three.run("%dist_diff wrapped").text == "wrapped: 2 parts, 804 B · ranks 0-2 agree"


W = "float32 (4, 4)"


def part(digest: str, kind: str = W, text: str = "") -> Part:
    return Part(kind, digest, text, size=64, count=16)


def compared(*parts: Part | None) -> Comparison:
    """A value with one part `w`, as each rank has it."""
    looked = [Looked({"w": each} if each else {"v": part("v")}) for each in parts]
    return Comparison("model", dict(enumerate(looked)))


def test_all_agree():
    """One line."""
    same = compared(part("a"), part("a"))
    assert [*same.rows()] == []
    assert same.to_compare() == {}
    assert same.head(0) == "model: 1 part, 64 B · ranks 0-1 agree"


def test_one_differs():
    """It is compared with the first of those that agree."""
    found = compared(part("a"), part("a"), part("a"), part("b"))
    assert found.to_compare() == {0: ([3], ["w"])}
    assert [*found.rows()] == [("w", W, "ranks 0-2 agree, rank 3 differs")]
    found.take({3: {"w": Distance(0.03125, 12)}})
    said = "ranks 0-2 agree, rank 3 differs by at most 3.1e-2 (12 of 16)"
    assert [*found.rows()] == [("w", W, said)]
    assert found.head(1) == "model: 1 part, 64 B · 1 of 1 differs"


def test_each_rank_is_asked_once():
    """In their order, whatever part they differ in."""
    looked = {
        rank: Looked({"a": part("a" if rank < 2 else "b"), "b": part("x" if rank != 1 else "y")})
        for rank in range(3)
    }
    assert Comparison("x", looked).to_compare() == {0: ([1, 2], ["a", "b"])}


def test_bits_alone():
    """Zeros' signs and kinds of NaN are no difference."""
    found = compared(part("a"), part("a"), part("b"))
    found.take({2: {"w": Distance(0.0, 0)}})
    assert [*found.rows()] == []
    third = compared(part("a"), part("b"), part("c"))
    third.take({1: {"w": Distance(0.0, 0)}, 2: {"w": Distance(2.0, 1, 1)}})
    said = "ranks 0-1 agree, rank 2 differs by at most 2.0e0 (1 of 16), NaN or infinity in 1"
    assert [row[2] for row in third.rows()] == [said]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            (part("a"), part("b", "float32 (5,)")),
            "float32 (4, 4) on rank 0, float32 (5,) on rank 1",
        ),
        ((part("a"), None, part("a")), "float32 (4, 4) on ranks 0,2, nothing on rank 1"),
        (
            (part("a", "int", "3"), part("b", "int", "4"), part("b", "int", "4")),
            "4 on ranks 1-2, 3 on rank 0",
        ),
        ((part("a"), part("b")), "compared with rank 0, rank 1 differs"),
        ((part("a"), part("b"), part("b")), "ranks 1-2 agree, rank 0 differs"),
    ],
)
def test_what_differs(parts: tuple[Part | None, ...], said: str):
    """Types, plain values, or contents."""
    found = compared(*parts)
    assert next(text for path, _, text in found.rows() if path == "w") == said


def test_many_that_differ():
    """One number for all of them."""
    found = compared(*(part(str(rank)) for rank in range(6)))
    assert found.to_compare() == {0: ([1, 2, 3, 4, 5], ["w"])}
    found.take({rank: {"w": Distance(rank / 10, rank)} for rank in range(1, 6)})
    said = "compared with rank 0, ranks 1-5 differ by at most 5.0e-1 (5 of 16)"
    assert [row[2] for row in found.rows()] == [said]


def test_what_is_too_big_is_not_moved():
    """Of the rest the numbers are compared."""
    big = [Part(W, digest, size=MOST_COMPARED, count=9) for digest in "ab"]
    looked = {r: Looked({"big": big[r], "small": part(str(r))}) for r in (0, 1)}
    assert Comparison("x", looked).to_compare() == {0: ([1], ["big"])}
    looked = {r: Looked({"small": part(str(r)), "big": big[r]}) for r in (0, 1)}
    assert Comparison("x", looked).to_compare() == {0: ([1], ["small"])}


def test_ranks_without_it_and_parts_unseen():
    """The head says so."""
    looked = {0: Looked({"w": part("")}), 1: Looked(missing="x"), 2: Looked({"w": part("")})}
    head = Comparison("x", looked).head(0)
    assert head == (
        "x: 1 part, 64 B · ranks 0,2 agree · rank 1 has none"
        " · 1 part not compared: sharded, or of unknown kind"
    )
    assert "one rank alone" in Comparison("x", {0: looked[0]}).head(0)
