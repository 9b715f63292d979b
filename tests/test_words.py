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
