"""`%dist_diff` compares a value over the ranks, part by part.

Runs in the notebook's process.  Ops in the workers (`nbdist.tools.diff_op`) describe each rank's
value.  `Comparison` finds the differences between these descriptions, without I/O.  The option
`--watch` (`nbdist.tools.watch`) uses `Comparison`, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from IPython.core.magic_arguments import argument

from nbdist.notebook.cells import fetch_results
from nbdist.notebook.command import MagicCall, command
from nbdist.notebook.commands.values import expressions_in
from nbdist.notebook.display import CommandOutput, below, block, table
from nbdist.notebook.options import ranks_option
from nbdist.output.wording import fold_ranks
from nbdist.wire.ops import Brought, Distance, Looked, ValueDigest
from nbdist.wire.work import OpCall
from nbdist.words import count, name_ranks, size_text
from nbdist.world.value_transfer import check_expressions, missing_error

MAX_DIFF_ROWS, MAX_DISTANCES = 50, 3

MAX_COMPARED_BYTES = 128 << 20
"""The most bytes of parts whose numbers are compared; of other parts only digests are compared."""

EqualRanks = tuple[ValueDigest | None, list[int]]
"""A part and the ranks that have an equal part, or None and the ranks that lack the part."""


@command(
    argument("names", nargs="+", help="variables of the workers, or an expression"),
    ranks_option,
)
def dist_diff(line: MagicCall) -> CommandOutput | str:
    """Show which ranks have different values: `%dist_diff model`.

    A module is compared by its parameters and buffers, an optimizer by its state, and containers
    and other objects by their contents.  Each rank computes the shape, the dtype and a digest of
    each part.  If digests differ, the numbers are compared: NaN is equal to NaN, and -0.0 to 0.0.
    """
    expressions = [*expressions_in(line.options.names)]
    check_expressions(expressions)
    shown = [_compare_expression(line, each) for each in expressions]
    if all(isinstance(each, str) for each in shown):
        return "\n".join(map(str, shown))
    return below(block(each) if isinstance(each, str) else each for each in shown)


def _compare_expression(line: MagicCall, expression: str) -> CommandOutput | str:
    looked: dict[int, Looked] = line.call("diff", expression=expression)
    failed = {rank: each for rank, each in looked.items() if each.missing or each.problem}
    if len(failed) == len(looked) or any(each.problem for each in failed.values()):
        refused = {r: Brought(expression, None, e.missing, e.problem) for r, e in failed.items()}
        if error := missing_error(line.world.engine, refused):
            raise error
    comparison = Comparison(expression, looked)
    for reference, (others, paths) in comparison.to_compare().items():
        comparison.add_distances(distances(line, expression, reference, others, paths))
    rows = [*comparison.rows()]
    head, more = comparison.head(len(rows)), len(rows) - MAX_DIFF_ROWS
    last = [(f"and {more} more", "", "")] if more > 0 else []
    shown = [("part", "type", "ranks"), *rows[:MAX_DIFF_ROWS], *last]
    return table(head, shown) if rows else head


def distances(
    line: MagicCall, expression: str, reference: int, others: Sequence[int], paths: Sequence[str]
) -> Mapping[int, Mapping[str, Distance]]:
    """Return by rank and path how far parts of other ranks are from parts of `reference`.

    The rank `reference` lends its parts at `paths` to the ranks in `others`, until this function
    ends.  Large parts are lent in shared memory, and ranks on other machines get a copy of this
    memory.
    """
    pool, world = line.pool, line.world
    arguments = {"expression": expression, "paths": tuple(paths)}
    lending = world.task(OpCall("diff.lend", arguments), ranks=(reference,))
    try:
        lent: Brought = fetch_results(pool, world, lending)[reference]
        # Send this task only to other ranks: a task on `reference` would release the lent parts.
        given = {"expression": expression, "packed": lent.packed}
        return fetch_results(
            pool, world, world.task(OpCall("diff.compare", given), ranks=tuple(others))
        )
    finally:
        world.engine.connection.release_lent_values(lending, (reference,))


@dataclass
class Comparison:
    """Compares the value called `title` on all ranks, by the digests of its parts.

    `looked` has the parts on each rank.  `distances` has, by path and rank, how far the rank's part
    is from the part of the reference rank (`to_compare`).
    """

    title: str
    looked: Mapping[int, Looked]
    distances: dict[str, dict[int, Distance]] = field(default_factory=dict)

    @property
    def have(self) -> list[int]:
        """The ranks that have the value."""
        return [rank for rank, each in self.looked.items() if not each.missing]

    @property
    def paths(self) -> list[str]:
        """The paths of all parts that any rank has."""
        return [*dict.fromkeys(path for each in self.looked.values() for path in each.parts)]

    def groups(self, path: str) -> list[EqualRanks]:
        """Return the groups of ranks with equal parts at this path, the largest group first."""
        return _group_ranks({rank: self.looked[rank].parts.get(path) for rank in self.have})

    def to_compare(self) -> dict[int, tuple[list[int], list[str]]]:
        """Choose the parts whose numbers are compared, and a reference rank for each of them.

        The reference is the first rank of the largest group with equal parts.  Return a dict from
        each reference to a pair: the ranks to compare with the reference, and the paths of the
        parts.

        Left out are parts that are equal on all ranks, parts that the largest group lacks, parts
        without a known size, and parts beyond `MAX_COMPARED_BYTES` in all.  A rank whose part has
        another type or shape than the part of the reference is not chosen for this part.
        """
        budget = MAX_COMPARED_BYTES
        by_reference: dict[int, tuple[list[int], list[str]]] = {}
        for path in self.paths:
            (part, same), *others = self.groups(path)
            if part is None or not 0 < part.size <= budget:
                continue
            alike = (ranks for other, ranks in others if other and other.kind == part.kind)
            if not (apart := [*chain.from_iterable(alike)]):
                continue
            budget -= part.size
            ranks, paths = by_reference.setdefault(same[0], ([], []))
            ranks[:] = sorted({*ranks, *apart})
            paths.append(path)
        return by_reference

    def add_distances(self, distances: Mapping[int, Mapping[str, Distance]]) -> None:
        """Add measured distances of ranks from a reference rank, by rank and path."""
        for rank, by_path in distances.items():
            for path, distance in by_path.items():
                self.distances.setdefault(path, {})[rank] = distance

    def head(self, differing: int) -> str:
        """Return the heading of the comparison: `model: 6 parts, 1.2 MiB · ranks 0-3 agree`.

        `differing` is the number of parts that differ.
        """
        have = self.have
        parts = self.looked[have[0]].parts.values()
        size = sum(part.size for part in parts)
        much = f", {size_text(size)}" if size else ""
        phrases = [f"{self.title}: {count(len(parts), 'part')}{much}"]
        if differing:
            phrases.append(
                f"{differing} of {len(self.paths)} differ{'s' if differing == 1 else ''}"
            )
        else:
            phrases.append(f"{name_ranks(have)} agree" if len(have) > 1 else "one rank alone")
        if missing := [rank for rank in self.looked if rank not in have]:
            phrases.append(f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} none")
        groups = map(self.groups, self.paths)
        if unseen := sum(any(p and not p.digest for p, _ in each) for each in groups):
            phrases.append(f"{count(unseen, 'part')} not compared: sharded, or of unknown kind")
        return " · ".join(phrases)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the path, type and differences of each part that differs between ranks."""
        for path in self.paths:
            groups, apart = self.groups(path), self.distances.get(path, {})
            # A rank whose numbers equal those of the reference counts as equal, in spite of another
            # digest: only bits differ, as the bits of -0.0 and 0.0 do.
            equal = {rank for rank, distance in apart.items() if not distance.differing}
            parts = {rank: part for part, ranks in groups for rank in ranks}
            groups = _group_ranks({r: groups[0][0] if r in equal else p for r, p in parts.items()})
            if len(groups) > 1:
                kinds = {part.kind if part else "" for part, _ in groups}
                kind = kinds.pop() if len(kinds) == 1 else ""
                yield path or self.title, kind, _difference(groups, apart)


def _group_ranks(parts: Mapping[int, ValueDigest | None]) -> list[EqualRanks]:
    same = fold_ranks({rank: part and (part.kind, part.digest) for rank, part in parts.items()})
    groups = [(parts[ranks[0]], ranks) for ranks in same.values()]
    return sorted(groups, key=lambda group: (-len(group[1]), group[1][0]))


def _difference(groups: list[EqualRanks], apart: Mapping[int, Distance]) -> str:
    """Return a text such as `ranks 0-2 agree, rank 3 differs by at most 0.0312 (12 of 4,096)`."""
    if len({part.kind if part else "" for part, _ in groups}) > 1:
        return _list_texts((part.kind if part else "nothing", ranks) for part, ranks in groups)
    if all(part and part.text for part, _ in groups):
        return _list_texts((part.text if part else "", ranks) for part, ranks in groups)
    (first, same), *others = groups
    begin = f"{name_ranks(same)} agree" if len(same) > 1 else f"compared with {name_ranks(same)}"
    total = first.count if first else 0
    ranks = [rank for _, unequal in others for rank in unequal]
    texts = fold_ranks({rank: _distance_text(apart.get(rank), total) for rank in ranks})
    if len(texts) > MAX_DISTANCES and all(rank in apart for rank in ranks):
        numbers = ((each.most, each.differing, each.odd) for each in apart.values())
        texts = {_distance_text(Distance(*map(max, *numbers)), total): ranks}
    differ = (
        f"{name_ranks(r)} differ{'s' if len(r) == 1 else ''}{how}" for how, r in texts.items()
    )
    return ", ".join([begin, *differ])


def _list_texts(texts: Iterable[tuple[str, list[int]]]) -> str:
    return ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in texts)


def _distance_text(distance: Distance | None, total: int) -> str:
    if distance is None:
        return ""
    where = f" ({distance.differing:,} of {total:,})" if total > 1 else ""
    odd = f", NaN or infinity in {distance.odd:,}" if distance.odd else ""
    return f" by at most {distance.most:.3g}{where}{odd}"
