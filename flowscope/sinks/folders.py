"""In which folder a run's files go: one that holds another run is left alone, and a sibling of it is taken."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from flowscope.sinks.jsonl import FILE_NAME

_WRITTEN: set[Path] = set()
"""Folders that a run of this process writes to, also where nothing is in the file yet."""


def holds_run(folder: Path) -> bool:
    """Whether a run is in this folder, or is being written there by this process."""
    if folder.resolve() in _WRITTEN:
        return True
    with suppress(OSError):
        return (folder / FILE_NAME).stat().st_size > 0
    return False


def sibling(folder: Path) -> Path:
    """A new folder NAME-2, NAME-3, ... beside this one; in it where nothing can be made beside it.

    Raises:
        OSError: it can be made in neither place.
    """
    whole = folder.resolve()
    places = [whole.parent, whole]
    number = 2
    while True:
        made = places[0] / f"{whole.name}-{number}"
        try:
            made.mkdir()
        except FileExistsError:
            number += 1
        except OSError:
            if len(places) == 1:
                raise
            places, number = places[1:], 2
        else:
            break
    return folder.parent / made.name if made.parent == whole.parent and folder.name else made


def begin(folder: Path) -> None:
    """From here on a run of this process writes there."""
    _WRITTEN.add(folder.resolve())


def end(folder: Path) -> None:
    """It does no longer."""
    _WRITTEN.discard(folder.resolve())
