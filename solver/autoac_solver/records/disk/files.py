"""Atomic file writes; JSON with a schema name and version."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import msgspec

from autoac_solver.records.disk.limits import MOST_DEPTH, MOST_FILE_BYTES, MOST_PARTS, MOST_VALUES
from autoac_solver.records.disk.schema import checked
from autoac_solver.records.errors import OtherFileError, ProfileError
from autoac_solver.records.format import format_bytes

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # No backtracking: linear time.
_PIECE_BYTES = 2**20
_COMMANDS = ("plan", "profile", "tradeoff")
"""The commands that write autoac's files; users mistake their `--json` output for such a file."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


# -- writing -------------------------------------------------------------------------------------------------------


def write_json(path: str | Path, schema: str, version: int, data: dict[str, Any], form: Any) -> None:
    """Write `data` as JSON, see `write_bytes`.

    Args:
        form: the schema that reading checks, see `disk.schema`.

    Raises:
        ValueError: the name does not end in .json, by which the command line tells files from models.
        ProfileError: `data` does not match the schema.
    """
    check_writable(path)
    if Path(path).suffix != ".json":
        raise ValueError(f"{path} cannot be written: it is JSON, so the file's name has to end in .json.")
    try:
        checked(data, form)
    except ValueError as error:
        raise ProfileError(
            f"{path} cannot be written, as it could not be read again: {error!s:.300}. A module's name must be "
            "printable text: rename what is named otherwise."
        ) from error
    write_text(path, json.dumps({"schema": schema, "schema_version": version, **data}, allow_nan=False))


def write_text(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8, see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically: it appears whole or not at all, even if the process is killed or the disk is full.

    An existing file keeps its mode, and a link to a file stays a link.

    Raises:
        FileNotFoundError, IsADirectoryError, OSError: see `check_writable`; or the write fails.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))
    try:
        _replace(target, content)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # Without the temporary file's name.


def _replace(path: Path, content: bytes) -> None:
    """Replace a file by a new one in a single rename."""
    before = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    # Not readable by others than the file itself, at no moment.
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if before is None else before)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            os.chmod(temporary, before)  # with the bits that the umask has taken
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(path: str | Path) -> None:
    """Check that a file can be written at a path.

    Raises:
        FileNotFoundError: the parent folder does not exist.
        IsADirectoryError: the path is a folder.
        OSError: the path is a device, a pipe or a socket, or a link that leads to itself.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # `realpath` goes on until a link repeats
        raise OSError(
            errno.ELOOP, f"{path} cannot be written: it is a link that leads to itself. Name a file."
        )
    if target.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {target.parent}.")
    if target.exists() and not target.is_file():
        raise OSError(f"{path} cannot be written: it is a device, a pipe or a socket. Name a file.")


# -- reading -------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct):
    schema: Any = None


def schema_of(path: str | Path) -> str | None:
    """The schema name in a file; None if it has none, or is no readable JSON.

    Raises:
        ProfileError: the file exceeds the limits of size or depth.
    """
    try:
        found = msgspec.json.decode(_content(path), type=_Head).schema
    except (ValueError, RecursionError):  # Loading it raises a better error.
        return None
    return found if isinstance(found, str) else None


def read_json(path: str | Path, schema: str, version: int) -> dict[str, Any]:
    """Read a file written by `write_json`. Its contents are untrusted, see `limits`.

    Returns:
        Its data, without schema and version.

    Raises:
        ProfileError: the file is damaged, too large, of another kind, or from another version.
    """
    try:
        data = json.loads(
            _content(path).decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        said = f"{path} is not readable JSON: it is damaged or truncated ({error!r:.200})."
        raise OtherFileError(said, "", schema) from error
    if not isinstance(data, dict) or data.get("schema") != schema:
        said, found = _kind_of(data)
        raise OtherFileError(f"{path} {said}, but {schema!r} was expected.", found, schema)
    found_version = data.get("schema_version")
    if type(found_version) is not int or not 1 <= found_version <= version:
        raise ProfileError(
            f"{path} has schema version {found_version!r:.80}; this autoac reads up to {version}. "
            "Update autoac, or make the file again with this version."
        )
    if found_version < version:
        raise ProfileError(
            f"{path} was written by an older autoac (schema version {found_version}, now {version}): make it again."
        )
    return {name: value for name, value in data.items() if name not in ("schema", "schema_version")}


def _kind_of(data: Any) -> tuple[str, str]:
    """A file's contents in words, and as `OtherFileError.found` names them."""
    head = data if isinstance(data, dict) else {}
    if isinstance(head.get("schema"), str):
        return f"holds {head['schema']!r:.80}", head["schema"]
    if "autoac_version" in head and head.get("command") in _COMMANDS:
        return f"is what `autoac {head['command']} --json` printed", head["command"]
    return "is none of autoac's files", ""


def _content(path: str | Path) -> bytes:
    """The file's bytes, after checks of its size, number of values and nesting, which bound the cost of parsing."""
    with Path(path).open("rb") as file:
        content, size = b"", os.fstat(file.fileno()).st_size
        if size <= MOST_FILE_BYTES:  # In pieces, because pipes and devices have no known size.
            pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
            content = b"".join(islice(pieces, MOST_FILE_BYTES // _PIECE_BYTES + 1))
    if max(size, len(content)) > MOST_FILE_BYTES:
        raise ProfileError(f"{path} is larger than {format_bytes(MOST_FILE_BYTES)}, the most that is read.")
    # Those in texts count, too: a search for texts takes longer than a file with so many is worth.
    n_values, n_parts = content.count(b","), sum(map(content.count, (b"[", b"{", b":")))
    for found, most, what in ((n_values, MOST_VALUES, "values"), (n_parts, MOST_PARTS, "lists and names")):
        if found > most:
            raise ProfileError(f"{path} has more than {most:,} {what}, the most that is read.")
    brackets = _STRING.sub(b"", content).translate(None, _NO_BRACKETS)
    if max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0) > MOST_DEPTH:
        raise ProfileError(f"{path} is nested deeper than {MOST_DEPTH} levels, the most that is read.")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; duplicate names are refused, because one would hide the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
