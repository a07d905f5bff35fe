"""Files written atomically; JSON with a schema name and version."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from autoac_solver.errors import ProfileError


def write_json(path: str | Path, schema: str, version: int, data: dict[str, Any]) -> None:
    """Write `data` as JSON, see `write_bytes`."""
    write_text(path, json.dumps({"schema": schema, "schema_version": version, **data}, allow_nan=False))


def write_text(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8, see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, also if the process is killed or the disk is full."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_json(path: str | Path, schema: str, version: int) -> dict[str, Any]:
    """Read a file that `write_json` wrote.

    Raises:
        ProfileError: it is damaged, of another kind, or from another version.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path} is not readable JSON: it is damaged or truncated ({error!r:.200})."
        ) from error
    if not isinstance(data, dict) or data.get("schema") != schema:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ProfileError(f"{path} holds {found!r:.80}, but {schema!r} was expected.")
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
    return data


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
