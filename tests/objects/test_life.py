"""Memory is freed on both sides when the notebook or the ranks drop objects that were sent."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook
from tests.objects.programs import Run, gives, here, hinting, ranks

pytestmark = [pytest.mark.shared_world, pytest.mark.kernel]
NEW_WORKERS = True

COUNT = """
import gc
def count(size):
    gc.collect()
    return sum(isinstance(each, torch.Tensor) and each.numel() == size for each in gc.get_objects())
def lists(size):
    gc.collect()
    return sum(type(each) is list and len(each) == size for each in gc.get_objects())
"""


def seen(two: Notebook, expression: str) -> tuple[int, list[int]]:
    """Evaluate an expression in the notebook and on the ranks."""
    outcome = two.run(f"%%distributed -o seen\n{COUNT}\n{expression}")
    assert outcome.errors == [], outcome.seen
    there = two.value("[seen[rank] for rank in sorted(dict(seen.items()))]")
    return two.value(expression), there


def test_a_model_made_again_leaves_no_copy(two: Notebook, program: Run) -> None:
    """No tensor is left after many rounds of making, training and deleting a model."""
    program([here(COUNT)])
    for _ in range(8):
        program([
            here("model = net(1237); optimizer = sgd(model)"),
            hinting(ranks("model(torch.ones(1, 1237)).sum().backward(); optimizer.step()")),
            here("del model, optimizer"),
        ])  # fmt: skip
    program([here("model = optimizer = None"), hinting(ranks("model, optimizer"))])
    assert seen(two, "count(1237)") == (0, [0, 0])


def test_only_the_last_value_of_a_name_is_kept(two: Notebook, program: Run) -> None:
    """Each side has at most the last of the tensors that the notebook binds to one name."""
    program([here(COUNT)])
    for number in range(8):
        program([here(f"t = torch.full((1239,), {number}.)"), gives("t[0].item()", number)])
    here_, there = seen(two, "count(1239)")
    assert here_ == 1
    assert max(there) <= 1


def test_lists_are_dropped_with_their_variable(two: Notebook, program: Run) -> None:
    """A list, to which Python cannot refer weakly, is dropped with the variable that reached it."""
    program([here(COUNT)])
    for number in range(8):
        program([
            here(f"d = {{'l': [{number}] * 1231}}"),
            gives("d['l'][0]", number),
            here("d['l'] = [5] * 1231"),
            gives("d['l'][0]", 5),
        ])  # fmt: skip
    here_, there = seen(two, "lists(1231)")
    assert here_ <= 2
    assert max(there) <= 2
    program([here("d = None"), gives("d", None)])
    assert seen(two, "lists(1231)") == (0, [0, 0])


def test_ranks_free_batches_that_the_notebook_keeps(two: Notebook, program: Run) -> None:
    """A rank frees batches that came in lists, unless the rank has changed the batches."""
    program([here(COUNT), here("data = [torch.zeros(1247) for _ in range(8)]")])
    for number in range(8):
        program([here(f"batch = [data[{number}]]"), gives("batch[0][0].item()", 0.0)])
    program([ranks("batch[0].fill_(7.)"), here("batch = None"), hinting(gives("batch", None))])
    assert seen(two, "count(1247)") == (8, [1, 1])
    program([here("again = (data[7],)"), gives("again[0][0].item()", 7.0)])
    program([here("del data, again"), ranks("pass")])


def test_ranks_free_what_the_notebook_deletes(two: Notebook, program: Run) -> None:
    """The memory of a deleted variable is free on the ranks too, if only the notebook made it."""
    program([here(COUNT), here("t = torch.zeros(1241)"), ranks("print(t.sum())"), here("del t")])
    program([ranks("pass")])
    assert seen(two, "count(1241)") == (0, [0, 0])


def test_a_name_deleted_by_a_magic_is_unbound_on_ranks(two: Notebook, program: Run) -> None:
    """A variable that a magic or a call deletes hides no builtin on the ranks any more."""
    for deletes in ("%xdel list", "%reset_selective -f ^list$", "globals().pop('list');"):
        program([here("list = [1, 2]"), gives("list", [1, 2]), here(deletes)])
        program([gives("list(range(2))", [0, 1])])


def test_a_tensor_deleted_on_ranks_is_sent_again(two: Notebook, program: Run) -> None:
    """A tensor that the ranks delete is freed on the ranks, and is sent again for another use."""
    program([here(COUNT), here("t = torch.zeros(1243)"), ranks("print(t.sum()); del t")])
    assert seen(two, "count(1243)") == (1, [0, 0])
    program([here("u = [t]"), gives("u[0].numel()", 1243)])


def test_ranks_keep_what_the_notebook_deletes(two: Notebook, program: Run) -> None:
    """A model that the ranks still hold keeps its training after the notebook deletes the model."""
    program([
        here("model = net(); optimizer = sgd(model)"),
        ranks("kept = model, optimizer; print(train(model, optimizer))"),
        here("del model, optimizer"),
        gives("train(*kept)", 0.004),
    ])  # fmt: skip


def test_objects_are_sent_again_after_a_restart(two: Notebook, program: Run) -> None:
    """New workers get the notebook's objects, linked, and then the notebook's changes."""
    program([
        here("a = [1]; b = {'a': a}"),
        ranks("a.append(2); print(b)"),
        here("%dist_restart"),
        gives("a, b['a'] is a", ([1], True)),
        here("a.append(3)"),
        gives("b, b['a'] is a", ({"a": [1, 3]}, True)),
    ])  # fmt: skip
