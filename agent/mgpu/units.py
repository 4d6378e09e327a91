"""Numbers as people write and read them: pure conversions, each with its unit in the name."""

import re
from typing import Optional

from mgpu.errors import BadInput
from mgpu.model import MIB

LARGEST_NUMBER = 10**9  # beyond any core, MiB, index or PID; keeps arithmetic and messages small
SHOWN_CHARACTERS = 40

_DIGITS = re.compile(r"[0-9]+\Z")  # not \d, which takes every script's digits
_NEGATIVE = re.compile(r"-[0-9]+\Z")
_DIGITS_READ = 12  # longer is huge, or padded with zeros for no good reason


def shown(value: object) -> str:
    """``value`` as it may stand in a one-line message: ASCII, no control characters, short."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # repr would be long, or refused by Python
    text = ascii(value[: SHOWN_CHARACTERS + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def whole_number(value: object, name: str, example: str, least: int = 0) -> int:
    """A whole number from JSON (an int) or from text (ASCII digits and nothing else).

    Raises BadInput for everything else: signs, fractions, exponents, blanks, units, other scripts'
    digits, booleans, floats even when integral, and numbers outside ``least``..LARGEST_NUMBER.
    ``example`` completes the remedy: "write whole MiB, such as 4096".
    """
    number = _digits(value)
    if number is None:
        raise BadInput(f"{name} {shown(value)}", "not a whole number", example)
    if number < least:
        raise BadInput(f"{name} {shown(value)}", f"below the least, {least}", example)
    if number > LARGEST_NUMBER:
        raise BadInput(f"{name} {shown(value)}", "far beyond any card", example)
    return number


def _digits(value: object) -> Optional[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        return None
    if _DIGITS.match(value):
        return int(value) if len(value) <= _DIGITS_READ else LARGEST_NUMBER + 1
    return -1 if _NEGATIVE.match(value) else None  # below every least: the refusal should say so


def mib_down(size_bytes: int) -> int:
    """Whole MiB for what is free: never more than there is."""
    return size_bytes // MIB


def mib_up(size_bytes: int) -> int:
    """Whole MiB for what is used: never less than there is.

    With a limit in whole MiB, ``mib_up(used) + mib_down(limit - used)`` is the limit.
    """
    return -(-size_bytes // MIB)


def mib_text(size_mib: int) -> str:
    """As mGPU's client writes it: ``4096 MiB``."""
    return f"{size_mib} MiB"
