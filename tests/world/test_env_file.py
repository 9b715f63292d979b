"""Tests of `nbdist.world.spec`: what `--env-file` reads, and how it says what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.world.spec import parse_line, read_env_file


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", {}),
        ("# A=1", {}),
        ("A=1", {"A": "1"}),
        ("A = 1", {"A": "1"}),
        ("export A=1", {"A": "1"}),
        ("A=", {"A": ""}),
        ("A=a b  # why", {"A": "a b"}),
        ("A= # why", {"A": ""}),
        ("A=a#b", {"A": "a#b"}),
        ("A=b=c", {"A": "b=c"}),
        ("A='$HOME # `x` \"'  # why", {"A": '$HOME # `x` "'}),
        (r'A="x\ny\"\\z $HOME" # why', {"A": 'x\ny"\\z $HOME'}),
        ("A=$(rm -rf x)", {"A": "$(rm -rf x)"}),
    ],
)
def test_lines_of_env_files(line: str, found: dict[str, str]) -> None:
    """Comments, `export` and quotes are understood; nothing is run or expanded."""
    assert parse_line(line) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1\n\nno value here\n", "line 3 (`no value here`): that is no NAME=value."),
        ("2A=secret", "line 1 (`2A`): that is no NAME=value."),
        ("A='secret", "line 1 (`A`): a quote is not closed."),
        ('A="secret\\"', "line 1 (`A`): a quote is not closed."),
        ("A='secret' more", "line 1 (`A`): something follows the closing quote."),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, text: str, said: str) -> None:
    """One line with file and line number, and not what may be secret."""
    file = tmp_path / ".env"
    file.write_text(text)
    with pytest.raises(UsageError) as found:
        read_env_file(str(file))
    assert str(found.value).startswith(f"{file}, {said}")
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"A=\xff\n", "it is not a text in UTF-8."), (None, "No such file or directory.")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, said: str) -> None:
    """The option, the file and the reason."""
    file = tmp_path / ".env"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as found:
        read_env_file(str(file))
    assert str(found.value) == f"`--env-file {file}`: {said}"


def test_a_file_as_windows_writes_it(tmp_path: Path) -> None:
    """Byte order mark and carriage returns are none of the values; the last line wins."""
    file = tmp_path / ".env"
    file.write_bytes(b"\xef\xbb\xbfA=1\r\nA=2\r\n")
    assert read_env_file(str(file)) == {"A": "2"}
