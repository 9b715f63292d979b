"""Merges a worker's text and messages into one stream, and writes the worker's log files.

Runs in the agent; `Worker` uses this file.  Text comes through pipes, and messages, such as figures
and errors, through sockets.  The worker writes a mark with a message's number to stdout at the
place in the text where the message belongs.

The log files are ROOT/NAME/attempt_N/RANK/stdout.log and stderr.log; older text is in stdout.log.1
and stderr.log.1.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from nbdist.output.events import InputRequest, Output, StreamName, Text, Typed
from nbdist.system import folders
from nbdist.wire import work
from nbdist.wire.log_files import CUT_MARK, earlier_file, moved_line, renumbered_line

log = logging.getLogger("nbdist.agent")

PIPE_READ_SIZE = 1 << 18
PIPE_SIZE = 1 << 18  # bytes a rank can write ahead of its agent; all pipes of a user share a quota
MAX_LAST_LINES, MAX_LAST_LENGTH, MAX_LAST_LINE_LENGTH = 20, 4096, 400
"""The most lines in `last_lines`, and the most characters of a text for them and of `last_line`."""

LOST_AFTER = 5.0  # seconds that later text waits for a message until the message counts as lost
MARK_READS = 16  # how often a pipe is read to find a mark: so many reads empty a full pipe

M = TypeVar("M")


class WorkerOutput:
    """Merges a worker's text and messages, and calls `on_item` with each of them, in order.

    Text is also written to `log`.  The event `up` is set when the worker's kernel has started, and
    `ready` when the worker's group is formed; `Worker` also sets `ready` when the worker exits.
    `token` is the secret in the worker's marks.
    """

    def __init__(
        self, token: str, log: WorkerLog, on_item: Callable[[Output | work.TaskMessage], None]
    ) -> None:
        self.up, self.ready = asyncio.Event(), asyncio.Event()
        self._log = log
        self._on_item = on_item
        self._merger: Merger[Output | work.TaskMessage | None] = Merger(token)
        self._last_texts: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._stdout, self._stderr = OutputPipe(self._read_stdout), OutputPipe(self._read_stderr)
        self._retry: asyncio.TimerHandle | None = None

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the worker has written; they can explain why the worker exited."""
        return tuple("".join(self._last_texts).splitlines()[-MAX_LAST_LINES:])

    @property
    def last_line(self) -> str:
        """The last line of the worker that is not blank, cut to `MAX_LAST_LINE_LENGTH`.

        "" if the worker has written no such line.
        """
        end = "".join(self._last_texts)[-MAX_LAST_LENGTH:]  # a text may be only a part of a line
        line = next((each for each in reversed(end.splitlines()) if each.strip()), "")
        return line[:MAX_LAST_LINE_LENGTH]

    @property
    def write_ends(self) -> tuple[int, int]:
        """The pipes' write ends, for the worker's stdout and stderr."""
        return self._stdout.write_end, self._stderr.write_end

    def close_write_ends(self) -> None:
        """Close this process's write ends, after the worker got copies or could not be started."""
        for end in self.write_ends:
            os.close(end)

    def receive(self, number: int, output: Output | None) -> None:
        """Add a message with the number of its mark, and emit texts and messages whose turn it is.

        `output` is what the message shows, or None if it shows nothing.
        """
        self._merger.receive_message(number, output, time.monotonic())
        self._emit_ready()

    def place(self, message: work.TaskMessage) -> None:
        """Add a message about the task, and emit it after all text that comes before its mark.

        The worker writes the mark to stdout before it sends the message.  So this method reads
        stdout until it finds the mark.  If user code has closed stdout, there is no mark, and the
        message is emitted after the text so far.
        """
        now = time.monotonic()
        self._merger.receive_message(message.number, message, now)
        for _ in range(MARK_READS):
            if message.number <= self._merger.placed or not self._stdout.read():
                break
        self._merger.place_up_to(message.number, now)
        self._emit_ready()

    def drain(self) -> None:
        """Emit all remaining text and messages of a worker that has exited."""
        for pipe in (self._stdout, self._stderr):
            while pipe.read():
                pass
        for item in self._merger.pop_all():
            self.emit(item)

    def emit(self, item: Output | work.TaskMessage | None) -> None:
        """Call `on_item` with an item at once; texts, prompts and typed lines are also logged.

        An item of None stands for a message that shows nothing, and is ignored.  Before the end of
        a task and before a prompt, the text that is still in the stderr pipe is emitted.
        """
        match item:
            case None:
                return
            case work.Finished():
                self._stderr.read()  # its text was written before the end of the task
                for text in self._merger.pop_incomplete_text():
                    self.emit(text)
            case InputRequest(prompt=prompt):
                self._stderr.read()
                self._log.write("stdout", prompt)
            case Typed(text):
                self._log.write("stdout", f"{text}\n")
            case Text(stream, text):
                self._log.write(stream, text)
                self._last_texts.append(text[-MAX_LAST_LENGTH:])
        self._on_item(item)

    def close(self) -> None:
        """Stop reading, and close the pipes; text in them is lost."""
        if self._retry is not None:
            self._retry.cancel()
        self._stdout.close()
        self._stderr.close()

    def _read_stdout(self, data: bytes) -> None:
        self._merger.receive_stdout(data, time.monotonic())
        if self._merger.up:
            self.up.set()
        if self._merger.ready:
            self.ready.set()
        self._emit_ready()

    def _read_stderr(self, data: bytes) -> None:
        self._merger.receive_stderr(data)
        self._emit_ready()

    def _emit_ready(self) -> None:
        for item in self._merger.pop_ready(time.monotonic()):
            self.emit(item)
        if self._merger.queue and self._retry is None:  # the next message in order may be lost
            self._retry = asyncio.get_running_loop().call_later(LOST_AFTER, self._emit_late)

    def _emit_late(self) -> None:
        """Emit items that wait for a lost message, even if the worker sends nothing more."""
        self._retry = None
        self._emit_ready()


class OutputPipe:
    """A pipe from the worker to this process; `on_data` is called with the bytes that arrive."""

    def __init__(self, on_data: Callable[[bytes], None]) -> None:
        self._on_data = on_data
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        with suppress(PermissionError):  # the quota is reached: the pipe keeps its default size
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self.read)
        self._open = True

    def close(self) -> None:
        """Stop reading and close the pipe; text that is still in it is lost."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)

    def read(self) -> bool:
        """Read once without waiting; return True if any bytes were there.

        Closes the pipe if the worker has closed its end.
        """
        data = b""
        if self._open:
            try:
                data = os.read(self._read_end, PIPE_READ_SIZE)
            except BlockingIOError:
                return False
        if data:
            self._on_data(data)
        else:
            self.close()
        return bool(data)


class Merger(Generic[M]):
    """Puts the messages of a worker where their marks are in the text of its stdout.

    `up` and `ready` become True when the text has the mark that says so.  The class does no I/O.
    """

    def __init__(self, token: str) -> None:
        self.up = self.ready = False
        self._pattern, self._cut_off = work.mark_pattern(token), work.cut_off_pattern(token)
        self.queue: deque[Text | int] = deque()  # text, and numbers of messages, in order
        self._messages: dict[int, M] = {}  # messages that have arrived, by number
        self.placed = 0  # the number of the last message whose place in the text is known
        self._awaited_since: dict[int, float] = {}  # when each number in `queue` was added
        self._last_arrival = 0.0  # when a message was last taken from the queue
        self._partial_mark = b""  # the beginning of a mark that is not complete yet
        self._stream: StreamName = "stdout"  # the stream of the text that follows
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace")
            for name in ("stdout", "stderr", "pipe")
        }

    def receive_stdout(self, data: bytes, now: float) -> None:
        """Add bytes from the worker's file descriptor 1, which has marks and text.

        The text is that of stdout and of Python's stderr, in the order of writing.
        """
        *pieces, last = self._pattern.split(self._partial_mark + data)
        cut = self._cut_off.search(last, max(0, len(last) - work.LONGEST_MARK))
        end = cut.start() if cut else len(last)
        self._partial_mark = last[end:]
        for index, piece in enumerate([*pieces, last[:end]]):
            if index % 2:
                self._receive_mark(work.mark_value(piece), now)
            else:
                self._add(piece)

    def receive_stderr(self, data: bytes) -> None:
        """Add bytes that the worker has written to file descriptor 2, as text of stderr.

        It is not known where the bytes belong among the texts of descriptor 1, so they are put at
        the end of the queue.  But if the queue has a message that has not arrived yet, they are put
        before this message, so that they do not wait for it.
        """
        if text := self._decoders["pipe"].decode(data):
            places = (i for i, item in enumerate(self.queue) if isinstance(item, int))
            self.queue.insert(next(places, len(self.queue)), Text("stderr", text))

    def receive_message(self, number: int, message: M, now: float) -> None:
        """Add the message that belongs to the mark with this number.

        `pop_ready` returns the message at the place of its mark in the text.  If that place has
        passed already, because the message came too late, the message comes after all text that was
        received so far.
        """
        self._messages[number] = message
        if number <= self.placed and number not in self._awaited_since:
            self._add_place(number, now)

    def place_up_to(self, number: int, now: float) -> None:
        """Put the arrived messages with numbers up to `number` into the queue without their marks.

        The marks are missing if user code has closed the worker's stdout.
        """
        for lost in sorted(lost for lost in self._messages if self.placed < lost <= number):
            self._add_place(lost, now)
        self.placed = max(self.placed, number)

    def pop_ready(self, now: float) -> list[Text | M]:
        """Remove and return the texts and messages whose turn it is.

        The result ends before a message that has not arrived although its mark was read.  Such a
        message is skipped if it does not arrive within `LOST_AFTER` seconds.
        """
        items: list[Text | M] = []
        while self.queue:
            head = self.queue[0]
            if isinstance(head, Text):
                items.append(head)
            elif head in self._messages:
                items.append(self._messages.pop(head))
                self._last_arrival = now
            elif now - max(self._awaited_since[head], self._last_arrival) < LOST_AFTER:
                break
            self.queue.popleft()
            if isinstance(head, int):
                del self._awaited_since[head]
        return items

    def pop_incomplete_text(self) -> list[Text]:
        """Return the bytes of incomplete UTF-8 characters as text, and forget these bytes.

        Called at the end of a task, when the missing bytes will not come any more.
        """
        endings = ((name, each.decode(b"", final=True)) for name, each in self._decoders.items())
        texts = ((name, text) for name, text in endings if text)
        return [Text("stdout" if name == "stdout" else "stderr", text) for name, text in texts]

    def pop_all(self) -> list[Text | M]:
        """Remove and return all texts and messages of a worker that has exited.

        Messages whose marks were not read come last.
        """
        self._add(self._partial_mark)
        self._partial_mark = b""
        items: list[Text | M] = self.pop_ready(now=float("inf"))
        items.extend(self.pop_incomplete_text())
        items.extend(self._messages.pop(number) for number in sorted(self._messages))
        return items

    def _receive_mark(self, value: work.Mark, now: float) -> None:
        if value == "up":
            self.up = True
        elif value == "ready":
            self.ready = True
        elif value == "stdout" or value == "stderr":
            self._stream = value
        elif value == self.placed + 1:  # user code may have printed marks with other numbers
            self.placed = value
            self._add_place(value, now)

    def _add_place(self, number: int, now: float) -> None:
        self._awaited_since[number] = now
        self.queue.append(number)

    def _add(self, data: bytes) -> None:
        if text := self._decoders[self._stream].decode(data):
            self.queue.append(Text(self._stream, text))


# --- log files ------------------------------------------------------------------------------

RUNS_KEPT = 20  # newest runs that stay in nbdist's own log folder; older ones are removed if unused
LONGEST_LOGGED = 1 << 20  # bytes that a log file may be too long, so that its last line is whole

ATTEMPT_FOLDER = re.compile(r"attempt_\d+", re.ASCII)
"""The name of a folder with the log files of one start of the workers."""


class WorkerLog:
    """Appends to `stdout.log` and `stderr.log` of one rank, with about `limit` bytes for each.

    The present file and the earlier file (`.1`) may each have half of `limit`.  A `limit` of 0
    means no limit.  If `folder` is None, nothing is logged.  Text is written to the file at once,
    so `tail -f` shows it, and it is not lost if a process dies.  After a failed write, there is one
    warning and no more log in this folder; tasks go on.
    """

    def __init__(self, folder: Path | None, limit: int = 0) -> None:
        self._limit = limit
        self._files: dict[StreamName, _File] = {}
        self._open(folder)

    def move(self, folder: Path | None, rank: int) -> None:
        """Continue the log in another folder, because the worker gets another rank.

        `rank` is the worker's old rank.  The first line of each new file names the old file.  If
        `folder` is None, nothing is logged from now on.
        """
        before = self.folder
        self.close()
        self._open(folder)
        if before is not None:
            for stream in [*self._files]:
                self.write(stream, renumbered_line(before / f"{stream}.log", rank))

    def _open(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is None:
            return
        try:
            folders.make_private(folder)
            for stream in ("stdout", "stderr"):
                self._files[stream] = _File(folder / f"{stream}.log", self._limit // 2)
        except OSError as error:
            self._give_up(error)

    def write(self, stream: StreamName, text: str) -> None:
        """Append text to the file of a stream at once; do nothing if the log is closed.

        If writing fails, the log is closed with a warning.
        """
        if stream in self._files:
            try:
                self._files[stream].write(text.encode("utf-8", "surrogatepass"))
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the files; later text is dropped."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _give_up(self, error: OSError) -> None:
        log.warning("no more log files in %s: %s", self.folder, error)
        self.close()
        if self.folder is not None:
            flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW
            with suppress(OSError):  # raised for example if the disk has no room for a file
                os.close(folders.open_private(self.folder / CUT_MARK, flags))
        self.folder = None


class _File:
    """A log file which, at about `share` bytes, is renamed to `earlier_file` and begun again.

    With a `share` of 0 the file grows without a limit.
    """

    def __init__(self, path: Path, share: int) -> None:
        self._path = path
        self._share = share
        self._begin()

    def _begin(self) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        self._fd = folders.open_private(self._path, flags)
        self._size = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        if self._share and self._size + len(data) > self._share:
            # Complete the last line in the old file; only a very long line is split between files.
            line_end = data.find(b"\n") + 1
            if line_end or self._size > self._share + LONGEST_LOGGED:
                self._append(data[:line_end])
                self._rotate()
                data = data[line_end:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            view = view[done:]

    def _rotate(self) -> None:
        earlier = earlier_file(self._path)
        self._path.rename(earlier)
        full = self._fd
        self._begin()
        os.close(full)
        self._append(moved_line(earlier, self._share * 2).encode())

    def close(self) -> None:
        with suppress(OSError):  # a network file system may only report here that a write failed
            os.close(self._fd)


class RunFolder:
    """The folder ROOT/NAME with the logs of a world, which is made with the object if possible.

    If ROOT is nbdist's own state folder, the object also removes old folders below ROOT
    (`drop_old_runs`), and locks its own folder until `close`, so that no agent removes that folder.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.path, self._claims = root / name, list[int]()
        # If a folder cannot be made, there are no logs, and `WorkerLog` warns about that.
        if root != Path(folders.state_folder()):
            with suppress(OSError):
                folders.make_private(self.path)
            return
        with suppress(OSError):
            folders.make_private(root)
            for folder in (*reversed(self.path.parents), self.path):
                if folder.is_relative_to(root) and folder != root:
                    self._make_and_lock(folder)
        with suppress(OSError):  # done also if no folder could be made, as on a full disk
            drop_old_runs(root)

    def close(self) -> None:
        """Unlock the folder; another world's agent may remove it when it is old."""
        for claim in self._claims:
            os.close(claim)
        self._claims.clear()

    def _make_and_lock(self, folder: Path) -> None:
        """Make and lock a folder; lock an existing folder only if nbdist has made it."""
        try:
            folder.mkdir(mode=folders.PRIVATE_FOLDER)
        except FileExistsError:
            lock = folders.join(folder)
        else:
            lock = folders.claim(folder)
        if lock is not None:
            self._claims.append(lock)

    def new_attempt(self, number: int) -> Path:
        """Make the folder for the logs of a start of the workers, and return its path.

        The folder's name has `number`, or the next number for which there is no folder.  If the
        folder cannot be made, its path is returned all the same, and `WorkerLog` warns later.
        """
        while True:
            folder = self.path / f"attempt_{number}"
            try:
                folder.mkdir(mode=folders.PRIVATE_FOLDER)
            except FileExistsError:
                number += 1
            except OSError:
                return folder
            else:
                return folder


def drop_old_runs(root: Path) -> None:
    """Remove the folders of worlds' logs below `root`, except the `RUNS_KEPT` newest.

    A folder also stays if an agent uses it, or if it has anything in it besides folders of attempts
    (`ATTEMPT_FOLDER`) and nbdist's lock file.  Raises OSError if another process removes a folder
    at the same time.
    """
    claimed = [*_claimed_in(root)]
    runs = [folder for folder in claimed if any(folder.glob("attempt_*"))]
    newest = {*sorted(runs, key=lambda run: run.stat().st_mtime)[-RUNS_KEPT:]}
    for folder in reversed(claimed):  # inner folders come before the folders around them
        names = {each.name for each in folder.iterdir()} - {folders.LOCK_FILE}
        if folder not in newest and all(map(ATTEMPT_FOLDER.fullmatch, names)):
            folders.remove(folder)


def _claimed_in(folder: Path) -> Iterator[Path]:
    """Yield the folders below `folder` that nbdist has made for worlds' logs, outer folders first.

    For a world named `a/b` nbdist makes two folders, `a` and `a/b`.  Folders that the user has
    copied or renamed are left out.
    """
    for each in folder.iterdir():
        file, name = each / folders.LOCK_FILE, os.fsencode(each.name)
        if file.is_file() and not each.is_symlink() and file.read_bytes() == name:
            yield each
            yield from _claimed_in(each)
