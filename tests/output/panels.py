"""Panels as files to look at, each as HTML and as text, made from transcripts by the real code.

`python -m tests.output.panels --write` writes all of them again into `tests/output/panels/`;
without `--write` it names those that would change.  A browser shows the HTML as it is.
"""

from __future__ import annotations

import argparse
import math
import re
import struct
import sys
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tqdm.std import tqdm

from nbdist.output.events import (
    IGNORES_STOP,
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    Output,
    Skipped,
    Tracked,
    Typed,
)
from nbdist.output.html import panel_html
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.mimes import WIDGET
from nbdist.output.panel import Panel
from nbdist.output.tabs import final_tabs, live_by_rank
from nbdist.output.text import panel_text
from nbdist.output.transcript import Transcript
from tests.output.lab import err, lines, make, nested_bars, out, running, value

FOLDER = Path(__file__).with_name("panels")
LOGS = {rank: f"logs/rank{rank}.log" for rank in range(64)}
LIVE = 12.3  # seconds since a running cell began

_MADE: dict[str, Callable[[], Panel]] = {}


def panel(make_one: Callable[[], Panel]) -> Callable[[], Panel]:
    """Register a function that makes the panel of its name."""
    _MADE[f"{len(_MADE) + 1:02}-{make_one.__name__.replace('_', '-')}"] = make_one
    return make_one


def files() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all files."""
    for name, make_one in _MADE.items():
        shown = make_one()
        yield f"{name}.txt", f"{panel_text(shown)}\n"
        yield f"{name}.html", in_lines(panel_html(shown))


def in_lines(html: str) -> str:
    """Begin a line after the end of each block; a browser shows the same page as before."""
    broken = re.sub(r"(</(?:div|details|summary|tr|table|pre)>)(?!\n)", "\\1\n", html)
    return f"{broken.rstrip()}\n"


def own_markup(html: str) -> str:
    """Return a panel without the markup of the ranks' own tables and HTML."""
    return re.sub(r"<table border=.*?</table>|</?[bi]>", "", html, flags=re.DOTALL)


# --- outputs of ranks ---------------------------------------------------------------------------


def meter(done: int, total: int, seconds: float, name: str, **options: object) -> str:
    """Return tqdm's text for a step, which replaces the text of the step before."""
    return "\r" + tqdm.format_meter(done, total, seconds, prefix=name, ncols=70, **options)


def training(rank: int, steps: int, epochs: int = 1, pace: float = 0.02) -> list[Output]:
    """The commonest loop: a bar with the loss as its postfix, and a print every 20 steps."""
    total = 60
    said: list[Output] = []
    for epoch in range(epochs):
        for step in range(total if epoch < epochs - 1 else steps):
            loss = f"loss={1 / (1 + step + 60 * epoch) + rank / 100:.3f}"
            seconds = (step + 1) * (pace + rank / 10_000)
            said.append(err(meter(step + 1, total, seconds, f"epoch {epoch}", postfix=loss)))
            if step % 20 == 0:
                said.append(out(f"epoch {epoch} step {step} {loss.replace('=', ' ')}\n"))
        if len(said) and (epoch < epochs - 1 or steps == total):
            said.append(err("\n"))
    return said


RED, CYAN, GREEN = "\x1b[31m{}\x1b[39m", "\x1b[36m{}\x1b[39m", "\x1b[32m{}\x1b[39m"


def frame(place: str, source: Sequence[str], line: int) -> str:
    """The lines of a call in a traceback, as IPython colours them."""
    rows = [CYAN.format(place)]
    for number, text in enumerate(source, 1):
        arrow = "----> " if number == line else "      "
        rows.append(f"{GREEN.format(f'{arrow}{number}')} {text}")
    return "\n".join([*rows, ""])


def raised(
    name: str,
    message: str,
    source: Sequence[str],
    line: int,
    time_ns: int = 1,
    between: Iterable[str] = (),
    **about: object,
) -> Failure:
    """Return an exception in a line of a cell, with the calls `between` below that line."""
    head = f"{RED.format(name)}{' ' * max(1, 42 - len(name))}Traceback (most recent call last)"
    cell = frame(f"Cell In[4], line {line}", source, line)
    last = f"{RED.format(name)}: {message}" if message else RED.format(name)
    frames = (RED.format("-" * 75), head, cell, *between, last)
    return Failure(name, message, frames, time_ns, **about)  # type: ignore[arg-type]


TRAIN = (
    "for batch in loader:",
    "    loss = model(batch)",
    "    loss.backward()",
    "    dist.all_reduce(loss)",
)


def bad_shard(rank: int, time_ns: int = 1) -> Failure:
    return raised("ValueError", f"bad shard {rank}", TRAIN, 2, time_ns)


def released(time_ns: int = 9) -> Failure:
    said = "waited in all_reduce (cell line 4)"
    return Failure("Released", said, (f"Released: {said}",), time_ns, (), "ended")


def stopped(line: int = 3) -> Failure:
    return raised("KeyboardInterrupt", "", TRAIN, line, line)


def library_calls(count: int) -> list[str]:
    place = "File /env/lib/python3.11/site-packages/torch/nn/modules/module.py:{}, in Module._call"
    return [frame(place.format(1700 + n), ("return forward(*args)",), 1) for n in range(count)]


def picture(rank: int) -> Display:
    """Return a small figure of two colours, uncompressed so that every zlib makes equal bytes."""
    size, rows = (32, 20), []
    for y in range(size[1]):
        level = 10 + 8 * math.sin(y / 3 + rank)
        bits = "".join("1" if x < level + rank else "0" for x in range(size[0]))
        rows.append(b"\0" + int(bits, 2).to_bytes(size[0] // 8, "big"))
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", *size, 1, 3, 0, 0, 0),
        b"PLTE": bytes((255, 255, 255, 31, 119, 180)),
        b"IDAT": zlib.compress(b"".join(rows), 0),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in parts.items():
        png += struct.pack(">I", len(data)) + kind + data
        png += struct.pack(">I", zlib.crc32(kind + data))
    data = {
        "image/png": b64encode(png).decode(),
        "text/plain": "<Figure size 320x200 with 1 Axes>",
    }
    return Display(data, {"image/png": {"width": 320, "height": 200}})


def frame_of(rank: int) -> Display:
    """A table, as pandas displays it."""
    rows = [(0, 2.3 + rank, 0.41), (1, 1.1, 0.87)]
    cells = "".join(
        f"<tr><th>{at}</th><td>{loss}</td><td>{right}</td></tr>" for at, loss, right in rows
    )
    head = "<thead><tr><th></th><th>loss</th><th>accuracy</th></tr></thead>"
    html = f'<table border="1" class="dataframe">{head}<tbody>{cells}</tbody></table>'
    plain = "\n".join(
        ["   loss  accuracy", *(f"{at}   {loss}      {right}" for at, loss, right in rows)]
    )
    return Display({"text/html": html, "text/plain": plain}, {}, is_result=True)


def slider(rank: int) -> Display:
    data = {WIDGET: {"model_id": f"m{rank}"}, "text/plain": f"IntSlider(value={rank})"}
    return Display(data, {})


def markdown(text: str) -> Display:
    return Display(
        {"text/markdown": text, "text/plain": "<IPython.core.display.Markdown object>"}, {}
    )


def with_curves(
    transcript: Transcript, steps: int, value_at: Callable[[int, int], float], name: str = "loss"
) -> Transcript:
    """Add a curve of each rank."""
    for rank in transcript.ranks:
        points: list[float] = []
        for step in range(steps):
            number = value_at(rank, step)
            is_odd = not math.isfinite(number)
            points += [step, int(not is_odd), *[0.0 if is_odd else number] * 3, int(is_odd)]
        said = Tracked({name: tuple(points)}, {})
        transcript.curves.add(rank, "task", said, len(transcript.ranks))
    return transcript


def falling(rank: int, step: int) -> float:
    """Return a falling loss, from which rank 2 moves away after step 50."""
    wave = 0.05 * math.sin(step * 1.7 + rank) + rank / 50
    return 2.3 * math.exp(-step / 25) + wave + (rank == 2) * max(0, step - 50) / 60


# --- panels: values and prints ------------------------------------------------------------------


@panel
def silent() -> Panel:
    return final_layout(make(4, lambda rank: []), LOGS)


@panel
def values_equal() -> Panel:
    return final_layout(make(4, lambda rank: [value("tensor(10.)")]), LOGS)


@panel
def values_that_differ() -> Panel:
    return final_layout(make(4, lambda rank: [value(f"'cuda:{rank}'")]), LOGS)


@panel
def prints_equal() -> Panel:
    return final_layout(
        make(4, lambda rank: [out("loading data\nmodel: 1.2 M parameters\n")]), LOGS
    )


@panel
def prints_with_other_numbers() -> Panel:
    def said(rank: int) -> list[Output]:
        return [out("".join(f"epoch {epoch} loss 0.{9 - epoch}{rank}\n" for epoch in range(3)))]

    return final_layout(make(4, said), LOGS)


@panel
def many_prints_with_other_numbers() -> Panel:
    def said(rank: int) -> list[Output]:
        return [out("".join(f"step {s} loss {1 / (s + 1) + rank / 100:.3f}\n" for s in range(12)))]

    return final_layout(make(4, said), LOGS)


@panel
def prints_that_differ() -> Panel:
    said = {
        0: "reading train.csv\n12,254 rows\n",
        1: "reading valid.csv\nno header: took the first row\n3,001 rows\n",
        2: "",
        3: "reading train.csv\nthe file is empty\n",
    }
    return final_layout(make(4, lambda rank: [out(said[rank])] if said[rank] else []), LOGS)


@panel
def one_rank() -> Panel:
    return final_layout(make(1, lambda rank: [out("hello\n"), value("{'loss': 0.25}")]), LOGS)


@panel
def sixteen_ranks() -> Panel:
    def said(rank: int) -> list[Output]:
        return [out(f"rank {rank} on node{rank // 8}\nloss {0.5 + rank / 100:.2f}\n")]

    return final_layout(make(16, said, seconds=lambda rank: 1.2 if rank == 5 else 0.4), LOGS)


@panel
def sixty_four_ranks() -> Panel:
    def said(rank: int) -> list[Output]:
        more = "disk is almost full\n" if rank == 40 else ""
        return [out(f"epoch 0 loss {2.3 - rank / 900:.3f} on cuda:{rank % 8}\n{more}")]

    return final_layout(make(64, said), LOGS)


@panel
def sixty_four_ranks_with_output_of_their_own() -> Panel:
    words = ("alpha", "beta", "gamma", "delta")

    def said(rank: int) -> list[Output]:
        return [out(f"{words[rank % 4] * (1 + rank // 4)} {'x' * 50}\n")]

    return final_layout(make(64, said), LOGS)


@panel
def long_lines() -> Panel:
    def said(rank: int) -> list[Output]:
        weights = " ".join(f"{number % 97 / 97:.3f}" for number in range(300))
        return [out(f"weights {weights} END\n"), out(f"{'a' * 300}\nthe last line\n")]

    return final_layout(make(2, said), LOGS)


@panel
def flood() -> Panel:
    said = [lines(9_000, "step "), Skipped(50_000, 1_200), lines(150, "late step ")]
    return final_layout(make(2, lambda rank: said), LOGS)


@panel
def unicode_text() -> Panel:
    text = "λ = 0.1 → größer · 学習率 0.1\n🚀 emoji, e\u0301 combined, עברית, \ud800 half\n"
    return final_layout(make(2, lambda rank: [out(f"{text}\ttab\x07bell\n")]), LOGS)


@panel
def colours() -> Panel:
    text = (
        "\x1b[31mred\x1b[0m \x1b[1;32mbold green\x1b[0m \x1b[38;5;208morange\x1b[0m "
        "\x1b[48;2;40;40;120m\x1b[97mwhite on blue\x1b[0m \x1b[4munderlined\x1b[0m "
        "\x1b[7mreversed\x1b[0m \x1b[90mgrey\x1b[0m \x1b[3mitalic\x1b[0m\n"
    )
    return final_layout(make(2, lambda rank: [out(text + "plain\n")]), LOGS)


@panel
def markup_in_text() -> Panel:
    said = out("<b>not bold</b> & </div></details><script>alert(1)</script>\n")
    return final_layout(make(2, lambda rank: [said]), LOGS)


# --- panels: bars -------------------------------------------------------------------------------


@panel
def bars_live() -> Panel:
    def said(rank: int) -> list[Output]:
        is_slow = rank == 3
        steps = training(rank, 50 - 20 * is_slow, pace=0.4 if is_slow else 0.24)
        return [out("loading shards\n"), *steps]

    now = running(4, said)
    return live_layout(now, LIVE, "", "cpu 1.9-2.1 GiB · gpu 61/80 GiB · 97 %", "17:33:05")


@panel
def bars_final() -> Panel:
    return final_layout(
        make(4, lambda rank: [err(meter(63, 63, 1.05 + rank / 50, "train") + "\n")]), LOGS
    )


@panel
def bars_and_prints_live() -> Panel:
    return live_layout(running(4, lambda rank: training(rank, 47 - rank)), LIVE)


@panel
def bars_and_prints_final() -> Panel:
    return final_layout(make(4, lambda rank: training(rank, 60, epochs=2)), LOGS)


@panel
def nested_bars_live() -> Panel:
    steps = {rank: nested_bars(3 - rank // 3, 6)[-3 - rank] for rank in range(4)}
    return live_layout(running(4, lambda rank: [err(_timeless(steps[rank]))]), LIVE)


@panel
def nested_bars_final() -> Panel:
    """The inner bar has `leave=False`."""
    return final_layout(make(4, lambda rank: [err(_timeless(nested_bars()[-1]))]), LOGS)


def _timeless(written: str) -> str:
    """Return a text with fixed times in the place of the times that tqdm has measured."""
    written = re.sub(r"\d\d:\d\d<(?:\d\d:\d\d|\?)", "00:08<00:04", written)
    return re.sub(r"\s*(?:[\d.]+|\?)\s?(?:it/s|s/it)", " 5.80it/s", written)


@panel
def bars_of_rich() -> Panel:
    def said(rank: int) -> list[Output]:
        drawn = "━" * (20 + rank) + "╸" + " " * (19 - rank)
        row = f"\r\x1b[2Ktrain \x1b[38;2;249;38;114m{drawn}\x1b[0m"
        return [out(f"{row} \x1b[35m{50 + 2 * rank}%\x1b[0m \x1b[36m0:00:0{9 - rank}\x1b[0m")]

    return live_layout(running(4, said), LIVE)


@panel
def bars_of_keras() -> Panel:
    row = "\r1875/1875 [==============================] - 3s 2ms/step - loss: 0.2{}"
    return final_layout(make(2, lambda rank: [out("Epoch 1/1\n" + row.format(rank) + "\n")]), LOGS)


@panel
def bars_of_64_ranks_live() -> Panel:
    def said(rank: int) -> list[Output]:
        return [err(meter(40 + rank % 17, 100, 8.0, "train", postfix=f"loss=0.{rank:02}"))]

    return live_layout(running(64, said), LIVE)


@panel
def bars_with_a_long_postfix() -> Panel:
    postfix = ", ".join(
        f"{name}=0.{at}234" for at, name in enumerate(("loss", "grad_norm", "acc", "lr"))
    )

    def said(rank: int) -> list[Output]:
        bar = tqdm.format_meter(
            90 - 40 * (rank == 1), 100, 8.0, prefix="a rather long name of a bar", postfix=postfix
        )
        return [err(f"\r{bar}")]

    return live_layout(running(4, said), LIVE)


# --- panels: errors -----------------------------------------------------------------------------


@panel
def error_of_all() -> Panel:
    return final_layout(
        make(
            4,
            lambda rank: [
                out("epoch 0\n"),
                raised(
                    "NameError", "name 'batches' is not defined", ("model(batches)",), 1, rank + 1
                ),
            ],
        ),
        LOGS,
    )


@panel
def error_of_all_with_other_numbers() -> Panel:
    return final_layout(make(4, lambda rank: [bad_shard(rank, rank + 1)]), LOGS)


@panel
def error_of_one() -> Panel:
    said = {2: [out("shard 2 of 4\n"), bad_shard(2)]}
    ended = make(4, lambda rank: said.get(rank, [out(f"shard {rank} of 4\n"), released()]))
    return final_layout(ended, LOGS)


@panel
def error_of_some() -> Panel:
    said = {
        1: [raised("OSError", "[Errno 28] No space left on device", TRAIN, 1, 5)],
        3: [bad_shard(3, 2)],
    }
    return final_layout(make(4, lambda rank: said.get(rank, [out("done\n")])), LOGS)


@panel
def error_in_a_library() -> Panel:
    source = ("out = model(torch.randn(2, 5))", "dist.barrier()")
    message = "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)"
    wrong = raised("RuntimeError", message, source, 1, 1, library_calls(6))
    return final_layout(make(4, lambda rank: [wrong] if rank == 2 else [released()]), LOGS)


@panel
def error_live() -> Panel:
    said = {2: [out("shard 2\n"), bad_shard(2)]}
    now = running(4, lambda rank: said.get(rank, [out(f"shard {rank}\n")]))
    note = "ranks 0-1,3 wait in all_reduce, line 4"
    return live_layout(now, LIVE, note)


@panel
def error_of_64_ranks() -> Panel:
    said = {17: [out("step 3\n"), bad_shard(17)]}
    return final_layout(make(64, lambda rank: said.get(rank, [out("step 3\n"), released()])), LOGS)


@panel
def exception_group() -> Panel:
    source = ("async with asyncio.TaskGroup() as group:", "    group.create_task(read(rank))")
    tree = "\n".join(
        [
            "  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)",
            "  +-+---------------- 1 ----------------",
            "    | ValueError: bad shard",
            "    +---------------- 2 ----------------",
            "    | TimeoutError: no answer of the store",
            "    +------------------------------------",
        ]
    )
    message = "unhandled errors in a TaskGroup (2 sub-exceptions)"
    return final_layout(
        make(4, lambda rank: [raised("ExceptionGroup", message, source, 1, rank + 1, [tree])]), LOGS
    )


@panel
def out_of_memory() -> Panel:
    account = (
        "rank 1: 78.9 of 79.2 GiB used on GPU 1",
        "Largest tensors, by variable: model 52.1 GiB · optimizer 20.4 GiB",
    )
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    full = raised("OutOfMemoryError", message, TRAIN, 2, account=account)
    return final_layout(make(2, lambda rank: [full] if rank else [released()]), LOGS)


@panel
def stopped_everywhere() -> Panel:
    return final_layout(make(4, lambda rank: [out(f"step {90 + rank}\n"), stopped()]), LOGS)


@panel
def stopped_in_other_lines() -> Panel:
    return final_layout(make(4, lambda rank: [stopped(3 + (rank == 2))]), LOGS)


@panel
def died() -> Panel:
    said: dict[int, list[Output]] = {
        1: [out("epoch 0\n"), Died(-9, 1, 4711, ("epoch 0",))],
        3: [out("epoch 0\n"), Died(3, 8, 4713, ("epoch 0", "exit(3)"))],
    }
    return final_layout(make(4, lambda rank: said.get(rank, [out("epoch 0\n"), released()])), LOGS)


@panel
def ignored_stop() -> Panel:
    said: dict[int, list[Output]] = {1: [out("busy\n"), Died(-9, 5, 4711, (), IGNORES_STOP)]}
    return final_layout(make(2, lambda rank: said.get(rank, [out("busy\n"), stopped()])), LOGS)


@panel
def not_stopped() -> Panel:
    """Two ranks still run when the notebook has given up."""
    transcript = running(4, lambda rank: [out(f"step {rank}\n")])
    for rank in (0, 3):
        transcript.receive(rank, stopped(), 2.0)
        transcript.receive(rank, Done("error", 2.0), 2.0)
    note = "Ranks 1-2 did not stop within 5 s: Stop again, or `%dist_kill`"
    return final_layout(transcript, LOGS, note, LIVE)


@panel
def deadlock_live() -> Panel:
    note = (
        "ranks 1-3 are in barrier (line 2), rank 0 in all_reduce (line 3): these calls do not match"
        " and would wait forever"
    )
    return live_layout(running(4, lambda rank: [out("before\n")]), LIVE, note)


@panel
def deadlock_final() -> Panel:
    def said(rank: int) -> list[Output]:
        where = "all_reduce (cell line 3)" if rank == 0 else "barrier (cell line 2)"
        text = f"waited in {where}"
        return [
            out("before\n"),
            Failure("Released", text, (f"Released: {text}",), rank + 1, (), "ended"),
        ]

    return final_layout(make(4, said), LOGS)


# --- panels: displays ---------------------------------------------------------------------------


@panel
def figures() -> Panel:
    return final_layout(make(4, lambda rank: [out(f"loss of rank {rank}\n"), picture(rank)]), LOGS)


@panel
def figures_of_eight() -> Panel:
    return final_layout(make(8, lambda rank: [picture(rank)]), LOGS)


@panel
def figures_live() -> Panel:
    return live_layout(running(4, lambda rank: [picture(rank), out(f"step {rank}\n")]), LIVE)


@panel
def figure_that_is_equal() -> Panel:
    return final_layout(make(4, lambda rank: [picture(0)]), LOGS)


@panel
def tables() -> Panel:
    return final_layout(make(4, lambda rank: [frame_of(rank)]), LOGS)


@panel
def widgets() -> Panel:
    return final_layout(make(2, lambda rank: [out(f"lr of rank {rank}\n"), slider(rank)]), LOGS)


@panel
def markdown_and_html() -> Panel:
    html = Display({"text/html": "<b>bold</b> and <i>italic</i>", "text/plain": "<HTML>"}, {})
    said = [out("before\n"), html, markdown("**done**"), out("after\n")]
    return final_layout(make(2, lambda rank: said), LOGS)


@panel
def curves_live() -> Panel:
    return live_layout(with_curves(running(4, lambda rank: []), 70, falling), LIVE)


@panel
def curves_final() -> Panel:
    transcript = with_curves(make(4, lambda rank: [out("done\n")]), 100, falling)
    lr = lambda rank, step: 0.1 * 0.99**step  # noqa: E731
    return final_layout(with_curves(transcript, 100, lr, "lr"), LOGS)


@panel
def curves_with_nan() -> Panel:
    def value_at(rank: int, step: int) -> float:
        return math.nan if rank == 1 and step > 40 else falling(0, step)

    return final_layout(with_curves(make(4, lambda rank: []), 60, value_at), LOGS)


# --- panels: lines beside the output of ranks ---------------------------------------------------


@panel
def watch() -> Panel:
    transcript = make(4, lambda rank: [out("done\n")])
    transcript.warn("watch: after step 50 rank 2 differs from ranks 0-1,3: model.fc.weight")
    return final_layout(transcript, LOGS)


@panel
def warnings_on_stderr() -> Panel:
    def said(rank: int) -> list[Output]:
        text = "Cell In[4], line 4: UserWarning: this shard is small\n  warnings.warn(text)\n"
        return [out(f"loss {2 - rank / 10:.2f}\n"), *([err(text)] if rank == 3 else [])]

    return final_layout(make(4, said), LOGS)


@panel
def logging() -> Panel:
    def said(rank: int) -> list[Output]:
        rows = ("INFO train: 60 steps", "WARNING train: lr is high", "INFO train: done")
        return [
            err(
                "".join(
                    f"2026-11-28 10:11:1{at},{254 + rank} {row}\n" for at, row in enumerate(rows)
                )
            )
        ]

    return final_layout(make(4, said), LOGS)


@panel
def pool() -> Panel:
    shown = final_layout(make(2, lambda rank: [out("ready\n")]), LOGS)
    return shown._replace(ranks=f"pool trainer · {shown.ranks}")


@panel
def pool_live() -> Panel:
    shown = live_layout(running(2, lambda rank: [out("ready\n")]), LIVE, "2 workers on 2 CPU cores")
    return shown._replace(ranks=f"pool trainer · {shown.ranks}")


@panel
def input_live() -> Panel:
    def said(rank: int) -> list[Output]:
        asked: list[Output] = [out("which shard?\n"), InputRequest(1, "name: ")]
        return asked if rank < 2 else [out("waiting for the others\n")]

    note = "Waiting for your input on ranks 0-1, one at a time"
    return live_layout(running(3, said), LIVE, note, turn=0)


@panel
def input_typed() -> Panel:
    said: list[Output] = [InputRequest(1, "name: "), Typed("train"), out("took train\n")]
    return final_layout(make(2, lambda rank: said), LOGS)


@panel
def sixteen_ranks_live() -> Panel:
    return live_layout(running(16, lambda rank: [lines(4 + rank % 2, f"rank {rank} step ")]), LIVE)


@panel
def sixty_four_ranks_live() -> Panel:
    said = {9: [out("step 2\n"), bad_shard(9)]}
    steps = lambda rank: [out(f"step {2 + rank % 5}\n")]  # noqa: E731
    return live_layout(running(64, lambda rank: said.get(rank, steps(rank))), LIVE)


# --- panels: tabs -------------------------------------------------------------------------------


@panel
def tabs() -> Panel:
    def said(rank: int) -> list[Output]:
        own = [*training(rank, 60, epochs=2), picture(rank)]
        return [*own, bad_shard(2)] if rank == 2 else own

    return in_tabs(make(4, said))


@panel
def tabs_live() -> Panel:
    now = running(4, lambda rank: training(rank, 47 - rank))
    return live_by_rank(live_layout(now, LIVE), now)


@panel
def tabs_of_24_ranks() -> Panel:
    return in_tabs(make(24, lambda rank: [lines(3, f"rank {rank} ")]))


def in_tabs(transcript: Transcript) -> Panel:
    return final_tabs(final_layout(transcript, LOGS), transcript, LOGS, "nbdist-7")


def made() -> dict[str, bytes]:
    """Return all files as the present code makes them, by name."""
    return {name: text.encode("utf-8", "backslashreplace") for name, text in files()}


def there() -> dict[str, bytes]:
    """Return the files in the folder, by name."""
    return {each.name: each.read_bytes() for each in FOLDER.glob("*.*")}


def changed(new: Mapping[str, bytes], old: Mapping[str, bytes]) -> list[str]:
    """Return the sorted names of files that differ, or that only one side has."""
    return sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))


def main(arguments: Sequence[str]) -> int:
    """Write the files that have changed, or name them and return 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.output.panels", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write all files again")
    is_to_write = parser.parse_args(arguments).write
    new = made()
    names = changed(new, there())
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        sys.stdout.write(f"{name}\n")
        if is_to_write and name in new:
            (FOLDER / name).write_bytes(new[name])
        elif is_to_write:
            (FOLDER / name).unlink()
    return bool(names) and not is_to_write


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
