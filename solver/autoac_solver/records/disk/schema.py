"""Checks of a file's data against the records' classes: no unknown fields, no wrong types, nothing out of range.

Errors name the place, such as `$.tape.tick[3]`: the fourth number in the column `tick` of `tape`.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from autoac_solver.records.disk.limits import PRINTABLE, Number, Text, Whole

Row = TypeVar("Row")

_LIMITED: dict[Any, Any] = {int: Whole, float: Number, str: Text}


def document(kind: type, **other: Any) -> type[msgspec.Struct]:
    """The file format of a record: an object with exactly its fields.

    Args:
        kind: the record's class, a dataclass. Numbers and texts without their own limits get the general ones.
        other: types of fields with another form in the file, and of additional fields.
    """
    hints = get_type_hints(kind, include_extras=True)
    types_ = {f.name: _limited(hints[f.name]) for f in dataclasses.fields(kind)} | other
    return msgspec.defstruct(kind.__name__, list(types_.items()), forbid_unknown_fields=True, kw_only=True)


def table(kind: type) -> type[msgspec.Struct]:
    """The file format of many records of a class: an object with one list per field."""
    hints = get_type_hints(kind, include_extras=True)
    fields = [(f.name, list[_limited(hints[f.name])]) for f in dataclasses.fields(kind)]
    return msgspec.defstruct(f"{kind.__name__}Table", fields, forbid_unknown_fields=True)


def row(kind: type) -> Any:
    """The file format of a record as a list of its values."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple[tuple(_limited(hints[f.name]) for f in dataclasses.fields(kind))]


def checked(data: Any, schema: Any) -> Any:
    """The data as an object of the schema's type.

    Raises:
        ValueError: it does not match the schema; the message says what is wrong and where.
    """
    try:
        return msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise ValueError(_fault(str(error), data)) from None


def fields_of(found: msgspec.Struct) -> dict[str, Any]:
    """The fields of a `document` returned by `checked`, as arguments of the record's class."""
    return {name: getattr(found, name) for name in found.__struct_fields__}


def columns(rows: Sequence[Any], kind: type) -> dict[str, list[Any]]:
    """Records of a class as a `table`."""
    return {f.name: [getattr(record, f.name) for record in rows] for f in dataclasses.fields(kind)}


def rows(found: msgspec.Struct, kind: type[Row]) -> tuple[Row, ...]:
    """The records of a `table`.

    Raises:
        ValueError: its columns are of different lengths.
    """
    lists = fields_of(found)
    if len({len(column) for column in lists.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in lists.items())
        raise ValueError(f"the columns of {kind.__name__} are of different lengths ({lengths})")
    return tuple(kind(*values) for values in zip(*lists.values(), strict=True))


def _limited(hint: Any) -> Any:
    """A type with limits on the numbers and texts in it."""
    origin: Any = get_origin(hint)
    inside = get_args(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_limited, inside))]  # noqa: UP007 (made at run time)
    if origin in (tuple, list, dict):
        generic: Any = origin
        return generic[tuple(a if a is Ellipsis else _limited(a) for a in inside)]
    return _LIMITED.get(hint, hint)


_AT = " - at `"
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def _fault(message: str, data: Any) -> str:
    """The library's message, extended by the faulty value if its place identifies it."""
    message = message.replace(f"matching regex {PRINTABLE!r}", "without control characters")
    _, _, place = message.partition(_AT)
    found = data
    for name, index in _STEP.findall(place.removesuffix("`")):
        key = name or int(index)
        inside = isinstance(found, (Mapping, list, tuple)) and (
            key in found if isinstance(found, Mapping) else isinstance(key, int) and key < len(found)
        )
        if not inside:
            return message
        found = found[key]
    return (
        message
        if "..." in place or isinstance(found, (Mapping, list, tuple))
        else f"{message} is {found!r:.80}"
    )
