"""Tests of `nbdist.tools.diff` and its op: parts of values, how far apart they are."""

from __future__ import annotations

import math
import socket
from collections import deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist.tools import diff_op as module
from nbdist.tools.diff import MAX_COMPARED_BYTES, Comparison
from nbdist.tools.diff_op import (
    ROW_WORDS,
    Again,
    TooManyLeaves,
    bytes_of,
    comparable,
    compare,
    diff,
    digest_of,
    distance,
    fold,
    leaves,
    lend,
    part_of,
)
from nbdist.wire.ops import Distance, Looked, ValueDigest
from nbdist.worker.namespace import Context, Namespace
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


@pytest.fixture(scope="module")
def three() -> Iterator[Notebook]:
    notebook = Notebook("%load_ext nbdist", SETUP)
    yield notebook
    notebook.close()


def test_a_changed_weight_has_a_row_with_its_rank(three: Notebook):
    """The row of a changed weight says which rank differs and how much; no shared memory stays."""
    outcome = three.run("%dist_diff model")
    assert outcome.text.splitlines() == [
        "model: 4 parts, 79.7 KiB · 1 of 4 differs",
        "part      type                ranks",
        "0.weight  float32 (200, 100)  "
        "ranks 0-1 agree, rank 2 differs by at most 0.5 (1 of 20,000)",
    ]
    assert "<table" in outcome.panel["text/html"]
    listed = "[f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]"
    three.run(f"%%distributed\nimport os\nlinks = {listed}")
    held = "sum('memfd:nbdist' in os.readlink(each) for each in links if os.path.exists(each))"
    three.run(f"%dist_gather {held} --as left")
    assert three.value("left") == [0, 0, 0]


def test_plain_values_that_differ_are_shown(three: Notebook):
    """Numbers that differ are shown, zeros agree despite signs, and each mistake has a line."""
    row = three.run("%dist_diff opt").text.splitlines()[2].split(maxsplit=2)
    assert row == ["param_groups[0]['lr']", "float", "0.1 on ranks 0-1, 0.2 on rank 2"]
    assert three.run("%dist_diff model[1].bias -r 0,2").text.endswith("ranks 0,2 agree")
    for name, said in (
        ("zeros", "1 part, 16 B · ranks 0-2 agree"),
        ("only", "1 part · one rank alone · ranks 0-1 have none"),
        ("empty", "0 parts · ranks 0-2 agree"),
    ):
        assert three.run(f"%dist_diff {name}").text == f"{name}: {said}"
    for expression, said in (
        ("nope", "no rank has `nope`."),
        ("only -r 1", "rank 1 has no `only`; rank 2 has it: `-r 2`."),
        ("model.x", "`model.x` on ranks 0-2: AttributeError: "),
        ("model[", "`model[` is no expression: "),
    ):
        assert three.run(f"%dist_diff {expression}").error.startswith(f"UsageError: {said}")


def test_sharded_tensors_are_not_compared(three: Notebook):
    """Sharded tensors, which differ by design, are not compared; replicated tensors are."""
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


def part(digest: str, kind: str = W, text: str = "") -> ValueDigest:
    return ValueDigest(kind, digest, text, size=64, count=16)


def compared(*parts: ValueDigest | None) -> Comparison:
    """Return the comparison of a value with a part `w`, as each rank has this part."""
    looked = [Looked({"w": each} if each else {"v": part("v")}) for each in parts]
    return Comparison("model", dict(enumerate(looked)))


THREE, FOUR, SHORT = part("a", "int", "3"), part("b", "int", "4"), part("b", "float32 (5,)")


@pytest.mark.parametrize(
    ("parts", "apart", "said"),
    [
        # Types, plain values, or contents.
        ([part("a"), SHORT], {}, "float32 (4, 4) on rank 0, float32 (5,) on rank 1"),
        ([part("a"), None, part("a")], {}, "float32 (4, 4) on ranks 0,2, nothing on rank 1"),
        ([THREE, FOUR, FOUR], {}, "4 on ranks 1-2, 3 on rank 0"),
        ([*map(part, "ab")], {}, "compared with rank 0, rank 1 differs"),
        ([*map(part, "abb")], {}, "ranks 1-2 agree, rank 0 differs"),
        # Distances between ranks; signs of zeros and kinds of NaN are no difference.
        (
            [*map(part, "aaab")],
            {3: Distance(0.03125, 12)},
            "ranks 0-2 agree, rank 3 differs by at most 0.0312 (12 of 16)",
        ),
        ([*map(part, "aab")], {2: Distance(0.0, 0)}, None),
        (
            [*map(part, "aab")],
            {2: Distance(0.00001, 1)},
            "ranks 0-1 agree, rank 2 differs by at most 1e-05 (1 of 16)",
        ),
        (
            [*map(part, "abc")],
            {1: Distance(0.0, 0), 2: Distance(2.0, 1, 1)},
            "ranks 0-1 agree, rank 2 differs by at most 2 (1 of 16), NaN or infinity in 1",
        ),
    ],
)
def test_differing_ranks_are_named_beside_the_majority(
    parts: list[ValueDigest | None], apart: dict[int, Distance], said: str | None
):
    """Ranks that differ are named beside the largest group of ranks that agree."""
    found = compared(*parts)
    found.add_distances({rank: {"w": each} for rank, each in apart.items()})
    assert [text for path, _, text in found.rows() if path == "w"] == ([said] if said else [])


def test_each_rank_compares_all_its_parts_at_once():
    """Each rank is asked once, whatever parts differ, and parts that are too big are not sent."""
    found = compared(*map(part, "aaab"))
    assert found.to_compare() == {0: ([3], ["w"])}
    assert found.head(1) == "model: 1 part, 64 B · 1 of 1 differs"
    rank = lambda n, a, b: (n, Looked({"a": part(a), "b": part(b)}))  # noqa: E731
    looked = dict([rank(0, "a", "x"), rank(1, "a", "y"), rank(2, "b", "x")])
    assert Comparison("x", looked).to_compare() == {0: ([1, 2], ["a", "b"])}
    big = [ValueDigest(W, digest, size=MAX_COMPARED_BYTES, count=9) for digest in "ab"]
    for first, second in (("big", "small"), ("small", "big")):
        parts = [{"big": big[rank], "small": part(str(rank))} for rank in (0, 1)]
        looked = {r: Looked({first: parts[r][first], second: parts[r][second]}) for r in (0, 1)}
        assert Comparison("x", looked).to_compare() == {0: ([1], [first])}


# --- the op: the parts of values, and the distance of two values --------------------------------


def context(**names: Any) -> Context:
    return Context(SimpleNamespace(user_ns=names), Namespace(names), task_id="t")


def test_a_rank_compares_its_value_with_a_lent_value():
    """A rank computes how far its value is from a lent value, for the tensors that both have."""
    one, other = context(x=[torch.ones(3), 5, torch.ones(2)]), context(x=[torch.zeros(3), 5])
    lent = lend(one, "x", ("[0]", "[1]", "[2]"))
    assert lent.packed is not None
    assert compare(other, "x", lent.packed) == {"[0]": Distance(1.0, 3)}


NAN, INF = math.nan, math.inf


def on_device(tensor):
    """Return the sums from which a digest is made on a device."""
    return tuple(fold(bytes_of(tensor)).tolist())


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_digests_are_equal_only_for_equal_bytes(one, other):
    """Both kinds of digests are equal exactly if the bytes are equal."""
    tensors = [torch.tensor([*data], dtype=torch.uint8) for data in (one, other)]
    for make in (digest_of, on_device):
        assert (make(tensors[0]) == make(tensors[1])) == (one == other)


@pytest.mark.parametrize("make", [digest_of, on_device])
def test_a_change_anywhere_changes_the_digest(make):
    """A digest changes if any element changes, two elements change places, or all signs change."""
    size = 40 * ROW_WORDS + 77
    whole = torch.arange(1, size + 1, dtype=torch.float64)
    seen = {make(whole), make(-whole), make(whole.flip(0))}
    swapped = whole.clone()
    swapped[[0, 1]] = whole[[1, 0]]
    seen.add(make(swapped))
    for place in (0, 1, ROW_WORDS // 2, 20 * ROW_WORDS, size - 1):
        changed = whole.clone()
        changed[place] += 1
        seen.add(make(changed))
    assert len(seen) == 9


@pytest.mark.parametrize("make", [digest_of, on_device])
def test_rows_that_change_places_change_the_digest(make):
    """A permuted identity matrix has another digest, though its rows and columns sum up equally."""
    one = torch.eye(ROW_WORDS)
    assert make(one) != make(one[torch.arange(ROW_WORDS).roll(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_digest_does_not_depend_on_strides(dtype):
    """A view has the digest of its contents, whatever its strides are."""
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert digest_of(tensor.t()) == digest_of(tensor.t().contiguous())
    assert digest_of(tensor.flip(0)) != digest_of(tensor)
    assert part_of(tensor).kind == f"{str(dtype)[6:]} (2, 3)"
    assert digest_of(torch.empty(0, dtype=dtype)) == digest_of(torch.empty(0, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([0.0, NAN], [-0.0, NAN], Distance(0.0, 0)),
        ([INF, INF, 1.0], [INF, -INF, 4.0], Distance(3.0, 2, 1)),
        ([2**60], [2**60 + 1], Distance(0.0, 1)),
        ([True, False], [True, True], Distance(1.0, 1)),
        ([1 + 1j], [1 - 1j], Distance(2.0, 1)),
        ([], [], Distance(0.0, 0)),
    ],
)
def test_distances_are_right_for_special_numbers(one, other, found):
    """NaN equals NaN, and -0.0 equals 0.0; integers can differ even if they are equal as floats."""
    assert distance(torch.tensor(one), torch.tensor(other)) == found


@given(st.lists(st.tuples(st.floats(width=16), st.floats(width=16)), max_size=20))
def test_distances_of_small_floats_are_exact(pairs):
    """The distance of small floats is the distance of Python's own numbers."""
    same = [a == b or (a != a and b != b) for a, b in pairs]
    apart = [abs(a - b) for (a, b), equal in zip(pairs, same, strict=True) if not equal]
    finite = [each for each in apart if math.isfinite(each)]
    expected = Distance(max(finite, default=0.0), same.count(False), len(apart) - len(finite))
    columns = [torch.tensor([pair[n] for pair in pairs], dtype=torch.float16) for n in (0, 1)]
    assert distance(*columns) == expected


def test_plain_values_are_described_by_type_and_text():
    """A plain value is described by its type, a short text and a digest of the value."""
    assert part_of(0.0) == part_of(-0.0)
    assert part_of(NAN) == part_of(-NAN)
    assert part_of(1) != part_of(1.0)
    assert (part_of("ab").kind, part_of("ab").text) == ("str", "'ab'")
    assert len(part_of("a" * 1000).text) <= 60
    assert part_of("a" * 1000) != part_of("a" * 999 + "b")
    assert part_of({3, 1}) == part_of({1, 3})
    assert part_of(iter("")).digest == part_of(iter("")).digest != part_of(iter("a")).digest
    assert part_of(socket.socket).kind == "type"
    assert part_of(np.float32(1)).text == "np.float32(1.0)"
    assert part_of(np.array(["a", "b"])) != part_of(np.array(["a", "c"]))
    assert comparable(np.array(["a"])) is None
    assert part_of(torch.ones(2, device="meta")).digest == ""
    sparse = torch.eye(2).to_sparse()
    assert part_of(sparse) == part_of(sparse.clone()) != part_of((2 * torch.eye(2)).to_sparse())


Pair = namedtuple("Pair", "a b")


@dataclass
class Config:
    lr: float
    sizes: tuple[int, ...]


class Plain:
    def __init__(self) -> None:
        self.rate, self._hidden = 0.5, [1]


class Empty:
    pass


class Scheduler(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"last": 3}


def paths(value: object) -> list[str]:
    return [*leaves(value)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        *((leaf, [""]) for leaf in (5, "text", torch.ones(2), np.ones(2), {1, 2}, Empty())),
        ([1, "a"], ["[0]", "[1]"]),
        ((), []),
        ({"a": {"b": [1]}, 2: 3}, ["['a']['b'][0]", "[2]"]),
        (deque([Pair(1, [2])]), ["[0].a", "[0].b[0]"]),
        (Config(0.1, (1, 2)), ["lr", "sizes[0]", "sizes[1]"]),
        ([Plain()], ["[0].rate", "[0]._hidden[0]"]),
        (Scheduler(), ["last"]),
        ([0.5] * 31, [f"[{n}]" for n in range(31)]),
        ([0.5] * 32, [""]),
        ([1] * 31 + [1.0], [f"[{n}]" for n in range(32)]),
        ([10**30] * 32, [f"[{n}]" for n in range(32)]),
        (np.array([{"a": 1}], dtype=object), ["[0]['a']"]),
        (pd.DataFrame({"a": [1], "b": ["x"]}, index=[7]), ["['a']", "['b'][0]", "index"]),
        (pd.Series([1]), ["", "index"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_paths_of_leaves_are_as_in_code(value: object, found: list[str]):
    """The path of a leaf is as in code; a long list of numbers of a single type is a leaf."""
    assert paths(value) == found


def test_leaves_of_modules_and_optimizers_are_named():
    """Leaves are parameters and buffers of a module, and the state of an optimizer after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))
    found = paths({"net": model})
    assert found[:2] == ["['net'].0.weight", "['net'].0.bias"]
    assert "['net'].1.running_mean" in found
    assert paths(model)[0] == "0.weight"
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    assert {"state[0]['exp_avg']", "param_groups[0]['lr']"} <= {*paths(optimizer)}


def test_loops_and_huge_values_have_bounded_leaves(monkeypatch: pytest.MonkeyPatch):
    """Leaves end at an object that contains itself; a value with too many parts is refused."""
    loop: list[Any] = [1]
    loop.append(loop)
    assert isinstance(leaves(loop)["[1]"], Again)
    monkeypatch.setattr(module, "MAX_LEAVES", 3)
    assert len(leaves([None] * 3)) == 3
    with pytest.raises(TooManyLeaves):
        leaves([None] * 4)
    said = "it has more than 3 parts: compare one of them"
    assert diff(context(x=[None] * 4), "x") == Looked(problem=said)
