"""Functions that write ranks, counts, sizes, exit codes and names as text, for messages to users.

Every process may import this file, which imports nothing of nbdist.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

NEAR, LINE_LIMIT = 0.7, 300
"""How similar a name must be for `did_you_mean` to suggest it, from 0 to 1; and the number of
characters to which `one_line` cuts a line by default."""


def count(number: int, thing: str) -> str:
    """Return a number with a noun, such as `1 rank` or `4 ranks`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a text with spans: (0, 1, 2, 5) gives `0-2,5`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a text that begins with a noun, such as `rank 5` or `ranks 0-2,5`."""
    text = format_ranks(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


LACKED_MEMORY = "most likely killed by the kernel for lack of memory"
"""The beginning of a log line about a process that Linux has most likely killed (OOM killer).

If an agent was killed, `AgentLost` shows the last line of its log only if it begins with this text.
"""


def word_exit(exit_code: int | None) -> str:
    """Return how a process ended, such as `was killed by SIGKILL` for -9; `ended` for None."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    if -exit_code in signal.valid_signals():
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            pass  # most real-time signals have no name
    return f"was killed by signal {-exit_code}"


def one_line(text: str, limit: int = LINE_LIMIT) -> str:
    """Return the first line of `text` that is not blank, stripped and cut to `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def error_line(name: str, message: str) -> str:
    """Return an error as `ValueError: bad shard`; if the message is empty, only the name."""
    return f"{name}: {message}" if message else name


def size_text(size: float) -> str:
    """Return a number of bytes as text: `512 B`, `1.5 KiB`, `240 MiB`, `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:  # 999.5 and more would be written as 1e+03
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 999.5 else f"{size:,.0f} TiB"


def size_range(sizes: Iterable[float]) -> str:
    """Return the range of sizes as text: `240 MiB`, `240-318 MiB`, `800 MiB-1.25 GiB`."""
    all_sizes = [*sizes]
    low, high = size_text(min(all_sizes)), size_text(max(all_sizes))
    if low == high:
        return high
    return f"{low.removesuffix(high[high.index(' ') :])}-{high}"


_DIST_MAGIC = re.compile(r"%dist_(?!auto|help|attach)\w+(?! --pool)\b")


def in_pool(text: str, pool: str) -> str:
    """Return a text with `--pool` for its magics: `%dist_output` gives `%dist_output --pool a`.

    Magics that already name a pool, or that need none, stay as they are.  The whole text stays as
    it is if `pool` is "", which stands for the default pool.
    """
    return _DIST_MAGIC.sub(rf"\g<0> --pool {pool}", text) if pool else text


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with spaces that align the columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ` Did you mean `loss`?` with the most similar public name; "" if none is similar."""
    near = get_close_matches(name, {each for each in names if not each.startswith("_")}, 1, NEAR)
    return f" Did you mean `{near[0]}`?" if near else ""
