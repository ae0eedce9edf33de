"""JSON that came with somebody's weights: one object, no key twice, nothing that brings the parser down."""

from __future__ import annotations

import json
import re
from os import PathLike
from typing import Any, NoReturn

from .errors import CorruptError

HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # pairs too: a second look tells


def parse(data: bytes, file: str | PathLike[str], what: str, *, constants: bool = False) -> dict[str, Any]:
    """The object in ``data``; ``what`` names it in errors.

    ``constants`` admits NaN and Infinity, which are not JSON but stand in real config.json files.

    Raises CorruptError: not UTF-8, not JSON, not an object, a key twice at any level, or nested too deeply.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CorruptError(f"{what} has a key twice", file=file, found=repr(twice), need="every key once")
        return out

    def constant(text: str) -> NoReturn:
        raise CorruptError(f"{what} is not JSON", file=file, found=text, need="a finite number")

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=None if constants else constant
        )
    except UnicodeDecodeError as e:
        raise CorruptError(
            f"{what} is not UTF-8", file=file, found=f"byte 0x{data[e.start]:02x} at {e.start}"
        ) from None
    except RecursionError:
        raise CorruptError(f"{what} is nested too deeply", file=file) from None
    except ValueError as e:
        raise CorruptError(f"{what} is not JSON", file=file, found=shown(e)) from None
    if HALF_PAIR.search(data) and not _is_text(value):
        raise CorruptError(f"{what} has half a surrogate pair", file=file, need="characters")
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", file=file, found=kind(value), need="{...}")
    return value


def _is_text(value: object) -> bool:
    """Whether all strings can be written again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(value: object) -> str:
    """What a parsed value is, in JSON's words."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: object, limit: int = 80) -> str:
    """``str(value)``, cut where a hostile file would fill the screen."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
