"""nbdist.words: ranks, exit codes and long messages."""

import pytest

from nbdist import words


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0, 1, 2, 5), "0-2,5"), ((), ""), ((3,), "3"), ((2, 1, 2), "1-2"), (range(1024), "0-1023")],
)
def test_ranks_are_written_as_spans(ranks, text):
    """Ranks are written the way that `-r` reads them."""
    assert words.format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (None, "ended"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-11, "was killed by SIGSEGV"),
        (-40, "was killed by signal 40"),
        (-100, "was killed by signal 100"),
    ],
)
def test_an_exit_code_becomes_words(exit_code, text):
    """Signals are told by name, where they have one."""
    assert words.word_exit(exit_code) == text


def test_a_long_message_is_cut_to_a_line():
    """What an exception says is cut where it would no longer fit on a screen."""
    line = words.one_line("x" * 1000)
    assert len(line) == words.LINE_LIMIT
    assert line.endswith("...")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (240 << 20, "240 MiB"),
        (1000 << 20, "0.977 GiB"),
        (999_900_000 << 10, "954 GiB"),
        (1023 << 10, "0.999 MiB"),
        (5 << 28, "1.25 GiB"),
        (79 << 30, "79 GiB"),
        (1 << 50, "1,024 TiB"),
    ],
)
def test_sizes_have_three_digits(size, text):
    """In the unit in which they are read best."""
    assert words.size_text(size) == text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([5], "5 B"),
        ([240 << 20, 318 << 20, 240 << 20], "240-318 MiB"),
        ([1 << 20, 5 << 28], "1 MiB-1.25 GiB"),
    ],
)
def test_a_range_of_sizes(sizes, text):
    """The unit once, where both have the same."""
    assert words.size_range(sizes) == text


def test_columns_are_aligned():
    """By the longest text of each; nothing follows the last one."""
    rows = [("rank", "state"), ("0", "busy 3 s"), ("11", "<idle>")]
    assert words.aligned(rows) == ["rank  state", "0     busy 3 s", "11    <idle>"]
    assert words.aligned([]) == []


def test_did_you_mean() -> None:
    """The name that is most like it, if any is."""
    names = ["loss", "model", "_lss", "optimizer"]
    assert words.did_you_mean("lss", names) == " Did you mean `loss`?"
    assert words.did_you_mean("optimiser", names) == " Did you mean `optimizer`?"
    assert words.did_you_mean("x", names) == words.did_you_mean("rank", names) == ""
