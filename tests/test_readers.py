"""Tests of `nbdist.readers`: the value of one flag, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nbdist.errors import UsageError
from nbdist.readers import (
    read_address,
    read_endpoint,
    read_memory,
    read_patterns,
    read_salloc,
    unquoted,
    whole_number,
)


@pytest.mark.parametrize("text", ["x", "-1", "", "0", "1.5", "1e3", "٣", "9" * 5000, "²"])
def test_whole_numbers(text: str) -> None:
    """From the least on; quotes of IPython's are none of the number."""
    read = whole_number("--tail", "a number, such as `--tail 1`")
    with pytest.raises(UsageError) as found:
        read(text)
    assert str(found.value) == f"`--tail {text}`: a number, such as `--tail 1`."
    assert (read('"12"'), read(7)) == (12, 7)
    assert unquoted("'x") == "'x"


@pytest.mark.parametrize(
    ("read", "given", "value"),
    [
        (read_memory, "16G", "16G"),
        (read_memory, "0500 mib", "500M"),
        (read_patterns, "HF_*, WANDB_?", "HF_*,WANDB_?"),
        (read_patterns, ["A", "B*"], "A,B*"),
        (read_address, "10.0.0.1", "10.0.0.1"),
        (read_address, "[fe80::1%eth0]", "fe80::1%eth0"),
        (read_address, "::1", "::1"),
        (read_address, "ib0", "ib0"),
        (read_endpoint, "etcd.example.org:2379", "etcd.example.org:2379"),
        (read_endpoint, "[::1]:2379", "[::1]:2379"),
        (read_salloc, "-p gpu -t 1:00", "-p gpu -t 1:00"),
    ],
)
def test_what_is_for_other_machines(read: Callable[[Any], str], given: object, value: str) -> None:
    """In one form each."""
    assert read(given) == value


@pytest.mark.parametrize(
    ("read", "given", "said"),
    [
        (read_memory, "16", "`--memory 16`: memory for each worker, such as 16G or 500M."),
        (read_memory, "0G", "`--memory 0G`: memory for each worker, such as 16G or 500M."),
        (read_patterns, "A B", "`--copy-env A B`: names of variables, such as"),
        (read_patterns, "", "`--copy-env `: names of variables, such as"),
        (read_address, "-x", "`--address -x`: an address of this machine or a network"),
        (read_address, "a/b", "`--address a/b`: an address of this machine or a network"),
        (read_endpoint, "a", "`--rdzv-endpoint a`: HOST:PORT, such as"),
        (read_endpoint, "a:0", "`--rdzv-endpoint a:0`: HOST:PORT, such as"),
        (read_endpoint, "a:99999", "`--rdzv-endpoint a:99999`: HOST:PORT, such as"),
        (read_salloc, " ", '`--salloc ""`: options of salloc, such as'),
        (read_salloc, "-p 'x", "`--salloc -p 'x`: no closing quotation."),
    ],
)
def test_what_is_none_is_told_in_one_line(
    read: Callable[[Any], str], given: object, said: str
) -> None:
    """Which flag, and what would be right."""
    with pytest.raises(UsageError) as found:
        read(given)
    assert str(found.value).startswith(said)
    assert "\n" not in str(found.value)
