"""Tests of `nbdist.output.fingerprint`: which outputs of two ranks count as alike."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from tqdm.std import tqdm

from nbdist.output.events import Died, Failure
from nbdist.output.fingerprint import (
    Bar,
    end_of_bar,
    error_keys,
    key_of,
    normal,
    read_bar,
    read_row,
)
from nbdist.output.screen import Screen
from tests.output.lab import failure


def test_alike_texts_may_differ_in_addresses_and_devices() -> None:
    """Texts that differ only in addresses, devices or processes are alike, but not the same."""
    for one, other in (
        ("<M at 0x7fa000>", "<M at 0x7fb111>"),
        ("on cuda:0", "on cuda:7"),
        ("GPU 0 has", "GPU 1 has"),
        ("(pid=4000)", "(pid=4001)"),
        ("process 17", "process 18"),
        ("node:12:34 [0] NCCL INFO", "node:15:36 [1] NCCL INFO"),
    ):
        assert normal(one) == normal(other)
        assert key_of(one).alike == key_of(other).alike
        assert key_of(one).same != key_of(other).same
    # Texts that differ in any other number are not alike.
    for one, other in (("rank 0", "rank 1"), ("0xg", "0xh"), ("cudas:0", "cudas:1"), ("1", "2")):
        assert normal(one) != normal(other)


def group(message: str, errors: int) -> Failure:
    """An exception group, whose errors are rows of its traceback."""
    said = f"two of them ({errors} sub-exceptions)"
    place = "  |   Cell In[1], line 3"
    rows = (place, f"  | ExceptionGroup: {said}", "  +-+--- 1 ---", f"    | ValueError: {message}")
    return Failure("ExceptionGroup", said, rows, 1)


def test_errors_are_alike_but_for_rank_numbers() -> None:
    """Errors of ranks 3 and 5 are alike if they differ only in the rank's own number."""
    for one, other, alike in (
        (failure("rank 3 is bad"), failure("rank 5 is bad"), True),
        (failure("5 shards"), failure("5 shards"), True),
        (failure("17 shards"), failure("18 shards"), False),
        (failure("bad"), failure("bad", line=3), False),
        (failure("bad"), failure("bad", name="KeyError"), False),
        (group("rank 3 is bad", 2), group("rank 5 is bad", 2), True),
        (group("rank 3 is bad", 3), group("rank 5 is bad", 3), True),
        (group("rank 3 is bad", 3), group("rank 5 is bad", 5), False),
        (group("17 shards", 2), group("18 shards", 2), False),
        (Died(-9, 1), Died(-9, 2), True),
        (Died(-9, 1), Died(1, 1), False),
        (None, None, True),
        (None, Died(1, 1), False),
    ):
        assert (not set(error_keys(3, one)).isdisjoint(error_keys(5, other))) is alike


@pytest.mark.parametrize(
    ("row", "printed"),
    [
        ("a: 32%|###  | 20/63 [00:03<00:06, 6.8it/s, loss=0.6]step [20]", "step [20]"),
        ("a: 32%|###  | 20/63 [00:03<00:06, 6.8it/s, loss=[0.6, 0.1]]  x", "  x"),
        ("10it [00:03, 9.5it/s]done", "done"),
        ("a: 32%|###  | 20/63 [00:03<00:06, 6.8it/s]   ", ""),
        ("see [1] at [00:03] 5/5", ""),
    ],
)
def test_printed_text_begins_behind_the_bracket_of_tqdm(row: str, printed: str) -> None:
    """Text printed behind a bar begins where tqdm's bracket ends, whatever the bracket contains."""
    end = end_of_bar(row)
    assert row[end:] == (printed or row)
    assert bool(printed) == (read_row(row[:end], is_edited=False) is not None)


def test_rows_in_other_forms_are_bars_if_drawn_over() -> None:
    """A row in another form than tqdm's is a bar if it was drawn over another row.

    If text is behind such a bar, the bar has to be full. A row in tqdm's form is a bar only if it
    ends with the bracket around its times.
    """
    for row, is_edited, is_bar in (
        ("training ━━━━━━━━━━━━ 63% 0:00:10", True, True),
        ("training ━━━━━━━━━━━━ 63% 0:00:10", False, False),
        ("32/100 ━━━━━━━━━━━━━━━ 4s 60ms/step - loss: 0.4step 20", True, False),
        ("100/100 ━━━━━━━━━━━━━━ 4s 60ms/step - loss: 0.4", True, True),
        ("63%", True, False),
        ("train 32%|###  | 20/63 [00:03<00:06, 6.8it/s, loss=[0.6, 0.1]]", False, True),
        ("train 32%|###  | 20/63 [00:03<00:06, 6.8it/s] loss [0.6]", False, False),
        ("10it [00:03, 9.5it/s] loss [0.6]", False, False),
    ):
        assert (read_row(row, is_edited=is_edited) is not None) == is_bar, row


@given(
    total=st.integers(1, 10**7),
    share=st.floats(0, 1),
    elapsed=st.floats(0.001, 10**5),
    prefix=st.sampled_from(["", "epoch 1", "Map (num_proc=2)", "a|b 5%", "[0/3] x"]),
    postfix=st.sampled_from([None, "loss=2.1", "v_num=0, acc=0.5"]),
    columns=st.sampled_from([None, 80, 0]),
    ascii_=st.booleans(),
)
def test_every_bar_that_tqdm_writes_is_read(
    *, total, share, elapsed, prefix, postfix, columns, ascii_
):
    """Every bar that tqdm writes is read: its name, progress, total, time and postfix."""
    done = round(share * total)
    line = tqdm.format_meter(
        done, total, elapsed, prefix=prefix, postfix=postfix, ncols=columns, ascii=ascii_
    )
    bar = read_bar(line)
    assert (bar.name, bar.done, bar.total) == (prefix, str(done), str(total))
    assert bar.fraction == done / total
    assert bar.elapsed == pytest.approx(elapsed, abs=1)
    assert bar.other_text == (postfix or "") or len(line) == columns
    assert bar.is_finished == (done == total)


def test_bars_of_other_libraries_are_read() -> None:
    """Bars without a total, of bytes, with colours and of other libraries are read."""
    for line, bar in (
        ("0it [00:00, ?it/s]", Bar("", "0it", elapsed=0, rate="?it/s")),
        ("x: 15it [00:03,  4.9it/s]", Bar("x", "15it", elapsed=3, rate="4.9it/s")),
        (
            "a: 40%|████      | 1.20G/3.00G [00:12<1:00:18, 100MB/s]",
            Bar("a", "1.20G", "3.00G", pytest.approx(0.4), 12, 3618, "100MB/s"),
        ),
        (
            "\x1b[32m 50%\x1b[0m|█    | 2/4 [00:01<?, ?it/s]",
            Bar("", "2", "4", 0.5, 1, None, "?it/s"),
        ),
        # Keras 3 and 2, in the middle and at the end.
        (
            " 32/100 ━━━━━━━━━━━━━━━━━━━━ 4s 60ms/step - accuracy: 0.9 - loss: 0.4",
            Bar("", "32", "100", 0.32, None, 4, "60ms/step", "accuracy: 0.9 - loss: 0.4"),
        ),
        (
            " 32/100 [=======>......................] - ETA: 1:04 - loss: 0.4",
            Bar("", "32", "100", 0.32, None, 64, "", "loss: 0.4"),
        ),
        (
            "100/100 [==============================] - 6s 60ms/step - loss: 0.4",
            Bar("", "100", "100", 1.0, 6, None, "60ms/step", "loss: 0.4"),
        ),
        # Bars of Lightning with rich, and of fastprogress.
        (
            "Epoch 0/1  ━━━━━━━━━━━━━━━━━━━━ 4/8 0:00:02 • 0:00:01 66.32it/s v_num: 0",
            Bar("Epoch 0/1", "4", "8", 0.5, 2, 1, "66.32it/s", "v_num: 0"),
        ),
        (
            "|████████--------| 60.00% [6/10 00:03<00:02 loss: 0.3]",
            Bar("", "6", "10", 0.6, 3, 2, "", "loss: 0.3"),
        ),
    ):
        assert read_bar(line) == bar
    # The time left is the bar's own estimate, else computed from the pace so far.
    bars = [read_bar(f" 25%|##  | 1/4 [00:06<{left}, ?it/s]") for left in ("00:07", "?")]
    assert [bar and bar.time_left for bar in bars] == [7, 18]


def test_bars_of_rich_are_read() -> None:
    """Bars that rich draws in a terminal are read, with the default columns and with others."""
    with_numbers = [MofNCompleteColumn(), TimeElapsedColumn()]
    for done, more in ((0, []), (3, []), (0, with_numbers), (10, with_numbers)):
        written = io.StringIO()
        console = Console(file=written, force_terminal=True, width=100)
        columns = [*Progress.get_default_columns(), *more]
        with Progress(*columns, console=console, auto_refresh=False) as shown:
            task = shown.add_task("training", total=10)
            shown.update(task, completed=done)
            shown.refresh()
            screen = Screen()
            screen.write("stdout", written.getvalue())
        (line,) = screen.lines(screen.end - 1, bars=True)
        bar = read_bar(line.text)
        assert (bar.name, bar.fraction) == ("training", done / 10)
        assert bar.amount == (f"{done}/10" if more else "")


def test_overwritten_lines_with_progress_are_bars() -> None:
    """A line that was written over is a bar, in any form, if it says how far the work is."""
    for line, fraction, rest in (
        ("step 100/1000 loss 2.1", 0.1, "loss 2.1"),
        ("Step: 40% done", 0.4, "done"),
        ("downloaded 3 of 10 files", 0.3, "files"),
        ("2024/12", None, ""),
        ("loading", None, ""),
        ("acc 130%", None, ""),
    ):
        bar = read_bar(line, is_edited=True)
        said = None if bar is None else (bar.fraction, bar.other_text)
        assert said == (None if fraction is None else (fraction, rest))
        assert read_bar(line) is None
    # Ordinary lines, rules, tables, and a bar behind which something was printed are no bars.
    ordinary = ["2024/12/31 started", "loss 0.5 acc 90%", "Epoch 1/5", "see http://x/y", ""]
    drawn = ["| a | b |", "-" * 22, "━" * 20, "%" * 100_000, "{'loss': 2.3, 'epoch': 0.1}"]
    for line in [*ordinary, *drawn, "10%|█         | 1/10 [00:00<00:00, 9.9it/s]loss 2.3"]:
        assert read_bar(line) is None, line


@given(text=st.text("0123456789%/[]|━█=>: .,abit<\x1bm", max_size=60), is_edited=st.booleans())
def test_no_text_makes_the_reader_of_bars_fail(*, text: str, is_edited: bool) -> None:
    """No text that looks like a bar makes the reader fail, and a fraction is between 0 and 1."""
    bar = read_bar(text, is_edited=is_edited)
    assert bar is None or bar.fraction is None or 0 <= bar.fraction <= 1
