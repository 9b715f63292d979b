"""A value of the notebook's cut into parts, one for each rank."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from nbdist.errors import UsageError
from nbdist.output.wording import fold_ranks
from nbdist.values.payload import INLINE_LIMIT, Payload, packing, size_of
from nbdist.values.pickling import Pickled, pickle
from nbdist.values.shared_memory import Steps
from nbdist.values.unpicklable import PICKLING_ERRORS, fails_in, unshippable
from nbdist.wire.task import Call, Task
from nbdist.words import name_ranks
from nbdist.world import parts
from nbdist.world.names import check_are_free
from nbdist.world.session import Session


class Scatter:
    """Parts on their way to ranks; owns the memory that they travel in.

        with closing(Scatter(session, "x", value)) as scatter:
            for copied in scatter.packing():
                ...
            bind(session, *scatter.tasks())

    Raises UsageError for what cannot be cut, VariableNotSent for what cannot travel.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        value: Any,
        ranks: Sequence[int] | None = None,
        dim: int | None = None,
    ) -> None:
        if not name.isidentifier():
            raise UsageError(f"`{name}`: name the parts: `--as x`.")
        check_are_free([name], "`%dist_scatter`")
        self.name = name
        self.ranks = session.everyone if ranks is None else tuple(ranks)
        self._session = session
        self._memory = ExitStack()
        self._payloads: dict[int, Payload] = {}
        cut = dict(zip(self.ranks, parts.split(name, value, len(self.ranks), dim), strict=True))
        self._sizes = {rank: parts.length_of(part, dim) for rank, part in cut.items()}
        self._unit = parts.unit_of(value, dim)
        self._frames = {rank: self._pickle(part).frames for rank, part in cut.items()}
        self.bytes = sum(map(size_of, self._frames.values()))

    def __repr__(self) -> str:
        return f"<Scatter {self}>"

    def __str__(self) -> str:
        """`x: 10 rows, 3 to each of ranks 0-1, 2 to each of ranks 2-3`."""
        shares = fold_ranks(self._sizes).items()
        said = (f"{n} to {'each of ' if len(r) > 1 else ''}{name_ranks(r)}" for n, r in shares)
        return f"{self.name}: {sum(self._sizes.values())} {self._unit}, {', '.join(said)}"

    def packing(self) -> Generator[int, None, None]:
        """Copy each part once, to where its rank will find it; yields how many bytes are done."""
        # What is small goes in the message, which all ranks get.
        limit, done = INLINE_LIMIT // len(self.ranks), 0
        for rank, frames in self._frames.items():
            with closing(Steps(packing(frames, limit))) as steps:
                for copied in steps:
                    yield done + copied
            self._payloads[rank], segment = steps.made
            if segment is not None:
                self._memory.callback(segment.close)
            done += size_of(frames)

    def tasks(self) -> tuple[Task, Call]:
        """Have each rank take its part, then have all bind it: for `nbdist.world.all_or_none`."""
        arguments = {"name": self.name, "parts": self._payloads}
        take = self._session.task(Call("values.scatter", arguments), ranks=self.ranks)
        return take, Call("values.bind_scattered")

    def close(self) -> None:
        """Release the memory that they travel in, which the ranks have mapped by then."""
        self._memory.close()

    def _pickle(self, part: Any) -> Pickled:
        namespace = self._session.namespace
        try:
            return pickle(part, namespace, exact=True)
        except PICKLING_ERRORS as problem:
            raise unshippable(self.name, part, fails_in(namespace), problem) from None
