"""What ranks have shown and somebody has not got yet, bounded in size."""

from __future__ import annotations

from nbdist.output.events import Display, InputRequest, Moved, Output, Record, Skipped, Text, Update

TEXT_KEPT = 4 << 20
"""Characters per rank that wait for a slow notebook; older ones are only in the log file."""

JOINED_AT_MOST = 1 << 16

Item = tuple[int, str, Output]


class Backlog:
    """Outputs of all ranks, each rank's in order; the oldest make room for new ones.

    Of each rank's text it keeps `text`, of what was displayed `shown` characters; with None
    as many as there are.  What is left out is said in its place.  With `is_long` it is for hours:
    a rank's text is joined, whatever others have said meanwhile.
    """

    def __init__(
        self, text: int = TEXT_KEPT, shown: int | None = None, *, is_long: bool = False
    ) -> None:
        self._items: list[Item] = []
        self._last: dict[int, int] = {}  # where each rank's last item is
        self._is_long = is_long
        self._characters: dict[int, int] = {}
        self._most_text, self._most_shown = text, shown
        self._shown = 0

    def __repr__(self) -> str:
        return f"<Backlog of {len(self._items)} items>"

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them, the oldest first."""
        return tuple(self._items)

    def add(self, rank: int, cell_id: str, output: Output) -> None:
        """Take one more."""
        match output:
            case Text():
                self._add_text(rank, cell_id, output)
                return
            case Update():
                self._drop_older(rank, output)
        self._append(rank, cell_id, output)
        if self._most_shown is not None:
            self._shown += size_of(output)
            if self._shown > self._most_shown:
                self._leave_out(self._most_shown // 2)

    def answered(self, rank: int, number: int) -> None:
        """Leave out what this rank wanted typed, by its number: it has been."""
        self._keep(
            [
                item
                for item in self._items
                if not (
                    item[0] == rank
                    and isinstance(item[2], InputRequest)
                    and item[2].number == number
                )
            ]
        )

    def take(self, most: int) -> list[Item]:
        """Take the oldest away, of so many characters, and those of the one that exceeds it."""
        count = size = 0
        while count < len(self._items) and size < most:
            size += size_of(self._items[count][2])
            count += 1
        batch = self._items[:count]
        self._keep(self._items[count:])
        self._characters.clear()
        for rank, _, output in self._items:
            if isinstance(output, Text):
                self._characters[rank] = self._characters.get(rank, 0) + len(output.text)
        return batch

    def _append(self, rank: int, cell_id: str, output: Output) -> None:
        self._last[rank] = len(self._items)
        self._items.append((rank, cell_id, output))

    def _keep(self, items: list[Item]) -> None:
        self._items = items
        self._last = {item[0]: at for at, item in enumerate(items)}

    def _add_text(self, rank: int, cell_id: str, output: Text) -> None:
        at = self._last.get(rank, -1) if self._is_long else len(self._items) - 1
        match self._items[at] if at >= 0 else None:
            case (last_rank, last_cell, Text(stream, text)) if (last_rank, last_cell, stream) == (
                rank,
                cell_id,
                output.stream,
            ) and len(text) < JOINED_AT_MOST:
                self._items[at] = rank, cell_id, Text(stream, text + output.text)
            case _:
                self._append(rank, cell_id, output)
        self._characters[rank] = self._characters.get(rank, 0) + len(output.text)
        if self._characters[rank] > self._most_text:
            self._skip_older(rank)

    def _skip_older(self, rank: int) -> None:
        """Replace the older half of a rank's text by a note of its size."""
        too_many = self._characters[rank] - self._most_text // 2
        kept: list[Item] = []
        for item in self._items:
            item_rank, cell_id, output = item
            if item_rank == rank and isinstance(output, Text) and too_many > 0:
                cut = min(too_many, len(output.text))
                too_many -= cut
                self._characters[rank] -= cut
                lines = output.text.count("\n", 0, cut)
                _add_skipped(kept, item, Skipped(output.stream, cut, lines))
                if output.text[cut:]:
                    kept.append((rank, cell_id, Text(output.stream, output.text[cut:])))
            else:
                kept.append(item)
        self._keep(kept)

    def _drop_older(self, rank: int, update: Update) -> None:
        """Keep of several updates of one display only the last, the only one to be seen."""
        self._keep(
            [
                (item_rank, cell_id, output)
                for item_rank, cell_id, output in self._items
                if not (
                    item_rank == rank
                    and isinstance(output, Update)
                    and output.display_id == update.display_id
                )
            ]
        )

    def _leave_out(self, most: int) -> None:
        """Leave the oldest out of what is no text, until there is no more than this."""
        self._shown = sum(size_of(each[2]) for each in self._items if not _is_text(each))
        kept: list[Item] = []
        for item in self._items:
            rank, cell_id, output = item
            if self._shown <= most or not isinstance(output, Display | Update | Record | Moved):
                kept.append(item)
                continue
            self._shown -= size_of(output)
            if isinstance(output, Display):
                note = f"[what was displayed here is left out: {size_of(output):,} characters]\n"
                kept.append((rank, cell_id, Text("stdout", note)))
        self._keep(kept)


def _add_skipped(kept: list[Item], item: Item, skipped: Skipped) -> None:
    """Add a note of what was skipped, to the one before it if that is of the same."""
    rank, cell_id, _ = item
    match kept[-1] if kept else None:
        case (last_rank, last_cell, Skipped(stream, characters, lines)) if (
            last_rank,
            last_cell,
            stream,
        ) == (rank, cell_id, skipped.stream):
            both = Skipped(stream, characters + skipped.characters, lines + skipped.lines)
            kept[-1] = rank, cell_id, both
        case _:
            kept.append((rank, cell_id, skipped))


def _is_text(item: Item) -> bool:
    return isinstance(item[2], Text)


def size_of(output: Output) -> int:
    """Count characters, of what can have many."""
    match output:
        case Text(text=text):
            return len(text)
        case Display(data=data) | Update(data=data):
            return sum(len(said) for said in data.values() if isinstance(said, str))
        case Record(message=message, exception=exception):
            return len(message) + len(exception) + 100
        case Moved():
            return 100
        case _:
            return 0
