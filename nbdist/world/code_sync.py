"""Keeping the notebook's folder the same on all nodes that do not share it: `--sync-code`.

Runs in the notebook, on the thread of the session.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nbdist.errors import CodeNotSent
from nbdist.wire.code_tree import CodeFile, Digest, Landmark, digest_of, parts
from nbdist.wire.messages import CodeHeld, GetCode, PutCode, Reply, Request, Starting
from nbdist.world.code_listing import CodeListing

TRIES = 3
"""As many times as files may change while they are being sent."""

LANDMARKS = 3
LANDMARKS_LOOKED_AT = 100
"""Files by which a node tells whether it shares the folder, and how many these are taken from."""


class Asks(Protocol):
    """What calls a node: `Link.calling`."""

    def __call__(self, request: Request) -> Generator[Starting, None, Reply]:
        """Return its reply at the end, and come round now and then."""


class CodeSync:
    """The code in a folder, as the nodes of a world have it.

    `is_shared` once all nodes have said that they see the very same folder.
    """

    def __init__(self, folder: Path) -> None:
        self.listing = CodeListing(folder)
        self.is_shared = False
        self._sent: Mapping[str, CodeFile] | None = None
        self._told = ""

    def __repr__(self) -> str:
        state = "shared" if self.is_shared else "in sync" if self._sent else "not sent"
        return f"<CodeSync {self.listing} {state}>"

    def take_note(self) -> str:
        """Return what is to be said of files that stay here, where it is new; else ""."""
        said = "" if self.is_shared else str(self.listing.left_out)
        before, self._told = self._told, said
        return said if said != before else ""

    def bringing(self, asks: Asks, *, anew: bool = False) -> Generator[Starting, None, None]:
        """Bring what has changed to all nodes; with `anew` they are asked what they have.

        Raises CodeNotSent, and what the link raises.
        """
        for _ in range(TRIES):
            try:
                self.listing.look()
            except OSError as error:
                raise CodeNotSent("", f"{self.listing.folder}: {error.strerror}") from None
            if self._sent == self.listing.files and not anew:
                return
            if (yield from self._bring(asks)):
                return
        raise CodeNotSent("", "files in it keep changing")

    def _bring(self, asks: Asks) -> Generator[Starting, None, bool]:
        """Bring the files as they were at the last look; say whether they still were."""
        files = self.listing.files
        held = yield from asks(GetCode(self._landmarks(), files))
        assert isinstance(held, CodeHeld)
        self._sent = None
        if held.problem:
            raise CodeNotSent(held.host, held.problem)
        if held.lacks or not held.is_shared:
            contents = self._contents(held.lacks)
            for part in parts(files, contents):
                held = yield from asks(PutCode(part))
                assert isinstance(held, CodeHeld)
                if held.problem:
                    raise CodeNotSent(held.host, held.problem)
        if held.lacks:
            return False
        self.is_shared, self._sent = held.is_shared, files
        return True

    def _landmarks(self) -> tuple[Landmark, ...]:
        """Choose files that have not changed for long: other machines may be slow to see that."""
        found = []
        for path in [*self.listing.files][:LANDMARKS_LOOKED_AT]:
            with suppress(OSError):
                found.append(Landmark.of(str(self.listing.folder / path)))
        return tuple(sorted(found, key=lambda mark: mark.changed)[:LANDMARKS])

    def _contents(self, wanted: Iterable[Digest]) -> Iterator[tuple[Digest, bytes]]:
        """Read these files; one that has changed meanwhile is left out."""
        paths = {file.digest: path for path, file in self.listing.files.items()}
        for digest in wanted:
            content = self.listing.read(paths[digest])
            if content is not None and digest_of(content) == digest:
                yield digest, content
