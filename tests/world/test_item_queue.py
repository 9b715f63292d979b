"""Tests of `ItemQueue`: how ranks share the items, and what becomes of items of dead ranks."""

from __future__ import annotations

import random
from itertools import pairwise

from nbdist.output.events import ItemOutcome, ItemsWanted
from nbdist.values.payload import open_payload, pack_frames
from nbdist.values.pickling import frames_of, unpickle
from nbdist.wire.work import InputReply
from nbdist.world.item_queue import CHUNK_SECONDS, GROWTH, ItemQueue


def make_queue(number: int, ranks: int = 4, *, returns_errors: bool = False) -> ItemQueue:
    queue = ItemQueue(range(number), {}, returns_errors=returns_errors, is_elsewhere=False)
    queue.ranks = ranks
    return queue


def outcomes(reply: InputReply) -> tuple[ItemOutcome, ...]:
    """Return the outcomes of the reply's items for a function that returns its item."""
    results = []
    for index, payload in reply.items:
        value = unpickle(open_payload(payload), {})
        results.append(ItemOutcome(index, pack_frames(frames_of(value, {}))[0]))
    return tuple(results)


def test_short_items_come_several_at_a_time_and_long_items_one_by_one() -> None:
    """Answers with short items grow at most by the factor `GROWTH`; the last one has one item."""
    queue = make_queue(1000, 1)
    now, sizes, reply = 0.0, [], queue.answer(0, ItemsWanted(1), 0.0)
    while reply.text is not None:
        sizes.append(len(reply.items))
        now += 1e-5 * len(reply.items)
        reply = queue.answer(0, ItemsWanted(1, outcomes(reply)), now)
    assert sum(sizes) == 1000
    assert all(later <= GROWTH * earlier for earlier, later in pairwise(sizes))
    assert max(sizes) > 100
    assert sizes[-1] == 1

    queue = make_queue(10, 1)
    reply, now = queue.answer(0, ItemsWanted(1), 0.0), 0.0
    while reply.text is not None:
        assert len(reply.items) == 1
        now += 2 * CHUNK_SECONDS
        reply = queue.answer(0, ItemsWanted(1, outcomes(reply)), now)
    assert queue.results == {each: each for each in range(10)}


def test_each_item_is_done_once_whatever_ranks_do() -> None:
    """In 200 random maps with deaths and pauses, each item gets one result or is given up once."""
    for seed in range(200):
        chance = random.Random(seed)
        number, ranks = chance.randrange(60), chance.randrange(1, 6)
        queue = make_queue(number, ranks)
        now, done = 0.0, list[int]()
        while not queue.is_done:
            queue.begin_round()
            replies = {rank: queue.answer(rank, ItemsWanted(0), now) for rank in range(ranks)}
            while any(reply.text is not None for reply in replies.values()):
                rank = chance.choice([r for r, reply in replies.items() if reply.text is not None])
                now += chance.random() * 0.1
                queue.is_paused = chance.random() < 0.1
                if chance.random() < 0.05:
                    queue.lose([rank])
                    replies[rank] = InputReply(0)
                else:
                    request = ItemsWanted(0, outcomes(replies[rank]))
                    replies[rank] = queue.answer(rank, request, now)
                done += queue.pop_new()
            queue.is_paused = False
        assert sorted(done) == [*range(number)], seed
        assert {**queue.results, **queue.gave_up}.keys() == {*range(number)}
        assert not queue.results.keys() & queue.gave_up.keys()
        assert all(value == index for index, value in queue.results.items())


def test_an_item_with_which_two_ranks_died_is_given_up() -> None:
    """An item goes to a second rank if the first rank died with it, and to no third rank."""
    queue = make_queue(1, 3)
    for rank in range(2):
        reply = queue.answer(rank, ItemsWanted(1), 0.0)
        assert [index for index, _ in reply.items] == [0]
        queue.lose([rank])
    assert queue.answer(2, ItemsWanted(1), 0.0).text is None
    assert (queue.is_done, queue.gave_up) == (True, {0: 1})


def test_a_rank_that_sends_early_keeps_its_other_items() -> None:
    """A rank that sends results before it has done all its items gets no new items until then."""
    queue = make_queue(100, 1)
    reply = queue.answer(0, ItemsWanted(1), 0.0)
    while len(reply.items) < 3:
        reply = queue.answer(0, ItemsWanted(1, outcomes(reply)), 0.0)
    first, *others = outcomes(reply)
    early = queue.answer(0, ItemsWanted(1, (first,)), 0.0)
    assert (early.text, early.items) == ("", ())
    after = queue.answer(0, ItemsWanted(1, tuple(others)), 0.0)
    assert after.items[0][0] == others[-1].item + 1
