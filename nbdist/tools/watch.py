"""`%%distributed --watch model,optimizer` finds the first compared step after which ranks differ.

Runs in the notebook's process; the ranks compare their parts themselves (`nbdist.tools.watch_op`).
The result shows which parts differ.  It also shows facts that began to differ before the parts,
such as random states, since a fact may be the cause.  With data parallelism each rank has its own
data and random states.  So a fact that has always differed is shown only if already the first
comparison finds a difference.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import CellOption, MagicCall
from nbdist.notebook.display import CommandOutput, below, block, table
from nbdist.notebook.options import Magic
from nbdist.output.wording import difference, fold_ranks
from nbdist.wire.ops import Facts, Looked, Watched
from nbdist.words import count, name_ranks, one_line

if TYPE_CHECKING:
    from nbdist.tools.diff import Comparison

DEFAULT_WATCH_STEPS = 50
MAX_WATCH_ROWS, MAX_NAMED_MODULES = 20, 4
_KEY = "[']"

DATA = "the data that forward got"

Stepped = tuple[int, Mapping[int, Any]]
"""A step, and by rank the value of a fact at this step."""


def _number(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise UsageError(f"`--every {text}`: give a number of steps, such as `--every 50`.")
    return int(text)


_WANTED = (
    argument("--watch", metavar="NAMES",
             help="compare modules and optimizers over the ranks while the cell trains, such as"
             " `--watch model,optimizer`, and say what differed first"),
    argument("--every", metavar="N", type=_number,
             help="with --watch: compare after every N steps of the optimizer "
             f"({DEFAULT_WATCH_STEPS})"),
    argument("--stop-on-difference", action="store_true",
             help="with --watch: end the cell on all ranks at the step where they differ; it then"
             " waits for all ranks at each step that is compared"),
)  # fmt: skip


def _add_options(magic: Magic) -> Magic:
    for option in reversed(_WANTED):
        magic = option(magic)
    return magic


@contextmanager
def _watched(line: MagicCall) -> Iterator[None]:
    """Let the ranks watch the values of `--watch` while the cell runs; then show the result."""
    options = line.options
    if options.watch is None:
        if options.every or options.stop_on_difference:
            raise UsageError(
                "`--every` and `--stop-on-difference` go with `--watch`: `--watch model`."
            )
        yield
        return
    if options.no_wait:
        raise UsageError("`--watch`: what it found is shown after the cell: not with `--no-wait`.")
    expressions = [*dict.fromkeys(filter(None, map(str.strip, options.watch.split(","))))]
    if not expressions:
        raise UsageError(
            "`--watch`: name modules and optimizers, such as `--watch model,optimizer`."
        )
    line.pool.ensure(options, line.display)
    exchange = uuid.uuid4().hex[:8], line.ranks, options.stop_on_difference
    every = options.every or DEFAULT_WATCH_STEPS
    refused = line.call("watch.begin", expressions=expressions, every=every, exchange=exchange)
    if any(refused.values()):
        line.call("watch.end")  # ends the watch of ranks that did not refuse
        expression, why = next((e, w) for each in refused.values() for e, w in each.items())
        raise UsageError(
            f"`--watch {expression}`: `{expression}` is of type {why}. Name modules and "
            "optimizers, such as `--watch model,optimizer`."
        )
    try:
        yield
    finally:
        _show(line, expressions)


WATCH = CellOption(_add_options, _watched)


def _show(line: MagicCall, expressions: Sequence[str]) -> None:
    """Fetch the records of the ranks, and show the first difference, or that there is none."""
    display, ran = line.pool.display(), line.pool.last
    try:
        notes = {r: each for r, each in line.call("watch.end").items() if each is not None}
    except NbdistError as error:
        display.show_text(f"watch: nothing is known of this cell: {one_line(str(error))}")
        return
    divergence = Divergence(expressions, notes)
    if divergence.differs:
        if divergence.is_of_the_end and ran is not None:  # no rank has warned yet
            ran.transcript.warn(divergence.head())
            line.display.redraw_ended(ran.transcript, line.busy_world.engine.rank_table.log_files)
        _draw(line, divergence).show_on(display)
    else:
        display.show_text(divergence.agreement())


def _draw(line: MagicCall, divergence: Divergence) -> CommandOutput:
    """Draw a table of the parts that differed, and the facts that may be the cause.

    How far parts are apart is measured now, after the cell; the parts may have changed since the
    comparison.
    """
    from nbdist.tools.diff import distances

    rows: list[tuple[str, str, str]] = []
    for each in divergence.comparisons():
        try:
            for reference, (others, paths) in each.to_compare().items():
                apart = distances(line, each.title, reference, others, paths)
                # Leave out distances of 0: such parts are equal now, but differed in the cell.
                each.add_distances({r: {p: d for p, d in by.items() if d.differing}
                           for r, by in apart.items()})  # fmt: skip
        except NbdistError:  # such as for a lost rank: show no distances
            pass
        rows += [(divergence.name(each.title, p), kind, ranks) for p, kind, ranks in each.rows()]
    titles, more = (
        ("part", "type", "ranks, and how far apart they are now"),
        len(rows) - MAX_WATCH_ROWS,
    )
    last = [(f"and {more} more", "", "")] if more > 0 else []
    shown = table(divergence.head(), [titles, *rows[:MAX_WATCH_ROWS], *last])
    return below([shown, block("\n".join(divergence.facts_before()))])


@dataclass
class Divergence:
    """The records of all ranks about the watched `expressions`, and the difference that they show.

    If a difference was found, the records have no facts and inputs of later steps.
    """

    expressions: Sequence[str]
    noted: Mapping[int, Watched]

    @property
    def step(self) -> int:
        """The step after which ranks differ.

        If no rank found a difference, it is the last step that all ranks have made.
        """
        steps = [each.found for each in self.noted.values() if each.found]
        return min(steps) if steps else min(each.steps for each in self.noted.values())

    @property
    def is_of_the_end(self) -> bool:
        """Whether the ranks found no difference while the cell ran.

        If so, their parts at the end of the cell are compared.
        """
        return not any(each.found for each in self.noted.values())

    @property
    def differs(self) -> bool:
        """Whether ranks differ, in a comparison while the cell ran, or at its end.

        At the end, ranks are compared only if all have made the same number of steps, and at least
        one.  After different numbers of steps their parts are different anyway.
        """
        if not self.noted or not self.is_of_the_end:
            return bool(self.noted)
        steps = {each.steps for each in self.noted.values()}
        if len(steps) > 1 or steps == {0}:
            return False
        return any(len(fold_ranks(self._digests(each))) > 1 for each in self.expressions)

    def _digests(self, expression: str) -> dict[int, Any]:
        return {
            rank: tuple((p, x.kind, x.digest) for p, x in each.parts.get(expression, {}).items())
            for rank, each in self.noted.items()
        }

    def head(self) -> str:
        """Return a line: `watch: after step 50 rank 2 differs from ranks 0-1,3`."""
        when = "at the end, after" if self.is_of_the_end else "after"
        digests = [self._digests(each) for each in self.expressions]
        alike = {rank: tuple(each[rank] for each in digests) for rank in self.noted}
        text = difference(alike) or "ranks differed; in what is no longer known"
        return f"watch: {when} step {self.step} {text}"

    def comparisons(self) -> Iterator[Comparison]:
        """Yield the comparison of each watched expression whose parts are known."""
        # Imported late: `%load_ext`, which must be fast, loads this file for its option.
        from nbdist.tools.diff import Comparison

        for expression in self.expressions:
            parts = {rank: each.parts.get(expression, {}) for rank, each in self.noted.items()}
            if any(parts.values()):
                yield Comparison(expression, {rank: Looked(of) for rank, of in parts.items()})

    def name(self, expression: str, path: str) -> str:
        """Return the name by which people know a part: `optimizer: exp_avg of layer1.weight`.

        A state of an optimizer is named by its parameter only if the module of the parameter is
        watched too; otherwise the name has the path of the part.
        """
        state, _, key = path.partition("]")
        names = next(iter(self.noted.values())).names
        if parameter := names.get(f"{expression} {state}]"):
            return f"{expression}: {key.strip(_KEY)} of {parameter}"
        return f"{expression}: {path}"

    def agreement(self) -> str:
        """Return a line on how often ranks were compared and equal, and on parts left out."""
        if not self.noted:
            return "watch: nothing was watched on any rank"
        steps = {rank: each.steps for rank, each in self.noted.items()}
        parts = max(sum(map(len, each.parts.values())) for each in self.noted.values())
        times = min(each.times for each in self.noted.values())
        if not max(steps.values()):
            phrases = [
                "watch: no step was counted: no optimizer of what is watched made one, and "
                "`nbdist.watch()` was not called"
            ]
        elif not times:
            phrases = [f"watch: {', '.join(self.expressions)}: not compared"]
        else:
            alike = f"the same on {name_ranks(self.noted)}" if len(self.noted) > 1 else "one rank"
            much = f"{count(parts, 'part')} " if parts else ""  # the number is 0 after a problem
            phrases = [
                f"watch: {', '.join(self.expressions)}: {much}{alike}, compared after {times} of "
                f"{count(min(steps.values()), 'step')}"
            ]
        if len({*steps.values()}) > 1:
            phrases.append(_by_ranks(steps, lambda each: f"made {count(each, 'step')}"))
        return " · ".join([*phrases, *self._left_out()])

    def _left_out(self) -> Iterator[str]:
        if sharded := max(each.sharded for each in self.noted.values()):
            yield f"{count(sharded, 'sharded part')} not compared: each rank has its own"
        problems = {rank: each.problem for rank, each in self.noted.items() if each.problem}
        for problem, ranks in fold_ranks(problems).items():
            yield f"{name_ranks(ranks)} stopped comparing: {problem}"
        for expression in self.expressions:
            refused = {r: n.refused[expression] for r, n in self.noted.items()
                       if expression in n.refused}  # fmt: skip
            if refused:  # if ranks have different reasons, only the first reason is shown
                why = one_line(next(iter(refused.values())), 90)
                yield f"`{expression}` on {name_ranks(refused)} was not compared: {why}"

    # --- facts that differed before the parts ---------------------------------------------------

    def facts_before(self) -> Iterator[str]:
        """Yield a heading, then a line for each fact that began to differ before the parts did.

        If the first comparison has found the difference, all facts that differ have a line.  If no
        fact has a line, a line says so.  Last come lines about what was not compared.
        """
        compared = [step for step, _ in self._facts]
        equal = [step for step in compared if step < self.step]
        lines = [*self._inputs(), *self._generators(), *self._modules(), *self._collectives()]
        if equal:
            yield f"all were equal after step {equal[-1]}; what else came to differ until then:"
        else:
            yield "this is the first comparison; what else differs, as it may on purpose:"
        yield from (f"  {each}" for each in lines)
        if not lines:
            yield (
                "  none of these: the data that forward got, random states, which modules ran, "
                "the number of collectives"
            )
        yield from self._left_out()

    @cached_property
    def _facts(self) -> list[tuple[int, dict[int, Facts]]]:
        """By step the facts of all ranks, the oldest step first.

        Steps are left out if a rank has no facts of them.
        """
        by_step: dict[int, dict[int, Facts]] = {}
        for rank, each in self.noted.items():
            for facts in each.facts:
                by_step.setdefault(facts.step, {})[rank] = facts
        return [(s, by_step[s]) for s in sorted(by_step) if len(by_step[s]) == len(self.noted)]

    def _first_difference(self, values: Iterable[Stepped]) -> Stepped | None:
        """Return the first step at which ranks began to differ in a fact, with the fact's values.

        Return None if the ranks have always been equal, or have always differed.  However, if parts
        differ already in the first comparison, a fact that has always differed may be the cause, so
        return its first step.
        """
        was_equal = not any(step < self.step for step, _ in self._facts)
        for step, by_rank in values:
            is_equal = len({*by_rank.values()}) == 1
            if was_equal and not is_equal:
                return step, by_rank
            was_equal = is_equal
        return None

    def _generators(self) -> Iterator[str]:
        states = [(s, {r: f.generators for r, f in of.items()}) for s, of in self._facts]
        names = (name for _, of in states for each in of.values() for name in each)
        names_by_text: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            values = ((s, {r: each.get(name, "") for r, each in of.items()}) for s, of in states)
            if difference_at := self._first_difference(values):
                text = f"from step {difference_at[0]} on: {difference(difference_at[1])}"
                names_by_text.setdefault(text, []).append(name)
        for text, which in names_by_text.items():
            yield f"random state of {', '.join(which)}, {text}"

    def _modules(self) -> Iterator[str]:
        first = self._first_difference(
            (s, {r: f.ran for r, f in of.items()}) for s, of in self._facts
        )
        if first is None:
            return
        ran = first[1]
        every, common = frozenset().union(*ran.values()), frozenset.intersection(*ran.values())
        for module in sorted(every - common)[:MAX_NAMED_MODULES]:
            ranks = [rank for rank, names in ran.items() if module in names]
            yield f"`{module}` ran forward in step {first[0]} on {name_ranks(ranks)} alone"

    def _collectives(self) -> Iterator[str]:
        counts = [(s, {r: f.collectives for r, f in of.items()}) for s, of in self._facts]
        if first := self._first_difference(counts):
            yield f"collectives begun until step {first[0]}: {_by_ranks(first[1], str)}"
            return
        rates = [
            (min(new.values()) - min(old.values())) / (step - before)
            for (before, old), (step, new) in pairwise(counts)
        ]
        # The first rate is left out, since DDP begins more collectives in its first steps.
        if len(rates) > 2 and rates[-1] < min(rates[1:-1]):
            yield (
                f"all ranks began fewer collectives: {rates[-1]:.3g} a step in the last "
                f"{count(counts[-1][0] - counts[-2][0], 'step')}, {rates[-2]:.3g} before"
            )

    def _inputs(self) -> Iterator[str]:
        by_call: dict[tuple[int, int], dict[int, tuple[int, str]]] = {}
        for rank, each in self.noted.items():
            numbers: Counter[int] = Counter()
            for given in each.inputs:
                call = given.step, numbers[given.step]
                by_call.setdefault(call, {})[rank] = given.digest, given.shapes
                numbers[given.step] += 1
        calls = [
            (call[0], by_call[call])
            for call in sorted(by_call)
            if len(by_call[call]) == len(self.noted)
        ]
        shapes = [(step, {r: shape for r, (_, shape) in of.items()}) for step, of in calls]
        if first := self._first_difference(shapes):
            yield f"shapes of {DATA}, from step {first[0]} on: {_by_ranks(first[1], str)}"
        elif first := self._first_difference(calls):
            yield f"{DATA}, from step {first[0]} on: {difference(first[1])}"


def _by_ranks(values: Mapping[int, Any], text: Callable[[Any], str]) -> str:
    return ", ".join(f"{name_ranks(r)} {text(each)}" for each, r in fold_ranks(values).items())
