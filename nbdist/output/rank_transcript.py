"""Collects the output of one rank in one cell: text, displays, and how the cell ended.

In the notebook's process `Transcript` has a `RankTranscript` for each rank.  Pure: no I/O here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from nbdist.output import events
from nbdist.output.ansi import strip
from nbdist.output.events import Skipped
from nbdist.output.fingerprint import Bar, Digest, OutputDigests, content_key, error_keys, key_of
from nbdist.output.mimes import WIDGET
from nbdist.output.screen import Screen, ScreenLine
from nbdist.output.wording import left_out_text

SHOWN_AT_MOST = 64 << 20
MAX_DISPLAYS = 2_000
"""The most displays of a rank that are kept, even if all of them are small."""

SHOWN = events.Text | events.Display | Skipped | events.Failure | events.Typed
"""The first of these outputs after `clear_output(wait=True)` removes all older output."""

RunState = Literal["waiting", "running", "ok", "failed", "died", "aborted"]
DisplayState: TypeAlias = RunState | Literal["released", "stopped"]
"""The state of a rank as a panel names it.

A rank is "released" if the failure of another rank has ended its cell, and "stopped" if Stop has
ended its cell.  These ranks are not called "failed", since they had no error of their own.
"""

FINAL_STATES: frozenset[RunState] = frozenset({"ok", "failed", "died", "aborted"})
FAILED: frozenset[RunState] = frozenset({"failed", "died"})


def display_state_of(error: events.RankError) -> DisplayState:
    """Return the display state of a rank whose cell ended with this error."""
    if isinstance(error, events.Died):
        return "died"
    if error.name == "KeyboardInterrupt":
        return "stopped"
    return "released" if error.connections == "ended" else "failed"


class RichDisplay(NamedTuple):
    """A display with its newest content, and digests that are compared between ranks.

    `content` is a hash of the whole content except for text/plain and the ids of widgets.
    """

    display: events.Display
    key: OutputDigests
    content: bytes

    @classmethod
    def of(cls, display: events.Display) -> RichDisplay:
        """Return a display with its digests, computed only here, since its content may be large."""
        # The digests leave out `is_result`: a panel shows results and displays in the same way.
        data = {kind: value for kind, value in display.data.items() if kind != "text/plain"}
        if WIDGET in data:  # the model's id differs on each rank, also for alike widgets
            data[WIDGET] = ""
        plain, content = repr(display.data.get("text/plain")), content_key(data)
        if not data:
            return cls(display, key_of(plain), content)
        # Other displays are alike only if they are equal: a figure cannot show `{0.1, 0.2}` in the
        # place of a number that differs between ranks, as a line of text can.
        same = content + plain.encode("utf-8", "surrogatepass")
        return cls(display, OutputDigests(same, same), content)

    @property
    def is_text(self) -> bool:
        """Whether text/plain is the only content of the display."""
        return [*self.display.data] == ["text/plain"]

    @property
    def plain(self) -> str:
        """The display as text, by `events.plain_of`."""
        return events.plain_of(self.display.data)


OutputPiece: TypeAlias = Screen | RichDisplay | Skipped
TranscriptEntry: TypeAlias = ScreenLine | RichDisplay | Skipped
"""A line, a display, or a `Skipped` with the number of lines that are only in the log."""


class RankTranscript:
    """The output of one rank in one cell, as a list of pieces in the order of their arrival.

    A piece is a `Screen` with printed text, a display, or a `Skipped` for text that was dropped.
    """

    def __init__(self, rank: int, keep_lines: int, most_shown: int = SHOWN_AT_MOST) -> None:
        """Create a transcript that keeps a limited amount of the newest output.

        The limits are about `keep_lines` lines, and `most_shown` characters of displays.
        """
        self.rank = rank
        self.state: RunState = "waiting"
        self.pieces: list[OutputPiece] = []
        self.failure: events.Failure | None = None
        self.died: events.Died | None = None
        self.done: events.Done | None = None
        self.input_request: events.InputRequest | None = None
        self.started: float | None = None
        self.finished: float | None = None
        self.version = 0
        self._keep = keep_lines
        self._most_shown = self._room = most_shown
        self._left_out = 0
        self._note: RichDisplay | None = None  # says how many displays are left out
        self._clear_next = False
        self._new_lines = 0  # about the lines written since `_forget_oldest` last ran
        self._body: tuple[int, OutputDigests] | None = None
        self._error_keys: tuple[object, tuple[str, ...]] = (None, ("",))

    @property
    def error(self) -> events.RankError | None:
        """The earlier of the rank's exception and its process's death; None if there is neither."""
        if self.failure is None or self.died is None:
            return self.failure or self.died
        return self.failure if self.failure.time_ns <= self.died.time_ns else self.died

    @property
    def display_state(self) -> DisplayState:
        """The rank's state as a panel names it, which can also be "released" or "stopped"."""
        if self.state == "failed" and isinstance(error := self.error, events.Failure):
            return display_state_of(error)
        return self.state

    @property
    def error_keys(self) -> tuple[str, ...]:
        """Texts by which the errors of two ranks are compared: alike errors share a text."""
        if self._error_keys[0] is not (error := self.error):
            self._error_keys = error, error_keys(self.rank, error)
        return self._error_keys[1]

    @property
    def seconds(self) -> float | None:
        """The seconds that the rank took for the cell; None until the rank has finished."""
        if self.done is not None:
            return self.done.seconds
        if self.started is None or self.finished is None:
            return None
        return self.finished - self.started

    @property
    def line_count(self) -> int:
        """The number of lines since the last `clear_output`, including lines that are not kept."""
        texts = [piece.line_count for piece in self.pieces if isinstance(piece, Screen)]
        return sum(texts) + sum(piece.lines for piece in self.pieces if isinstance(piece, Skipped))

    @property
    def rows(self) -> int:
        """The number of lines and displays of the rank, at least 1."""
        return max(1, self.line_count + len(self.displays))

    @property
    def displays(self) -> list[RichDisplay]:
        return [piece for piece in self.pieces if isinstance(piece, RichDisplay)]

    def has_display(self, display_id: str) -> bool:
        """Return True if a display with this id is kept, so that an update can replace it."""
        return any(shown.display.display_id == display_id for shown in self.displays)

    @property
    def visible_pieces(self) -> list[OutputPiece]:
        """All pieces except screens without a line, such as a screen with only a progress bar.

        Ranks whose output is alike (see `body`) have the same number of visible pieces.
        """
        return [piece for piece in self.pieces if not isinstance(piece, Screen) or piece.line_count]

    @property
    def bars(self) -> list[Bar]:
        """The rank's progress bars in their last states, the topmost bar first.

        A bar that a program draws again below a display is on two screens, and counts once.
        """
        later: dict[tuple[str, str], Bar] = {}
        kept = []
        for screen in reversed(self.screens):
            for row, bar in reversed(screen.bars()):
                redrawn = later.get(key := (bar.name, bar.total))
                if redrawn is None or screen.has_ended(row, bar) or not bar.is_before(redrawn):
                    kept.append(bar)
                later[key] = bar
        return kept[::-1]

    @property
    def has_had_bars(self) -> bool:
        """Whether the rank has drawn a progress bar that no `clear_output` has removed.

        A bar counts even if the program has erased it.
        """
        return any(screen.has_had_bars for screen in self.screens)

    @property
    def screens(self) -> list[Screen]:
        return [piece for piece in self.pieces if isinstance(piece, Screen)]

    @property
    def is_silent(self) -> bool:
        """Whether the rank has no lines, displays or error to show; progress bars do not count."""
        return not self.line_count and not self.displays and self.error is None

    @property
    def body(self) -> OutputDigests:
        """The digests by which the lines and displays of two ranks are compared.

        Errors are not included: `error_keys` compares errors.
        """
        if self._body is None or self._body[0] != self.version:
            digest = Digest()
            for piece in self.visible_pieces:
                digest.add_key(key_of(repr(piece)) if isinstance(piece, Skipped) else piece.key)
            self._body = self.version, digest.key
        return self._body[1]

    def tail(self, count: int) -> list[TranscriptEntry]:
        """Return the last `count` lines, displays and `Skipped` pieces, the oldest first."""
        entries: list[TranscriptEntry] = []
        for piece in reversed(self.pieces):
            if len(entries) >= count:
                break
            if isinstance(piece, Screen):
                entries.extend(reversed(piece.tail(count - len(entries))))
            else:
                entries.append(piece)
        return entries[::-1]

    def written(self, *, stderr: bool = False) -> str:
        """Return the kept lines of stdout, or of stderr, with progress bars and without colours."""
        lines = (line for screen in self.screens for line in screen.lines(bars=True))
        return "".join(f"{strip(line.text)}\n" for line in lines if line.stderr is stderr)

    def receive(self, output: events.Output, now: float) -> None:
        """Add an output of the rank; increase `version` if the output may change the panel."""
        self.begin(now)
        self.version += self._apply(output, now)

    def begin(self, now: float) -> None:
        """Mark a waiting rank as running, and set the rank's start to `now` if it has none."""
        if self.started is None:
            self.started = now
        if self.state == "waiting":
            self.state = "running"
            self.version += 1

    def _apply(self, output: events.Output, now: float) -> bool:
        if isinstance(output, events.Text) and not output.text:
            return False
        if self._clear_next and isinstance(output, SHOWN):
            self._clear(wait=False)
        match output:
            case events.Text(stream=stream, text=text):
                self._screen().write(stream, text)
                self._new_lines += text.count("\n")
            case events.Display():
                self.pieces.append(RichDisplay.of(output))
                self._count(output)
            case events.DisplayUpdate():
                return self._update(output)
            case Skipped():
                self._skip(output)
            case events.Clear(wait=wait):
                return self._clear(wait=wait)
            case events.Failure() if self.done is not None:
                self._show_error(output)
            case events.Failure():
                self.failure, self.state = output, "failed"
            case events.InputRequest():
                self.input_request = output  # kept, since `Typed` writes its prompt
            case events.Typed(text=text):
                prompt = self.input_request.prompt if self.input_request is not None else ""
                self._screen().write("stdout", f"{prompt}{text}\n")
                self.input_request = None
            case events.Died():
                self.input_request = None
                self.died, self.state, self.finished = output, "died", now
            case events.Done(status=status):
                self.input_request = None
                self.done, self.finished = output, now
                if status == "ok" and self.failure is not None:
                    self._show_error(self.failure)
                    self.failure = None
                if self.state != "died":
                    self.state = "failed" if status == "error" else status
        return True

    def _show_error(self, shown: events.Failure) -> None:
        """Write the traceback of an error that has not failed the cell, as text of stderr."""
        self._screen().write("stderr", "\n".join([*shown.traceback, ""]))

    def _screen(self) -> Screen:
        if self.pieces and isinstance(last := self.pieces[-1], Screen):
            return last
        self._new_lines += 1
        if self._new_lines > self._keep // 8:
            self._forget_oldest()
        screen = Screen(self._keep)
        self.pieces.append(screen)
        return screen

    def _forget_oldest(self) -> None:
        """Forget the oldest lines if all screens together keep more than `keep_lines` lines."""
        self._new_lines = 0
        screens = self.screens
        excess = sum(map(len, screens)) - self._keep
        for screen in screens:
            if excess <= 0:
                return
            before = len(screen)
            screen.forget(excess)
            excess -= before - len(screen)

    def _update(self, update: events.DisplayUpdate) -> bool:
        display = None
        for position, piece in enumerate(self.pieces):
            if isinstance(piece, RichDisplay) and piece.display.display_id == update.display_id:
                display = piece.display._replace(data=update.data, metadata=update.metadata)
                self.pieces[position] = RichDisplay.of(display)
        if display is not None:
            self._count(display)
        return display is not None

    def replace_lost_widgets(self, model_ids: Collection[str]) -> bool:
        """Replace each display of a widget by a text, if the widget's model is in `model_ids`.

        These models ended with their ranks.  Return True if a display was replaced.
        """
        has_changed = False
        for position, piece in enumerate(self.pieces):
            if isinstance(piece, RichDisplay) and events.model_of(piece.display) in model_ids:
                has_changed = True
                text = f"{piece.plain} (this widget ended with its rank)"
                data = {"text/plain": text}
                self.pieces[position] = RichDisplay.of(piece.display._replace(data=data))
        self.version += has_changed
        return has_changed

    def _skip(self, skipped: Skipped) -> None:
        if skipped.displays:
            self._leave_out(len(self.pieces), skipped.displays)
        if skipped.lines or skipped.characters:
            text = replace(skipped, displays=0)
            if self.pieces and isinstance(last := self.pieces[-1], Skipped):
                text += last
                self.pieces.pop()
            self.pieces.append(text)

    def _count(self, display: events.Display) -> None:
        """Subtract the size of a new or updated display from the room for displays.

        If no room is left, drop the oldest displays, so that about half of the room is free again.
        """
        self._room -= self._cost(display)
        if self._room >= 0:
            return
        # Count the kept displays again: `_room` was also reduced by contents that updates have
        # replaced since.
        self._room = self._most_shown
        kept: list[OutputPiece] = []
        note_place = dropped = 0
        for piece in reversed(self.pieces):
            if isinstance(piece, RichDisplay) and piece is not self._note:
                if self._room <= self._most_shown // 2:
                    note_place = note_place if dropped else len(kept)
                    dropped += 1
                    continue
                self._room -= self._cost(piece.display)
            kept.append(piece)
        self.pieces = kept[::-1]
        if dropped:
            self._leave_out(len(kept) - note_place, dropped)
            *older, newest = self.pieces
            self.pieces = [*_joined(older), newest]

    def _cost(self, display: events.Display) -> int:
        return max(events.size_of(display), self._most_shown // MAX_DISPLAYS)

    def _leave_out(self, at: int, number: int) -> None:
        """Count `number` more dropped displays, and write the new count in the note for the user.

        The note is a display in `pieces`.  It moves to index `at`, where the dropped displays were.
        """
        self._left_out += number
        note = events.Display({"text/plain": left_out_text(self._left_out)}, {})
        self.pieces.insert(at, shown := RichDisplay.of(note))
        self.pieces = [piece for piece in self.pieces if piece is not self._note]
        self._note = shown

    def _clear(self, *, wait: bool) -> bool:
        self._clear_next = wait
        changed = bool(self.pieces) and not wait
        if changed:
            self.pieces.clear()
            self._room, self._left_out, self._note = self._most_shown, 0, None
        return changed


def _joined(pieces: Sequence[OutputPiece]) -> Iterator[OutputPiece]:
    """Yield the pieces, with neighbours merged: all `Skipped` into one, then all screens into one.

    Displays are yielded unchanged, and pieces on different sides of a display are not merged.
    """
    for is_shown, run in groupby(pieces, lambda piece: isinstance(piece, RichDisplay)):
        if is_shown:
            yield from run
            continue
        texts = [*run]
        if skipped := [piece for piece in texts if isinstance(piece, Skipped)]:
            yield functools.reduce(operator.add, skipped)
        if screens := [piece for piece in texts if isinstance(piece, Screen)]:
            yield screens[0] if len(screens) == 1 else Screen.joined(screens)
