"""Tests of `--watch`: which difference between ranks came first, and which do not count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from nbdist.output.html_parts import AMBER
from nbdist.tools.diff_op import ROW_WORDS, distance
from nbdist.tools.digests import DIGEST_PIECE, WIDE, WatchedValue, buffers_of, sample_digest
from nbdist.tools.watch import Divergence
from nbdist.wire.ops import Facts, Input, ValueDigest, Watched
from nbdist.worker.tracking import watch
from nbdist.world.world import World
from tests.bench.watch import KINDS, case_of, sound_source, verdict, watched
from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world(2)

# --- in a notebook ----------------------------------------------------------------------------

MODEL = """%%distributed -n 2
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(rank)
def train(steps, at=0):
    for step in range(1, steps + 1):
        model(torch.randn(8, 4)).square().mean().backward()
        if rank == 1 and step == at:
            net[0].weight.grad[0, 0] += 1
        optimizer.step()
        optimizer.zero_grad()
"""
ALIKE = "watch: model, optimizer: 18 parts the same on ranks 0-1, compared after 4 of 6 steps"


def test_a_watched_cell_reports_the_first_difference(kernel: Notebook) -> None:
    """Equal ranks have a line, a difference has a table, and only an option stops the cell."""
    kernel.run(MODEL)
    watches = "%%distributed --watch model,optimizer --every 2"
    assert kernel.run(f"{watches}\ntrain(6)").seen.splitlines()[-1] == ALIKE
    shown = kernel.run(f"{watches}\ntrain(6, at=3)\nprint('done')")
    assert shown.errors == []
    # The line comes while the cell runs, and is no output of the rank that found the difference.
    lines = shown.seen.splitlines()
    assert lines[1:4] == [
        "watch: rank 1 differs from rank 0 at step 4", "── ranks 0-1 (same) ──", "done",
    ]  # fmt: skip
    html = [each["data"]["text/html"] for each in (*shown.displays, *shown.updates)]
    assert any(f'<span style="color:{AMBER}">✓ 2</span>' in each for each in html)
    *_, head, titles, weight, state, until, told = shown.seen.splitlines()
    assert head == "watch: after step 4 rank 1 differs from rank 0"
    assert titles.split()[:3] == ["part", "type", "ranks,"]
    assert weight.startswith("model: module.0.weight  ")
    assert " rank 1 differs by at most " in weight
    assert " (1 of 16)" in weight
    assert state.startswith("optimizer: momentum_buffer of module.0.weight  ")
    assert until.startswith("all were equal after step 2; ")
    assert told.startswith("  none of these: the data that forward got")

    shown = kernel.run("%%distributed --watch net --stop-on-difference --every 1\ntrain(6)")
    assert "RanksDiffer: rank 1 differs from rank 0 at step 1; `%dist_debug` " in shown.seen
    assert "watch: after step 1 rank 1 differs from rank 0" in shown.seen
    assert "this is the first comparison; what else differs, " in shown.seen
    debugged = kernel.run("%dist_debug -r 1", typed=["up", "p steps", "q"])
    assert re.search(r"-> +12 +optimizer.step\(\)", debugged.seen)
    assert "ipdb> p steps\n6" in debugged.seen
    assert kernel.run("%%distributed\ntrain(2)").text == "2 ranks"


def test_a_difference_at_the_end_is_in_the_head(kernel: Notebook) -> None:
    """A difference that is found after the cell is in the head of the cell's panel as well."""
    kernel.run(MODEL)
    shown = kernel.run("%%distributed --watch model --every 50\ntrain(6, at=3)")
    said = "watch: at the end, after step 6 rank 1 differs from rank 0"
    assert shown.seen.splitlines()[:2] == ["2 ranks", said]


SIGNED = """%%distributed -n 2
net = torch.nn.Linear(4, 5000)
net.few = torch.nn.Parameter(torch.ones(3))
net.register_buffer("mask", torch.ones(3))
parts = [net.weight, net.bias, net.few, net.mask]
for part in parts:
    part.data.fill_(1.0)
    part.data.view(-1)[:2] = torch.tensor([0.0, torch.nan])
    if rank == 1:
        part.data.view(torch.int32).view(-1)[:2] |= -(2**31)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
def train(steps, at=0):
    for step in range(1, steps + 1):
        net(torch.ones(1, 4))
        for each in net.parameters():
            each.grad = torch.zeros_like(each)
        if rank == 1 and step == at:
            net.bias.grad[-1] = 1.0
        optimizer.step()
"""


def test_equal_numbers_with_other_bits_raise_no_alarm(kernel: Notebook) -> None:
    """Equal numbers with other bits raise no alarm, as in %dist_diff; another difference does."""
    kernel.run(SIGNED)
    assert "ranks 0-1 agree" in kernel.run("%dist_diff net").text
    alike = "watch: net: 3 parts the same on ranks 0-1, compared after "
    for options, times in (("--every 1", 3), ("--every 9", 1), ("--stop-on-difference", 1)):
        said = kernel.run(f"%%distributed --watch net {options}\ntrain(3)").seen.splitlines()[-1]
        assert said == f"{alike}{times} of 3 steps"
    # After all runs each rank still has its own bits.
    kernel.run("%%distributed -o signs\n[part.view(-1)[:2].signbit().all() for part in parts]")
    (shown,) = kernel.run("[[*map(bool, signs[rank])] for rank in range(2)]").results
    assert shown["text/plain"] == str([[False] * 4, [True] * 4])
    seen = kernel.run("%%distributed --watch net --every 1\ntrain(3, at=2)").seen.splitlines()
    assert "watch: after step 2 rank 1 differs from rank 0" in seen
    assert [each.split()[1] for each in seen if each.startswith("net: ")] == ["bias"]


def test_values_that_cannot_be_watched_are_named(kernel: Notebook) -> None:
    """A value that cannot be watched has a line, if possible before the cell; no hook is left."""
    kernel.run(
        "%%distributed -n 2\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 2)\n"
        "x, mixed = 1, model if rank else 3"
    )
    for options, said in (
        ("--watch x", "`x` is of type int. Name modules and optimizers"),
        ("--watch mixed", "`mixed` is of type int"),
        ("--watch ,", "name modules and optimizers"),
        ("--watch model --every 0", "`--every 0`: give a number of steps"),
        ("--watch model --every x", "`--every x`: give a number of steps"),
        ("--every 3", "go with `--watch`"),
        ("--stop-on-difference", "go with `--watch`"),
        ("--watch model --no-wait", "not with `--no-wait`"),
    ):
        assert said in kernel.run(f"%%distributed {options}\nx = 2").error
    left = (
        "from nbdist.tools import watch_op as watched\nfrom nbdist.worker import tracking\n"
        "x, watched._watches, tracking.step_callbacks"
    )
    left = f"%%distributed\n{left}"
    assert kernel.run(left).text.endswith("(1, [], [])")
    said = kernel.run("%%distributed --watch modle,model\npass").seen
    assert "watch: no step was counted" in said
    assert "`modle` on ranks 0-1 was not compared: NameError: name 'modle' is not" in said
    loop = "for _ in range(3):\n    model(torch.ones(1, 2))\n    nbdist.watch()"
    said = kernel.run(f"%%distributed --watch model --every 2\nimport nbdist\n{loop}").seen
    assert "watch: model: 2 parts " in said
    assert "compared after 2 of 3 steps" in said
    watch()  # which does nothing outside a watched cell


SCRIPTED = """%%distributed -n 2
torch.manual_seed(0)
scripted = torch.jit.script(torch.nn.Linear(2, 2))
model = torch.nn.Sequential(scripted, torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(at=0):
    for step in range(1, 4):
        model(torch.ones(1, 2)).sum().backward()
        if rank == 1 and step == at:
            scripted.bias.grad[0] += 1
        optimizer.step()
        optimizer.zero_grad()
"""


def test_modules_that_take_no_hooks_are_compared(kernel: Notebook) -> None:
    """Scripted modules, which take no hooks, are compared as other modules are."""
    kernel.run(SCRIPTED)
    said = kernel.run("%%distributed --watch scripted,model --every 1\ntrain()").seen
    assert "watch: scripted, model: 6 parts the same on ranks 0-1, compared after 3 of 3 " in said
    shown = kernel.run("%%distributed --watch model --every 1\ntrain(at=2)")
    assert shown.errors == []
    assert "watch: after step 2 rank 1 differs from rank 0" in shown.seen
    assert "model: 0.bias" in shown.seen
    assert kernel.run("%%distributed\ntrain()").text == "2 ranks"


# --- in real workers --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_divergence_is_reported(world: World, kind: str) -> None:
    """The report of each kind of divergence has its step, its parts, and earlier differences."""
    case = case_of(kind, 0)
    assert verdict(case, watched(world, case.source, ["net", "optimizer"], kind)) == ""


SOUND = (
    "DDP, BatchNorm, evaluation beside DDP",
    "DDP, accumulation",
    "FSDP2, AdamW, layers",
    "ZeRO, optimizer sharded",
)


@pytest.mark.parametrize("name", SOUND)
def test_sound_trainings_raise_no_alarm(world: World, name: str) -> None:
    """Values that differ by design are no difference, and parts without comparison are named."""
    found = watched(world, sound_source(name, 1), ["model", "optimizer"], name)
    assert not found.differs, found.head()
    said = found.agreement()
    assert "compared after 7 of 30 steps" in said
    assert ("sharded parts not compared" in said) == name.startswith("FSDP2")
    assert ("`optimizer` on ranks 0-1 was not compared" in said) == name.startswith("ZeRO")


# --- digests ----------------------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A tensor whose digest is made as on a GPU."""

    is_cpu = False


KINDS_OF_TENSORS = (torch.Tensor, OnDevice)


def digest(tensor: torch.Tensor, kind: type[torch.Tensor] = torch.Tensor) -> str:
    """Return the digest of a tensor, as that of a module's buffer."""
    module = torch.nn.Module()
    module.register_buffer("x", tensor.as_subclass(kind))
    return buffers_of(WatchedValue("module", module))["x"].digest


@pytest.mark.parametrize("kind", KINDS_OF_TENSORS)
@given(
    some.integers(1, 3 * ROW_WORDS * 4), some.integers(0), some.integers(0, 7), some.integers(0, 9)
)
def test_a_single_bit_changes_the_digest(
    kind: Any, size: int, place: int, bit: int, offset: int
) -> None:
    """A digest changes with any bit, and equal bytes have equal digests anywhere in memory."""
    data = torch.arange(size + offset, dtype=torch.int64).to(torch.uint8)[offset:]
    before = digest(data, kind)
    assert digest(data.clone(), kind) == before
    data[place % size] ^= 1 << bit
    assert digest(data, kind) != before


@pytest.mark.parametrize("kind", KINDS_OF_TENSORS)
def test_digests_do_not_depend_on_the_layout(kind: Any) -> None:
    """The layout of a tensor does not change its digest; places and signs of its numbers do."""
    table = torch.randn(64, 2 * ROW_WORDS, dtype=torch.float64)
    assert digest(table, kind) == digest(table.T.contiguous().T, kind)
    swapped = table.clone()
    swapped[0, [0, 64]] = table[0, [64, 0]]
    seen = {digest(each, kind) for each in (table, table.flip(0), table.flip(1), -table, swapped)}
    assert len(seen) == 5
    for each in (torch.zeros(0), torch.tensor(1.5), torch.ones(3, dtype=torch.bfloat16),
                 torch.ones(5, dtype=torch.complex64).conj(), torch.tensor([True])):  # fmt: skip
        assert digest(each, kind) == digest(each.clone(), kind)


@pytest.mark.parametrize("kind", KINDS_OF_TENSORS)
@pytest.mark.parametrize("dtype", WIDE)
def test_equal_numbers_have_equal_digests(dtype: torch.dtype, kind: Any) -> None:
    """Digests agree with `%dist_diff` on -0.0 and on the bits of NaN, in every piece."""
    whole = DIGEST_PIECE // WIDE[dtype].itemsize
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        dtype.itemsize // (2 if dtype.is_complex else 1)
    ]
    for size in (3, whole, 2 * whole + 3):
        numbers = torch.ones(size, dtype=dtype)
        places = [0, size // 2]
        for value in (0.0, torch.nan):
            numbers[places] = value
            other = numbers.clone()
            before = digest(numbers, kind)
            assert digest(other, kind) == before
            other.view(bits).view(size, -1)[places] |= torch.iinfo(bits).min
            assert not torch.equal(other.view(bits), numbers.view(bits))
            assert distance(other, numbers).differing == 0
            assert digest(other, kind) == before
            assert sample_digest(other[:3]) == sample_digest(numbers[:3])
            for place in (0, size // 2, size - 1):
                changed = other.clone()
                changed[place] = 2.0
                assert digest(changed, kind) != before


# --- the report -------------------------------------------------------------------------------


def noted(
    digest: str = "1", found: int = 4, steps: int = 6, facts: Iterable[Facts] = (),
    inputs: Iterable[Input] = (), **more: object,
) -> Watched:  # fmt: skip
    parts = {
        "model": {
            "weight": ValueDigest("float32 (2,)", digest),
            "bias": ValueDigest("float32 (1,)", "0"),
        }
    }
    return Watched(steps, 3, found, parts, 0, tuple(facts), tuple(inputs), **more)  # type: ignore[arg-type]


def facts(step: int, state: str = "a", ran: str = "", collectives: int = 0) -> Facts:
    return Facts(step, {"torch": state}, frozenset(ran.split()), collectives)


def told(*ranks: Watched) -> list[str]:
    return [*Divergence(["model"], dict(enumerate(ranks))).facts_before()]


def test_the_head_has_step_and_ranks() -> None:
    """The head has the step, and the ranks that differ from the largest group that agrees."""
    heads = {
        "1 1 2": "after step 4 rank 2 differs from ranks 0-1",
        "1 2 3": "after step 4 ranks 0-2 all differ",
        "1 1 2 3": "after step 4 ranks 2-3 differ from ranks 0-1 and from each other",
        "1 2 2 1": "after step 4 ranks 1-2 differ from ranks 0,3",
    }
    for digests, said in heads.items():
        found = Divergence(["model"], dict(enumerate(map(noted, digests.split()))))
        assert found.head() == f"watch: {said}"
        ((path, kind, _),) = next(found.comparisons()).rows()
        assert (path, kind) == ("weight", "float32 (2,)")


def test_ranks_with_equal_steps_are_compared_at_the_end() -> None:
    """If no step showed a difference, ranks with equally many steps are compared at the end."""
    found = Divergence(["model"], {0: noted(found=0), 1: noted("2", found=0)})
    assert found.head() == "watch: at the end, after step 6 rank 1 differs from rank 0"
    found = Divergence(["model"], {0: noted(found=0), 1: noted("2", found=0, steps=5)})
    assert not found.differs
    assert found.agreement().endswith("3 of 5 steps · rank 0 made 6 steps, rank 1 made 5 steps")
    assert not Divergence(["model"], {}).differs
    late = noted(found=0, problem="RuntimeError: gone")
    assert "rank 1 stopped comparing: RuntimeError: gone" in Divergence(
        ["model"], {0: noted(found=0), 1: late}).agreement()  # fmt: skip


def test_only_differences_that_began_are_reported() -> None:
    """Only facts that were equal until some step are reported, not facts that always differed."""
    first = [facts(2, "a"), facts(4, "a")]
    assert "none of these" in told(noted(facts=first), noted("2", facts=first))[1]
    always = [facts(2, "b"), facts(4, "c")]
    assert "none of these" in told(noted(facts=first), noted("2", facts=always))[1]
    (until, said) = told(noted(facts=first), noted("2", facts=[facts(2, "a"), facts(4, "c")]))
    assert until.startswith("all were equal after step 2; ")
    assert said == "  random state of torch, from step 4 on: rank 1 differs from rank 0"
    # At the first comparison every difference may be the cause.
    first, other = [facts(4, "a")], [facts(4, "b")]
    assert told(noted(facts=first), noted("2", facts=other))[1] == said


def test_likely_causes_are_reported() -> None:
    """A branch of a single rank, a skipped collective, and other data are reported as causes."""
    first = [facts(2, "", "a b", 9), facts(4, "", "a b", 12)]
    branch = [facts(2, "", "a b", 9), facts(4, "", "a", 12)]
    assert told(noted(facts=first), noted("2", facts=branch))[1:] == [
        "  `b` ran forward in step 4 on rank 0 alone"
    ]
    skipped = [facts(2, "", "a b", 9), facts(4, "", "a b", 11)]
    assert told(noted(facts=first), noted("2", facts=skipped))[1:] == [
        "  collectives begun until step 4: rank 0 12, rank 1 11"
    ]
    fewer = [facts(1, "", "", 9), facts(2, "", "", 12), facts(3, "", "", 15), facts(4, "", "", 16)]
    assert told(noted(facts=fewer), noted("2", facts=fewer))[1:] == [
        "  all ranks began fewer collectives: 1 a step in the last 1 step, 3 before"
    ]
    same = [Input(2, 5, "float32 (8,)"), Input(3, 6, "float32 (8,)")]
    other = [Input(2, 5, "float32 (8,)"), Input(3, 7, "float32 (8,)")]
    begin = [facts(2), facts(4)]
    both = noted(facts=begin, inputs=same), noted("2", facts=begin, inputs=other)
    assert told(*both)[1:] == [
        "  the data that forward got, from step 3 on: rank 1 differs from rank 0"
    ]
    short = [Input(2, 5, "float32 (8,)"), Input(3, 7, "float32 (5,)")]
    both = noted(facts=begin, inputs=same), noted("2", facts=begin, inputs=short)
    assert told(*both)[1:] == [
        "  shapes of the data that forward got, from step 3 on: rank 0 float32 (8,), "
        "rank 1 float32 (5,)"
    ]
