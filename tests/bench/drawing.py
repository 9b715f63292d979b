"""Rows of what the notebook itself does with text: taking it in, grouping ranks, drawing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from nbdist.output.ansi import ansi_html
from nbdist.output.events import Done, Text
from nbdist.output.screen import Screen
from nbdist.output.transcript import Transcript
from tests.bench.harness import Figure
from tests.bench.lab import Lab
from tests.output.lab import final_html, live_html

CHUNK = 65_536
PLAIN = "".join(f"step {number} loss 0.{number}\n" for number in range(200_000))
COLOURED = "".join(
    f"\x1b[32mstep\x1b[0m {number} loss \x1b[1m0.{number}\x1b[0m\n" for number in range(50_000)
)
BAR = "".join(f"\rtrain {number}%|####    | {number}/100000" for number in range(100_000))
LONG = "x" * 10_000_000
TEXTS = {
    "200,000 lines taken in": PLAIN,
    "50,000 coloured lines taken in": COLOURED,
    "a line of 10 MB taken in": LONG,
    "100,000 states of a bar taken in": BAR,
    "a bar over a line of 10 MB taken in": LONG + BAR,
}


def draw(lab: Lab) -> Iterator[Figure]:
    """Text into screens, 64 chatty ranks into groups and panels; in this process alone."""
    for what, text in TEXTS.items():
        yield _figure(lab, what, lambda text=text: _take_in(text))  # type: ignore[misc]
    lines = COLOURED.splitlines()[:10_000]
    yield _figure(lab, "10,000 coloured lines to HTML", lambda: [ansi_html(x) for x in lines])
    transcript = _chatty(64)
    yield _figure(lab, "64 ranks of 5,000 lines grouped", lambda: _grouped(transcript))
    yield _figure(lab, "live panel of 64 ranks", lambda: live_html(transcript, 1.0))
    for rank in range(64):
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    yield _figure(lab, "final panel of 64 ranks", lambda: final_html(transcript))


def _figure(lab: Lab, what: str, action: Callable[[], object]) -> Figure:
    values = []
    for _ in range(lab.runs):
        start = time.perf_counter()
        action()
        values.append(1000 * (time.perf_counter() - start))
    return Figure("draw", what, "ms", tuple(values))


def _take_in(text: str) -> None:
    screen = Screen()
    for start in range(0, len(text), CHUNK):
        screen.write("stdout", text[start : start + CHUNK])
    screen.tail(200)


def _chatty(ranks: int) -> Transcript:
    block = "".join(f"step {number} loss 0.{number}\n" for number in range(5_000))
    transcript = Transcript(range(ranks))
    transcript.start(0.0)
    for rank in range(ranks):
        transcript.receive(rank, Text("stdout", f"{block}{rank}\n"), 1.0)
    return transcript


def _grouped(transcript: Transcript) -> object:
    """As in a live cell: every rank has said something since the last time."""
    for rank in range(64):
        transcript.receive(rank, Text("stdout", "more\n"), 2.0)
    return transcript.groups()
