"""A file that only grows, by whole pieces: a piece is in it completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flowscope.errors import FlowscopeError


class AppendFile:
    """A file written by one system call a piece, so that a kill at any moment costs at most the piece being written.

    There is no buffer of our own: what `write` returned from survives the death of the process (not a power loss:
    nothing is fsynced). One writer at a time.

    Args:
        folder: created where it is missing, with its parents.
        name: the file's name in it; an existing file is continued.
        line_based: the pieces are lines; a last line that an earlier kill left incomplete is ended first.

    Raises:
        FlowscopeError: the folder or file cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, *, line_based: bool = False) -> None:
        self.path = Path(folder) / name
        self._handle: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._handle = os.open(self.path, flags, 0o644)
            if line_based:
                self._end_last_line(self._handle)
        except OSError as error:
            self.close()
            raise FlowscopeError(
                f"log_dir {os.fspath(folder)!r}: cannot write {name} there ({error.strerror or error}); expected a "
                "folder that exists or can be created, with write permission and space left. "
                "Pass another one: flowscope.watch(model, log_dir=...)."
            ) from error

    def write(self, piece: bytes) -> None:
        """Append `piece`.

        Raises:
            OSError: nothing of the piece is in the file (disk full, size limit, closed).
        """
        if self._handle is None:
            raise OSError(errno.EBADF, "the file is closed", str(self.path))
        written = os.write(self._handle, piece)
        if written != len(piece):
            # a short write is how a disk says that it has just become full; O_APPEND left the offset at the end
            os.ftruncate(self._handle, os.lseek(self._handle, 0, os.SEEK_CUR) - written)
            raise OSError(
                errno.ENOSPC,
                f"only {written} of {len(piece)} bytes fitted (disk full or size limit reached); they were taken back",
                str(self.path),
            )

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    @staticmethod
    def _end_last_line(handle: int) -> None:
        size = os.fstat(handle).st_size
        if size:
            os.lseek(handle, size - 1, os.SEEK_SET)
            if os.read(handle, 1) != b"\n":
                os.write(handle, b"\n")
