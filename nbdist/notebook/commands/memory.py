"""What the memory of the workers is used for, by name; and what nothing uses any more, freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import Line, command
from nbdist.notebook.display import Shown, below, table
from nbdist.notebook.options import ranks_option
from nbdist.output.wording import fold_ranks
from nbdist.words import format_ranks, name_ranks, size_range, size_text

if TYPE_CHECKING:
    from nbdist.wire.ops import Cleaned, Held, Memory, Peak


MOST_ROWS = 12

PER_RANK = (
    "ranks",
    "memory",
    "peak in last cell",
    "in variables",
    "GPU",
    "GPU tensors",
    "their peak",
)


@command(
    argument("--free", action="store_true", help="free what tracebacks, Out and caches hold"),
    ranks_option,
)
def dist_memory(line: Line) -> Shown:
    """Show memory per rank, and the largest tensors by variable.

    Memory (PSS: shared pages count in part) and GPU, the most that was used since the last cell
    began, and what only the last traceback and `Out` hold, which `--free` frees.
    """
    return freed(line) if line.options.free else shown_of(line.call("memory"))


def shown_of(found: Mapping[int, Memory]) -> Shown:
    """Draw a line for all ranks, a table of them, one of names, and what is held unseen."""
    parts = [table(headline(found), rows(found))]
    largest = names(found, [(rank, held) for rank in found for held in found[rank].held])
    if largest:
        parts.append(table("Largest tensors, by variable", largest))
    kept = names(found, [(rank, held) for rank in found for held in found[rank].kept])
    if kept:
        sizes = size_range(memory.kept_size for memory in found.values() if memory.kept)
        who = name_ranks(rank for rank, memory in found.items() if memory.kept)
        said = f"{sizes} that only the last traceback and `Out` hold on {who}"
        parts.append(table(f"{said}: `%dist_memory --free` frees it", kept))
    if cut := [rank for rank, memory in found.items() if not memory.is_whole]:
        parts.append(table(f"not all variables of {name_ranks(cut)} were searched in time", []))
    return below(parts)


def headline(found: Mapping[int, Memory]) -> str:
    """Say from which to which: `ranks 0-3 · 42-61 MiB · this machine 3.1 GiB of 23.5 GiB`."""
    parts = [name_ranks(found), size_range(memory.pss for memory in found.values())]
    if gpus := [memory.gpu for memory in found.values() if memory.gpu]:
        used, total = size_range(gpu.used for gpu in gpus), size_range(gpu.total for gpu in gpus)
        parts.append(f"GPU {used} of {total}")
    limits = [memory.limit for memory in found.values() if memory.limit]
    if limits:
        least = min(limits, key=lambda limit: limit.free)
        used = size_text(max(0, least.limit - least.free))
        parts.append(f"{least.where} {used} of {size_text(least.limit)}")
    return " · ".join(parts)


def rows(found: Mapping[int, Memory]) -> list[tuple[str, ...]]:
    """Lay out headings, and a row for all ranks whose figures are the same."""
    same = fold_ranks({rank: tuple(_figures(memory)) for rank, memory in found.items()})
    table = [PER_RANK, *((format_ranks(ranks), *figures) for figures, ranks in same.items())]
    # Without GPUs there are no columns for them.
    used = [i for i, column in enumerate(zip(*table, strict=True)) if any(column[1:])]
    return [tuple(row[index] for index in used) for row in table]


def _figures(memory: Memory) -> Iterator[str]:
    yield size_text(memory.pss)
    yield _peak_text(memory.peak)
    yield size_text(memory.tensors)
    gpu = memory.gpu
    yield f"{size_text(gpu.used)} of {size_text(gpu.total)}" if gpu else ""
    yield size_text(gpu.tensors) if gpu else ""
    yield _peak_text(gpu.peak) if gpu else ""


def _peak_text(peak: Peak) -> str:
    """Write `1.2 GiB`; `at most 1.2 GiB` where an earlier cell has used as much."""
    return f"at most {size_text(peak.size)}" if peak.is_bound else size_text(peak.size)


def names(found: Mapping[int, Memory], held: Iterable[tuple[int, Held]]) -> list[tuple[str, ...]]:
    """Lay out the largest: a row for each name, as it is on these ranks."""
    on: dict[Held, list[int]] = {}
    for rank, each in held:
        on.setdefault(each, []).append(rank)
    largest = sorted(on, key=lambda each: -each.size)[:MOST_ROWS]
    if not largest:
        return []
    is_on_gpu = any(each.device != "cpu" for each in largest)
    headings = ("size", "name", "what", *(("device",) if is_on_gpu else ()), "ranks")
    return [
        headings,
        *(
            (
                size_text(each.size),
                each.name,
                each.kind,
                *((each.device,) if is_on_gpu else ()),
                "all" if len(on[each]) == len(found) else format_ranks(on[each]),
            )
            for each in largest
        ),
    ]


TITLES = ("memory", "GPU tensors", "GPU held by torch")


@command(ranks_option, short_for="`%dist_memory --free`")
def dist_clean(line: Line) -> Shown:
    """Free memory held by tracebacks, Out and torch's cache, and show how much it was.

    Of the last traceback and what its frames hold, of `Out` and `_`, of cycles, of the GPU
    memory that torch keeps for the next tensors.  Variables stay.
    """
    return freed(line)


def freed(line: Line) -> Shown:
    """Have the ranks free what nothing uses, and draw the sizes before and after."""
    head = f"{name_ranks(line.ranks)} · tracebacks, Out and _, cycles, cached GPU memory released"
    return table(head, freed_rows(line.call("memory.clean")))


def freed_rows(found: Mapping[int, Cleaned]) -> list[tuple[str, ...]]:
    """Lay out headings, and a row for all ranks whose figures are the same."""
    same = fold_ranks({rank: _sizes(cleaned) for rank, cleaned in found.items()})
    # Without GPUs there are no columns for them.
    shown = [
        index
        for index in range(len(TITLES))
        if index == 0 or any(float(text.split()[0]) for sizes in same for text in sizes[index])
    ]
    headings = ("ranks", *(title for i in shown for title in (f"{TITLES[i]} before", "after")))
    return [
        headings,
        *(
            (format_ranks(ranks), *(text for index in shown for text in sizes[index]))
            for sizes, ranks in same.items()
        ),
    ]


def _sizes(cleaned: Cleaned) -> tuple[tuple[str, str], ...]:
    pairs = (cleaned.memory, cleaned.on_gpu, cleaned.held_on_gpu)
    return tuple((rounded(before), rounded(after)) for before, after in pairs)


def rounded(size: int) -> str:
    """Write `43 MiB`, `240 MiB`, `1.2 GiB`: in as many digits as two ranks can share."""
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    number = size / 2**20
    return f"{round(number, -1) if number >= 100 else round(number):.0f} MiB"
