"""`%dist_diff`: which ranks have the same of a value, part by part, and how far others are from it.

`Comparison` is pure; the op of the same name looks at the values, on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from IPython.core.magic_arguments import argument

from nbdist.notebook.cells import bring
from nbdist.notebook.command import Line, command
from nbdist.notebook.commands.values import expressions_in
from nbdist.notebook.display import Shown, below, block, table
from nbdist.notebook.options import ranks_option
from nbdist.output.wording import fold_ranks
from nbdist.wire.ops import Brought, Distance, Looked, Part
from nbdist.wire.work import Call
from nbdist.words import count, name_ranks, size_text
from nbdist.world.exchange import check_expressions, refusal

MOST_ROWS, MOST_DISTANCES = 50, 3

MOST_COMPARED = 128 << 20
"""Bytes of parts whose numbers are compared; of the others it is only said that they differ."""

Group = tuple[Part | None, list[int]]
"""A part that some ranks have alike; None where they have no such part."""


@command(
    argument("names", nargs="+", help="variables of the workers, or an expression"),
    ranks_option,
)
def dist_diff(line: Line) -> Shown | str:
    """Show which ranks have different values: `%dist_diff model`.

    A module is compared by parameters and buffers, an optimizer by its state, containers and
    objects by what they hold: shape, dtype, a digest of the contents, made on the ranks.
    Where digests differ the numbers are compared: NaN is equal to NaN, and -0.0 to 0.0.
    """
    expressions = [*expressions_in(line.options.names)]
    check_expressions(expressions)
    shown = [_compared(line, each) for each in expressions]
    if all(isinstance(each, str) for each in shown):
        return "\n".join(map(str, shown))
    return below(block(each) if isinstance(each, str) else each for each in shown)


def _compared(line: Line, expression: str) -> Shown | str:
    looked: dict[int, Looked] = line.call("diff", expression=expression)
    failed = {rank: each for rank, each in looked.items() if each.missing or each.problem}
    if len(failed) == len(looked) or any(each.problem for each in failed.values()):
        refused = {r: Brought(expression, None, e.missing, e.problem) for r, e in failed.items()}
        if error := refusal(line.world.session, refused):
            raise error
    found = Comparison(expression, looked)
    for reference, (others, paths) in found.to_compare().items():
        found.take(distances(line, expression, reference, others, paths))
    rows = [*found.rows()]
    head, more = found.head(len(rows)), len(rows) - MOST_ROWS
    last = [(f"and {more} more", "", "")] if more > 0 else []
    shown = [("part", "type", "ranks"), *rows[:MOST_ROWS], *last]
    return table(head, shown) if rows else head


def distances(
    line: Line, expression: str, reference: int, others: Sequence[int], paths: Sequence[str]
) -> Mapping[int, Mapping[str, Distance]]:
    """Compare these parts of the others with those of `reference`, through shared memory."""
    pool, world = line.pool, line.world
    wanted = {"expression": expression, "paths": tuple(paths)}
    lending = world.task(Call("diff.lend", wanted), ranks=(reference,))
    try:
        lent: Brought = bring(pool, world, lending)[reference]
        # The rank that lends does nothing else meanwhile: its next task would end that.
        given = {"expression": expression, "packed": lent.packed}
        return bring(pool, world, world.task(Call("diff.compare", given), ranks=tuple(others)))
    finally:
        world.session.let_go_of(lending, (reference,))


@dataclass
class Comparison:
    """What ranks have under `title`, and how far they are apart.

    `distances` has by part and rank how far this one is from the first of the ranks that agree.
    """

    title: str
    looked: Mapping[int, Looked]
    distances: dict[str, dict[int, Distance]] = field(default_factory=dict)

    @property
    def have(self) -> list[int]:
        """The ranks that have the value at all."""
        return [rank for rank, each in self.looked.items() if not each.missing]

    @property
    def paths(self) -> list[str]:
        """All parts that any rank has, as they come."""
        return [*dict.fromkeys(path for each in self.looked.values() for path in each.parts)]

    def groups(self, path: str) -> list[Group]:
        """Group ranks by what they have of a part, the largest group first."""
        return _grouped({rank: self.looked[rank].parts.get(path) for rank in self.have})

    def to_compare(self) -> dict[int, tuple[list[int], list[str]]]:
        """Say by rank which others are to compare which parts with its own."""
        left = MOST_COMPARED
        found: dict[int, tuple[list[int], list[str]]] = {}
        for path in self.paths:
            (part, same), *others = self.groups(path)
            if part is None or not 0 < part.size <= left:
                continue
            alike = (ranks for other, ranks in others if other and other.kind == part.kind)
            if not (apart := [*chain.from_iterable(alike)]):
                continue
            left -= part.size
            ranks, paths = found.setdefault(same[0], ([], []))
            ranks[:] = sorted({*ranks, *apart})
            paths.append(path)
        return found

    def take(self, distances: Mapping[int, Mapping[str, Distance]]) -> None:
        """Take in how far these ranks are from the one that they have been compared with."""
        for rank, by_path in distances.items():
            for path, distance in by_path.items():
                self.distances.setdefault(path, {})[rank] = distance

    def head(self, differing: int) -> str:
        """Write how much there is, and which agree: `model: 6 parts, 1.2 MiB · ranks 0-3 agree`."""
        have = self.have
        parts = self.looked[have[0]].parts.values()
        size = sum(part.size for part in parts)
        much = f", {size_text(size)}" if size else ""
        said = [f"{self.title}: {count(len(parts), 'part')}{much}"]
        if differing:
            said.append(f"{differing} of {len(self.paths)} differ{'s' if differing == 1 else ''}")
        else:
            said.append(f"{name_ranks(have)} agree" if len(have) > 1 else "one rank alone")
        if missing := [rank for rank in self.looked if rank not in have]:
            said.append(f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} none")
        groups = map(self.groups, self.paths)
        if unseen := sum(any(p and not p.digest for p, _ in each) for each in groups):
            said.append(f"{count(unseen, 'part')} not compared: sharded, or of unknown kind")
        return " · ".join(said)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield a part that differs, of which kind it is, and in which ranks."""
        for path in self.paths:
            groups, apart = self.groups(path), self.distances.get(path, {})
            # Equal but for bits: the sign of a zero, or which NaN it is.
            equal = {rank for rank, distance in apart.items() if not distance.differing}
            parts = {rank: part for part, ranks in groups for rank in ranks}
            groups = _grouped({r: groups[0][0] if r in equal else p for r, p in parts.items()})
            if len(groups) > 1:
                kinds = {part.kind if part else "" for part, _ in groups}
                kind = kinds.pop() if len(kinds) == 1 else ""
                yield path or self.title, kind, _difference(groups, apart)


def _grouped(parts: Mapping[int, Part | None]) -> list[Group]:
    same = fold_ranks({rank: part and (part.kind, part.digest) for rank, part in parts.items()})
    groups = [(parts[ranks[0]], ranks) for ranks in same.values()]
    return sorted(groups, key=lambda group: (-len(group[1]), group[1][0]))


def _difference(groups: list[Group], apart: Mapping[int, Distance]) -> str:
    """Say `ranks 0-2 agree, rank 3 differs by at most 0.0312 (12 of 4,096)`."""
    if len({part.kind if part else "" for part, _ in groups}) > 1:
        return _listed((part.kind if part else "nothing", ranks) for part, ranks in groups)
    if all(part and part.text for part, _ in groups):
        return _listed((part.text if part else "", ranks) for part, ranks in groups)
    (first, same), *others = groups
    begin = f"{name_ranks(same)} agree" if len(same) > 1 else f"compared with {name_ranks(same)}"
    total = first.count if first else 0
    ranks = [rank for _, those in others for rank in those]
    said = fold_ranks({rank: _distance_text(apart.get(rank), total) for rank in ranks})
    if len(said) > MOST_DISTANCES and all(rank in apart for rank in ranks):
        numbers = ((each.most, each.differing, each.odd) for each in apart.values())
        said = {_distance_text(Distance(*map(max, *numbers)), total): ranks}
    differ = (f"{name_ranks(r)} differ{'s' if len(r) == 1 else ''}{how}" for how, r in said.items())
    return ", ".join([begin, *differ])


def _listed(said: Iterable[tuple[str, list[int]]]) -> str:
    return ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in said)


def _distance_text(distance: Distance | None, total: int) -> str:
    if distance is None:
        return ""
    where = f" ({distance.differing:,} of {total:,})" if total > 1 else ""
    odd = f", NaN or infinity in {distance.odd:,}" if distance.odd else ""
    return f" by at most {distance.most:.3g}{where}{odd}"
