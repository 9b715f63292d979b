"""Tests of `nbdist.world.replicas`: texts about ranks whose training ended at different steps."""

from __future__ import annotations

from nbdist.output.events import Done, Incomplete
from nbdist.world.replicas import differing_text, incomplete_text, occurring_or_all


def ended(*steps: int, inside: int | None = None) -> dict[int, Done]:
    """Return the ends of ranks after `steps` steps; rank `inside` ended inside its last step."""
    return {
        rank: Done("error", 0.0, steps=number, is_in_step=rank == inside)
        for rank, number in enumerate(steps)
    }


def test_ranks_at_different_steps_are_named() -> None:
    """The text names the ranks, and the commands that show differences or copy the newest state."""
    assert differing_text(ended(42, 42, 41, 42)) == (
        "Replicas may differ: ranks 0-1,3 ended after optimizer step 42, rank 2 after step 41. "
        "`%dist_diff model` shows the differences, `%dist_sync model optimizer --from 0 -r all` "
        "copies from rank 0."
    )
    text = differing_text(ended(1, 2, inside=0), ["net"], ["adam", "sgd"])
    assert text == (
        "Replicas may differ: rank 0 ended inside optimizer step 1, rank 1 after step 2. "
        "`%dist_diff net` shows the differences, `%dist_sync net adam sgd --from 1 -r all` "
        "copies from rank 1."
    )
    assert "rank 0 ended inside optimizer step 3, rank 1" in differing_text(ended(3, 3, inside=0))
    assert "rank 0 ended after optimizer step 0, rank 1" in differing_text(ended(0, 1))


def test_ranks_that_need_no_copy_get_no_text() -> None:
    """Ranks that ended alike, did not train, or train models of their own get no text."""
    for done in (ended(5, 5), ended(0, 0), ended(100, 50), ended(7), ended(0, 7, 7), {}):
        assert differing_text(done) == ""
    inside_step = {rank: Done("error", 0.0, steps=3, is_in_step=True) for rank in range(2)}
    assert differing_text(inside_step)
    # No rank was interrupted: each has raised by itself.
    assert differing_text(inside_step, were_cut=False) == ""


def test_variables_in_the_source_are_preferred() -> None:
    """Only variables that the source names are returned, or all variables if it names none."""
    assert occurring_or_all("model.step()", ["model", "mod"]) == ["model"]
    assert occurring_or_all("train()", ["model", "net"]) == ["model", "net"]


def test_incomplete_variables_are_named_by_rank() -> None:
    """Ranks on which a call has left equal variables incomplete are named together."""

    def end(*parts: tuple[str, str], operation: str = "all_reduce") -> Done:
        return Done("error", 0.0, incomplete=Incomplete(operation, 3, parts))

    assert incomplete_text({0: Done("error", 0.0)}) == ""
    done = {0: Done("ok", 0.0), 1: end(("", "x"), ("gradients", "net")), 2: end(("", "x"))}
    assert incomplete_text(done) == (
        "`x`, gradients of `net` on rank 1 may hold a part of the result (all_reduce, line 3). "
        "`x` on rank 2 may hold a part of the result (all_reduce, line 3)."
    )
    done = {each: end(("a tensor of the call", ""), operation="wait") for each in (0, 2)}
    assert incomplete_text(done) == (
        "A tensor of the call on ranks 0,2 may hold a part of the result (wait, line 3)."
    )
