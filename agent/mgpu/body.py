"""JSON bodies of requests, read strictly: the right types, no unknown name, nothing twice. Pure."""

import json
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from mgpu.errors import BadInput
from mgpu.units import shown, whole_number

Reader = Callable[[str, object], object]
TEXT_LIMIT = 4096


def read(
    data: bytes, fields: Mapping[str, Reader], required: Sequence[str] = ()
) -> Dict[str, object]:
    """The body's values, each through the reader of its field; absent and null ones are left out.

    Raises BadInput that names the field.
    """
    body = _object(data)
    for name in body:
        if name not in fields:
            raise BadInput(f"field {shown(name)}", "unknown", f"use {', '.join(sorted(fields))}")
    values = {name: fields[name](name, value) for name, value in body.items() if value is not None}
    for name in required:
        if name not in values:
            raise BadInput(f"field {name!r}", "missing", "give it")
    return values


def text(name: str, value: object) -> str:
    """A string without control characters, not empty."""
    if not isinstance(value, str):
        raise BadInput(f"{name} {shown(value)}", "not a text", "give it in quotes")
    if not value or len(value) > TEXT_LIMIT or not value.isprintable():
        reason = f"empty, over {TEXT_LIMIT} characters or not printable"
        raise BadInput(f"{name} {shown(value)}", reason, "correct it")
    return value


def number(least: int = 0) -> Reader:
    """A whole number, as a number or in quotes."""

    def reader(name: str, value: object) -> int:
        return whole_number(value, name, "write a whole number", least)

    return reader


def raw(name: str, value: object) -> object:
    """Number or text, for rules.py to read: it knows the form and says it better."""
    if isinstance(value, (dict, list)):
        raise BadInput(f"{name} {shown(value)}", "not a single value", "give a number or a text")
    return value


def flag(name: str, value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} {shown(value)}", "neither true nor false", "give one of them")
    return value


def one_of(*words: str) -> Reader:
    """One of these words."""

    def reader(name: str, value: object) -> str:
        if value not in words:
            raise BadInput(f"{name} {shown(value)}", "unknown", f"use {' or '.join(words)}")
        return str(value)

    return reader


def _object(data: bytes) -> Dict[str, object]:
    try:
        body = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise BadInput("request body", f"not UTF-8 ({error.reason})", "send JSON") from None
    except RecursionError:
        raise BadInput("request body", "nested too deep", "send a flat JSON object") from None
    except ValueError as error:
        raise BadInput("request body", f"not JSON ({error})", "send a JSON object") from None
    if not isinstance(body, dict):
        raise BadInput(f"request body {shown(body)}", "not an object", "send a JSON object")
    return body


def _once(pairs: List[Tuple[str, object]]) -> Dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"field {shown(twice)}", "given twice", "give it once")
    return found


def _refuse(constant: str) -> float:
    raise BadInput("request body", f"{constant} is not a number of JSON", "give a whole number")
