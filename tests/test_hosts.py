"""Tests of `nbdist.hosts`: the text of `--hosts`, and what is not a host."""

from __future__ import annotations

import pytest

from nbdist.errors import BadTopology
from nbdist.hosts import Host, parse_hosts, read_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:4,b", [Host("a", 4), Host("b")]),
        (" a:4 , me@b.example.org:2 ", [Host("a", 4), Host("b.example.org", 2, "me")]),
        ("10.0.0.1,root@10.0.0.2:3", [Host("10.0.0.1"), Host("10.0.0.2", 3, "root")]),
        ("[fe80::1%eth0]:2,[2001:DB8::0:1]", [Host("fe80::1%eth0", 2), Host("2001:db8::1")]),
        ("Node_1.,gpu-2", [Host("node_1"), Host("gpu-2")]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[Host]) -> None:
    """Names and addresses of both kinds, with users and room; written again they are the same."""
    assert [*parse_hosts(text)] == hosts
    assert [*parse_hosts(read_hosts(text))] == hosts
    assert read_hosts([str(host) for host in hosts]) == read_hosts(text)


def test_what_ssh_is_given() -> None:
    """The brackets of `--hosts` are not ssh's."""
    assert [host.destination for host in parse_hosts("a:4,me@[fe80::1]:2")] == ["a", "me@fe80::1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is nothing next to a comma"),
        ("a,,b", "there is nothing next to a comma"),
        ("a:0", "`a:0` allows no worker"),
        ("a:x", "`a:x` is not a host"),
        ("a:", "`a:` is not a host"),
        ("a b", "`a b` is not a host"),
        ("fe80::1", "`fe80::1` is not a host"),
        ("[fe80::1", "`[fe80::1` is not a host"),
        ("[a]", "`[a]` is not a host"),
        ("[fe80::1%;]", "`[fe80::1%;]` is not a host"),
        ("10.0.0.300", "`10.0.0.300` is not a host"),
        ("-oProxyCommand=x", "`-oProxyCommand=x` is not a host"),
        ("a;reboot", "`a;reboot` is not a host"),
        ("münchen", "`münchen` is not a host"),
        ("-l@a", "`-l` cannot be a user"),
        ("@a", "`` cannot be a user"),
        ("a@b@c", "`a@b@c` is not a host"),
        ("a,b,A:2", "a is listed twice"),
        ("[::1],me@[0::1]", "::1 is listed twice"),
        ("a" * 300, f"`{'a' * 300}` is not a host"),
    ],
)
def test_what_is_no_host_is_told_in_one_line(text: str, why: str) -> None:
    """The reason, and the forms that there are; no option of ssh's gets through."""
    with pytest.raises(BadTopology) as found:
        parse_hosts(text)
    assert str(found.value).startswith(f"`--hosts {text}`: {why}. Use `--hosts a,b`, or ")
    assert "\n" not in str(found.value)
