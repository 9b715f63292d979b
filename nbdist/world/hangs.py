"""Writes texts about ranks that wait: where they are, and why they wait in vain.

Runs in the notebook's process and does no I/O.  `nbdist.world.wait_texts` and
`nbdist.world.releases` call this module, and `nbdist.world.recovery` after a task has failed.
`nbdist.agent.supervisor` decides whether ranks can ever go on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.fingerprint import cell_line_of, normal
from nbdist.output.wording import fold_ranks
from nbdist.wire.messages import UnresponsiveHosts
from nbdist.wire.places import (
    Begun,
    RankPosition,
    Stack,
    find_mismatch,
    is_call_mismatch,
    tensors_of,
)
from nbdist.wire.work import Script
from nbdist.words import name_ranks, one_line
from nbdist.world.states import Machines

Who = Callable[[Iterable[int]], str]
"""A function that names ranks, with their machines if the world has several."""

LONGEST_CODE = 60  # characters of a line of code in a text

RELEASED_ERROR = "Released"  # `Failure.name` if an abort or another rank ended a rank's collective

DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64"},
    **{"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
"""The names of dtypes in Python, by their names in C++.

Left out are dtypes such as `Bool`, whose name in Python is the same in small letters.
"""


# --- whether collectives match ------------------------------------------------------------


def verdict(places: Mapping[int, RankPosition]) -> str:
    """Return a sentence that says why ranks wait for each other for ever.

    Write `rank 1 is in barrier (line 2), rank 0 in all_reduce (line 3): these calls do not ...`.
    """
    if not is_call_mismatch(places):
        return differing(places) or f"{_places_text(places)}: all ranks wait for each other"
    begun = find_mismatch(places, lambda each: each.name)
    text = f"{_places_text(places)}: these calls do not match and would wait forever"
    if any(each.is_done or places[rank].operation != each.name for rank, each in begun.items()):
        text += f"; the first that differ: {_by_ranks_text(begun, lambda each: each.name)}"
    return text


def differing(places: Mapping[int, RankPosition]) -> str:
    """Return a text about the first collective in which ranks have different tensors.

    Write `all_reduce (line 2), sizes differ: rank 0 [2], rank 1 [3]`.  If ranks have completed the
    collective, the text also says that their results are or may be wrong.  Return "" if no
    collective differs between ranks, or if ranks called different operations.
    """
    begun = find_mismatch(places, tensors_of)
    if not begun or len({each.name for each in begun.values()}) > 1:
        return ""
    name = next(iter(begun.values())).name
    spots = {_spot(place) for place in places.values() if place.operation == name}
    line = spots.pop().removeprefix(name) if len(spots) == 1 else ""
    if len({each.dtypes for each in begun.values()}) == 1:
        differ = f"sizes differ: {_by_ranks_text(begun, lambda each: each.sizes)}"
    elif len({each.sizes for each in begun.values()}) == 1:
        differ = f"dtypes differ: {_by_ranks_text(begun, _dtypes)}"
    else:
        differ = f"sizes and dtypes differ: {_by_ranks_text(begun, _tensors_text)}"
    text = f"{name}{line}, {differ}"
    if done := [rank for rank, each in begun.items() if each.is_done]:
        # An `all_` collective has no root, so all its results are wrong.  Another collective may
        # have a root, which is not known here, and whose result may be right.
        verb = "is" if name.startswith("all_") else "may be"
        text += f"; the result on {name_ranks(done)} {verb} wrong"
    return text


def why_aborted(
    aborted: Mapping[int, RankPosition],
    all_places: Mapping[int, RankPosition],
    ran: Collection[int],
    failed: Collection[int],
    world_size: int,
) -> str:
    """Return a text that says why the collectives of some ranks were aborted.

    `aborted` says where these ranks waited, and `all_places` where all ranks were at that time.
    `ran` are the ranks of the task, and `failed` those of them that failed or have not finished.
    """
    finished = set(ran) - set(failed)
    if len(aborted) == world_size or is_call_mismatch(all_places):
        also = f"; {name_ranks(finished)} finished the cell" if finished else ""
        return verdict(all_places) + also
    if difference := differing(all_places):
        return difference
    if finished:
        return f"{waits_text(aborted)}; {name_ranks(finished)} finished the cell without it"
    outside = set(range(world_size)) - set(ran)
    if not outside:
        return waits_text(aborted)
    verb = "does" if len(outside) == 1 else "do"
    return f"{waits_text(aborted)}; {name_ranks(outside)} {verb} not run this cell"


def why_died(deaths: Mapping[int, Died], survivors: Mapping[int, RankPosition]) -> str:
    """Return why gloo ended a rank that received more than its tensor holds; "" for other deaths.

    `survivors` says where the other ranks are.  If possible, the text names the collective and the
    sizes of the tensors.
    """
    rank = min((rank for rank, died in deaths.items() if died.received_too_much), default=None)
    if rank is None:
        return ""
    text = f"Rank {rank} received more than its tensor holds: sizes or dtypes differ between ranks"
    last = {other: place.begun[-1] for other, place in survivors.items() if place.begun}
    begun = find_mismatch(survivors, tensors_of) or last
    if begun and len({(each.name, each.number) for each in begun.values()}) == 1:
        text += f" in {next(iter(begun.values())).name} ({_by_ranks_text(begun, _tensors_text)})"
    return f"{text}. With `--debug` that is found before."


def _dtypes(each: Begun) -> str:
    return " ".join(DTYPES.get(name, name.lower()) for name in each.dtypes.split())


def _tensors_text(each: Begun) -> str:
    return f"{_dtypes(each)} {each.sizes}".strip()


def _by_ranks_text(begun: Mapping[int, Begun], text: Callable[[Begun], str]) -> str:
    """Write the `text` of each rank's collective, equal texts once: `rank 0 [2], ranks 1-3 [3]`."""
    texts = {rank: text(each) for rank, each in begun.items()}
    return ", ".join(f"{name_ranks(ranks)} {value}" for value, ranks in fold_ranks(texts).items())


def _places_text(places: Mapping[int, RankPosition]) -> str:
    """Write `ranks 1-2 are in barrier (line 2), rank 0 in all_reduce (line 3)`."""
    texts = {rank: _spot(place) for rank, place in places.items() if place.operation}
    parts = sorted(fold_ranks(texts).items(), key=lambda part: places[part[1][0]].line)
    if not parts:
        return "their collectives are not known"
    verb = "is" if len(parts[0][1]) == 1 else "are"
    first, *others = (f"{name_ranks(ranks)} {{}}in {spot}" for spot, ranks in parts)
    return ", ".join([first.format(f"{verb} "), *(each.format("") for each in others)])


def _spot(place: RankPosition) -> str:
    line = f"{place.file} line {place.line}".strip() if place.line else place.file
    return f"{place.operation} ({line})" if line else place.operation


# --- texts --------------------------------------------------------------------------------


def waits_text(places: Mapping[int, RankPosition], source: str = "") -> str:
    """Write `ranks 0-2 wait in all_reduce, line 6 · rank 3 is in line 5: time.sleep(600)`.

    `source` is the source of the cell, from which lines are quoted.
    """
    groups = fold_ranks({rank: _activity(place, source) for rank, place in places.items()})
    return " · ".join(
        f"{name_ranks(ranks)} {_with_verb(ranks, doing)}" for doing, ranks in groups.items()
    )


def silent_text(silent: UnresponsiveHosts) -> str:
    """Write `hosta does not respond and counts as lost after 10 s`; "" for no machine."""
    if not silent.hosts:
        return ""
    many = len(silent.hosts) > 1
    does = "do not respond and count" if many else "does not respond and counts"
    return f"{' and '.join(silent.hosts)} {does} as lost after {silent.timeout:g} s"


def stalled_text(places: Mapping[int, RankPosition], machines: Machines) -> str:
    """Write `the network between hosta and hostb is stalled`; "" if no network is.

    An address is replaced by the name of its machine if that is known.
    """
    pairs = {rank: place.stalled for rank, place in places.items() if place.stalled}
    names = {address: machines.name(rank) for rank, each in pairs.items() for address, _ in each}
    hosts = {names.get(end, end) for each in pairs.values() for pair in each for end in pair}
    return f"the network between {' and '.join(sorted(hosts))} is stalled" if hosts else ""


def released_text(places: Mapping[int, RankPosition]) -> str:
    """Write `ranks 0-2 were waiting in all_reduce (line 6) and were released`."""
    groups = fold_ranks({rank: _spot(place) for rank, place in places.items()})
    waited = (f"{name_ranks(each)} {_was(each)} waiting in {spot}" for spot, each in groups.items())
    return f"{', '.join(waited)} and {_was(places)} released"


def _was(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def shorten_error(
    failure: Failure,
    aborted: RankPosition | None,
    script: Script | None,
    errors: Iterable[RankError],
) -> Failure:
    """Return a short `Failure` in place of the error of a rank whose connections were closed.

    If an abort has closed the connections, `aborted` says where the rank waited, and the result
    reads, for example, `Released: waited in all_reduce (cell line 7)`.

    If another rank has closed them, `aborted` is None, and the result reads
    `Released: waited for a rank that died (cell line 7)`.  Then `errors`, the errors of all ranks,
    says how that rank ended, and the traceback of `failure` says in which line this rank waited.
    `script` is the script that the task runs, None for a cell.
    """
    if aborted is not None:
        file, number, wait = aborted.file or "cell", aborted.line, f"in {aborted.operation}"
    else:
        wait = f"for a rank that {_peer_end(errors)}"
        file, number = "cell", cell_line_of(failure)
        if script is not None:
            file, text = os.path.basename(script.file), strip("\n".join(failure.traceback))
            matches = re.findall(rf"File {re.escape(script.file)}:(\d+)", text)
            number = int(matches[-1]) if matches else 0
    wait = f"waited {wait}" + (f" ({file} line {number})" if number else "")
    return Failure(
        RELEASED_ERROR, wait, (f"{RELEASED_ERROR}: {wait}",), failure.time_ns, connections="ended"
    )


def _peer_end(errors: Iterable[RankError]) -> str:
    causes = [each for each in errors if isinstance(each, Died) or each.connections != "ended"]
    if not causes:  # for example if a rank has destroyed its process group
        return "had closed its connection"
    if any(isinstance(each, Died) for each in causes):
        return "died"
    timed_out = any(
        isinstance(each, Failure) and each.connections == "timed out" for each in causes
    )
    return "had timed out" if timed_out else "had failed"


def _activity(place: RankPosition, source: str = "") -> str:
    """Write what a rank does: `wait in all_reduce, line 6` or `in train.py line 5: sleep(600)`."""
    line = f"line {place.line}" if place.line else "no line of the cell"
    if place.file:
        line = f"{place.file} {line}" if place.line else place.file
    if place.is_stopped:
        return "stopped by a signal"
    if place.holds_gil:
        where = f", {line}" if place.line or place.file else ""
        return f"busy in C code that holds the GIL{where}"
    if place.is_debugged:
        return f"wait in the debugger, {line}"
    if place.operation:
        return f"wait in {place.operation}, {line}"
    if place.asks:
        return f"wait for your input, {line}"
    if place.is_cleaning_up:
        return f"cleaning up after Stop, {line}"
    lines = source.splitlines()[max(0, place.line - 1) : place.line]
    lines = [place.code] if place.code else lines
    return f"in {line}" + "".join(f": {one_line(text, LONGEST_CODE)}" for text in lines)


def doing_of(ranks: Sequence[int], place: RankPosition, code: str) -> str:
    """Write what `ranks`, which are all in the same line, do: `waits in all_reduce, line 6`.

    `code` is the source text of that line.
    """
    doing = _activity(place, "\n" * (place.line - 1) + code)
    return _with_verb(ranks, doing).removeprefix("is ").removeprefix("are ")


class Alike(NamedTuple):
    """Ranks whose stacks are equal except for addresses, devices and process ids.

    `doing` says what the ranks do, `first` is the first rank's stack, and `lines` show its calls.
    """

    ranks: tuple[int, ...]
    doing: str
    lines: list[str]
    first: Stack

    def named(self, who: Who) -> str:
        """Write `ranks 0-2 same`, or `rank 3` for a single rank."""
        return who(self.ranks) + (" same" if len(self.ranks) > 1 else "")


def group_stacks(stacks: Iterable[Stack]) -> list[Alike]:
    """Return groups of ranks whose stacks are equal but for addresses, devices and process ids."""
    same: dict[str, list[Stack]] = {}
    for stack in sorted(stacks, key=attrgetter("rank")):
        text = "\n".join([_title(stack, (stack.rank,)), *_calls(stack)])
        same.setdefault(normal(text.replace(str(stack.pid), "<pid>")), []).append(stack)
    groups = ((tuple(each.rank for each in group), group[0]) for group in same.values())
    return [Alike(ranks, _title(first, ranks), _calls(first), first) for ranks, first in groups]


def stacks_text(groups: Iterable[Alike], who: Who = name_ranks) -> list[str]:
    """Return lines that show the stack of each group of ranks, below a heading for the group.

    A heading is, for example, `── ranks 0-2 same · wait in all_reduce, line 7 ──`.
    """
    headed = ([f"── {each.named(who)} · {each.doing} ──", *each.lines] for each in groups)
    return [*chain.from_iterable(headed)]


def _title(stack: Stack, ranks: tuple[int, ...]) -> str:
    """Write what `ranks` with this stack do, as `wait in all_reduce, line 7`, or only `idle`."""
    if stack.state == "busy" or stack.place.is_stopped or stack.place.holds_gil:
        code = stack.frames[0].code if stack.frames and stack.frames[0].is_cell else ""
        return doing_of(ranks, stack.place, code)
    return stack.state


def _calls(stack: Stack) -> list[str]:
    lines = [line for frame in stack.frames for line in frame.lines]
    if stack.place.is_stopped:
        lines.append(f"  `kill -CONT {stack.pid}` resumes it")
    return [*lines, *([f"  {stack.problem}"] if stack.problem else [])]


def _with_verb(ranks: Sequence[int], doing: str) -> str:
    if doing.startswith("wait"):
        return doing.replace("wait", "waits", 1) if len(ranks) == 1 else doing
    return f"{'is' if len(ranks) == 1 else 'are'} {doing}"
