"""A file that only grows, by whole pieces: a piece is in it completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from pathlib import Path

from flowscope.errors import FlowscopeError
from flowscope.faults import LOGGER

WAITING = 4 << 20
"""Bytes that wait at most for a disk that refuses them."""


class AppendFile:
    """A file written by one system call a piece, so that a kill at any moment costs at most the piece being written.

    There is no buffer of our own: what `write` returned from survives the death of the process (not a power loss:
    nothing is fsynced). One writer at a time. What the disk refuses waits, and is tried again with each `write`.

    Args:
        folder: created where it is missing, with its parents.
        name: the file's name in it; an existing file is continued.
        line_based: the pieces are lines; a last line that an earlier kill left incomplete is ended first.

    Attributes:
        path: of the file.
        lost: how many pieces are in no file, as too many waited.

    Raises:
        FlowscopeError: the folder or file cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, *, line_based: bool = False) -> None:
        self.path = Path(folder) / name
        self.lost = 0
        self._line_based = line_based
        self._waiting: deque[bytes] = deque()
        self._handle: int | None = None
        self._file = 0, 0
        """Which file it is, on which device: its name and the number of its handle may come to mean another one."""
        try:
            self._open()
        except (OSError, ValueError) as error:
            self.close()
            raise FlowscopeError(
                f"log_dir {os.fspath(folder)!r}: cannot write {name} there ({_why(self.path.parent, error)}); expected "
                "a folder that exists or can be created, with write permission and space left. Pass another one: "
                "flowscope.watch(model, log_dir=...)."
            ) from error

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._handle = os.open(self.path, flags, 0o644)
        about = os.fstat(self._handle)
        self._file = about.st_dev, about.st_ino
        if self._line_based:
            self._end_last_line(self._handle)

    def renew(self) -> bool:
        """Whether the file was deleted, or its handle taken, since the last piece: it is begun again then.

        Raises:
            OSError: it cannot be.
        """
        if self._handle is None or self._stands(self._handle):
            return False
        self._open()
        LOGGER.warning("flowscope: %s was deleted; what comes now goes to a new file of that name.", self.path)
        return True

    def _stands(self, handle: int) -> bool:
        try:
            about = os.fstat(handle)
        except OSError:
            return False
        return (about.st_dev, about.st_ino) == self._file and about.st_nlink > 0

    def write(self, piece: bytes) -> None:
        """Append what waits, and `piece`.

        Raises:
            OSError: it waits (disk full, size limit), or the file is closed.
        """
        if self._handle is None:
            raise OSError(errno.EBADF, "the file is closed", str(self.path))
        self._waiting.append(piece)
        while self._waiting and sum(map(len, self._waiting)) > WAITING + len(piece):
            self._waiting.popleft()
            self.lost += 1
        if (error := self._try(self._handle)) is not None:
            raise error

    def _try(self, handle: int) -> OSError | None:
        """Append what waits, as far as it fits; returns why the newest piece did not."""
        error = None
        for piece in [*self._waiting]:
            try:
                self._append(handle, piece)
            except OSError as found:
                error = found
            else:
                error = None
                self._waiting.remove(piece)
        return error

    def _append(self, handle: int, piece: bytes) -> None:
        written = os.write(handle, piece)
        if written != len(piece):
            # a short write is how a disk says that it has just become full; O_APPEND left the offset at the end
            os.ftruncate(handle, os.lseek(handle, 0, os.SEEK_CUR) - written)
            raise OSError(
                errno.ENOSPC,
                f"only {written} of {len(piece)} bytes fitted (disk full or size limit reached); they were taken back",
                str(self.path),
            )

    def close(self) -> None:
        """Close the file, after a last try at what waits; further calls do nothing."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._waiting and self._stands(handle):
            self._try(handle)
        with contextlib.suppress(OSError):  # another program has closed it
            os.close(handle)

    @staticmethod
    def _end_last_line(handle: int) -> None:
        size = os.fstat(handle).st_size
        if size:
            os.lseek(handle, size - 1, os.SEEK_SET)
            if os.read(handle, 1) != b"\n":
                os.write(handle, b"\n")


def _why(folder: Path, error: Exception) -> str:
    """The reason in words; "no such file" of a folder that should be made means that its parent takes none."""
    parent = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
    if isinstance(error, FileNotFoundError) and parent != folder:
        return f"no folder can be made in {parent}"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{parent} is a file, not a folder"
    return getattr(error, "strerror", None) or str(error)
