"""Safe reading of files from untrusted sources: file names, JSON and the size of metadata. Needs no torch.

Every caller passes a file name from metadata through `plain_name` before it joins the name to a folder. The functions
raise ValueError without the file's path; their callers add it.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any, NoReturn

# One component of a path, neither hidden nor "..".
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
# Nested containers. Functions that walk values recurse once or twice a level.
NESTING_MAX = 256
# The most bytes of a metadata file.
METADATA_NBYTES_MAX = 64 << 20
_brief = reprlib.Repr()


def plain_name(name: Any) -> str:
    """Return `name` if it is one plain component of a path; raise ValueError otherwise.

    A plain name has at most 200 letters, digits and "._-", and does not begin with a dot or a dash.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"{shortened(name)} is no plain file name (letters, digits, '._-', at most 200 of them)")
    return name


def shortened(value: object, length: int = 80) -> str:
    """Return `repr(value)` for a message, cut to `length` characters."""
    text = repr(value[:length]) if isinstance(value, str) else _brief.repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def parse_json(text: bytes, *, strict: bool = True) -> Any:
    """Return the value of a JSON text in UTF-8.

    strict: False for files of other programs, which write non-finite numbers too and may repeat a key (the last one
    counts).

    Raises:
        ValueError: the text is not JSON, containers are nested deeper than NESTING_MAX, or, if strict, an object
            repeats a key or a number is NaN or infinite.
    """
    try:
        if strict:
            value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
        else:
            value = json.loads(text.decode())
    except (RecursionError, MemoryError):
        raise ValueError(f"its values are nested deeper than {NESTING_MAX} levels, or do not fit the memory") from None
    return check_json(value, finite=strict)


def check_json(value: Any, *, finite: bool = True) -> Any:
    """Return `value`; raise ValueError if it is nested deeper than NESTING_MAX or, with `finite`, holds a non-finite
    number.
    """
    level = [value]
    for _ in range(NESTING_MAX + 1):
        following: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is dict:
                following.extend(each.values())
            elif kind is list:
                following.extend(each)
            elif finite and kind is float and not math.isfinite(each):
                raise ValueError(f"{each} is no number of JSON")
        if not following:
            return value
        level = following
    raise ValueError(f"its values are nested deeper than {NESTING_MAX} levels")


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> tuple[int, os.stat_result]:
    """Return a descriptor for reading a regular file, and its status; OSError for anything else.

    flags: further ones of `os.open`.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file")
    return descriptor, status


def read_metadata(path: str | os.PathLike[str], nbytes_max: int = METADATA_NBYTES_MAX) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file has more than `nbytes_max` bytes, or no file has this path.
    """
    descriptor, status = open_regular(path)
    with open(descriptor, "rb") as file:
        if status.st_size > nbytes_max:
            raise ValueError(f"it has {status.st_size:,} bytes, and at most {nbytes_max:,} are read")
        return file.read(status.st_size)


def read_json(path: str | os.PathLike[str], nbytes_max: int = METADATA_NBYTES_MAX, *, strict: bool = True) -> Any:
    """Return the value of a JSON file; see `read_metadata` and `parse_json` for what it raises."""
    return parse_json(read_metadata(path, nbytes_max), strict=strict)


def reason(error: Exception) -> str:
    """Return why a file cannot be read, without its path."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def leads_out(folder: Path, name: str) -> bool:
    """Return whether `name` in `folder` is a symbolic link to a file outside of that folder."""
    path = folder / name
    return path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(folder))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {shortened(twice)} twice")
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
