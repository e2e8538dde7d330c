"""How sizes, times, addresses and places are written by people. Text in, checked values out or ValueError; knows no settings.

Sizes are whole bytes, or a number with a unit: B, KB MB GB TB (powers of 1000), KiB MiB GiB TiB (powers of 1024). Times are whole
milliseconds, or a number with ms, s, min or h. What a setting's range is, is in `config`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4
SIZE_UNITS: Final[dict[str, int]] = {
    "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
}  # fmt: skip
TIME_UNITS_MS: Final[dict[str, int]] = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000}
_MEANT: Final = {"m": "min"}  # a short form that people write: not "ms", which is nearer
_QUANTITY: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,10})?) ?([A-Za-z]{1,10})")
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")
SSD_BYTES_MIN: Final = 1 * MIB  # below, an extent's header and table leave no room for a block
SSD_BYTES_MAX: Final = 1024 * TIB


def parse_size(value: object) -> int:
    """Bytes from an int or text like "512MiB", "1.5 GB", "4096". Raises ValueError saying what is allowed."""
    return _quantity(value, SIZE_UNITS, "bytes", "'64MB' (10**6) or '64MiB' (2**20)")


def parse_time_ms(value: object) -> int:
    """Milliseconds from an int or text like "30s", "500ms", "2min", "1500". Raises ValueError saying what is allowed."""
    return _quantity(value, TIME_UNITS_MS, "milliseconds", "'30s' or '500ms'")


def _quantity(value: object, units: dict[str, int], word: str, example: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be whole {word}, or text like {example}")
    if _WHOLE.fullmatch(value):
        return int(value)
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"must be whole {word}, or text like {example}")
    if match[2] not in units:
        folded = {**{unit.lower(): unit for unit in units}, **{short: unit for short, unit in _MEANT.items() if unit in units}}
        near = folded.get(match[2].lower()) or next(iter(difflib.get_close_matches(match[2], units, 1, 0.3)), None)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"unknown unit {match[2]!r}: units are {', '.join(units)}{hint}")
    amount = Decimal(match[1]) * units[match[2]]
    if amount != int(amount):
        raise ValueError(f"is no whole number of {word}")
    return int(amount)


def as_whole(value: object) -> int:
    """An int, or text of one. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    raise ValueError("must be a whole number")


def as_number(value: object) -> float:
    """A number, or text of one; never infinite nor NaN by name. Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18:
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?", value):
        return float(value)
    raise ValueError("must be a number")


def as_switch(value: object) -> bool:
    """true or false, or the usual words for them; no number but as text. Raises ValueError."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        return value.lower() in ("true", "1", "yes", "on")
    raise ValueError("must be true or false")


def as_text(value: object) -> str:
    """A string of sane length. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("must be a string")
    if "\0" in value or len(value) > 4096:
        raise ValueError("must be at most 4096 characters without NUL")
    return value


def as_host(value: object) -> str:
    """A host name or address, without a port. Raises ValueError."""
    text = as_text(value)
    if not text or any(c.isspace() for c in text) or "/" in text:
        raise ValueError("must be a host name or an IP address, like '127.0.0.1'")
    return text


def join_address(host: str, port: int) -> str:
    """'host:port', of an IPv6 address '[v6]:port'."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """'host:port' or '[v6]:port' -> (host, port 1..65535). Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bare_v6 = ":" in host and not text.startswith("[")
    if not colon or not host or bare_v6 or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is no address: write 'host:port' with a port in 1..65535, like '127.0.0.1:7400'")
    return as_host(host), int(port)


def split_addresses(text: str) -> list[tuple[str, int]]:
    """'m1:7400,m2:7400' -> [(host, port), ...], at least one. Raises ValueError."""
    return [split_address(part.strip()) for part in text.split(",")]


def as_advertised(value: object) -> str:
    """A host that others reach this one by, without a port; empty: none. Raises ValueError."""
    text = as_text(value)
    if text and (text.count(":") == 1 or text.startswith("[")):
        raise ValueError(f"{text!r}: must be a host name or an IP address alone, without port or brackets")
    return as_host(text) if text else text


def as_addresses(value: object) -> str:
    """'host:port', several with commas, as it was written. Raises ValueError."""
    text = as_text(value)
    split_addresses(text)
    return text


@dataclass(frozen=True, slots=True)
class SsdPlace:
    """Where a worker's SSD tier lies and how many bytes all of its files may have."""

    directory: Path
    size_bytes: int


def parse_ssd(value: object) -> SsdPlace | None:
    """'DIR:SIZE' -> the place; '' -> None (no SSD tier). Raises ValueError."""
    text = as_text(value)
    if not text:
        return None
    directory, colon, size = text.rpartition(":")
    if not colon or not directory:
        raise ValueError(f"{text!r}: must be DIR:SIZE, like '/mnt/nvme/kvpool:200GiB'")
    size_bytes = parse_size(size)
    if not SSD_BYTES_MIN <= size_bytes <= SSD_BYTES_MAX:
        raise ValueError(f"size {size!r} is not in {SSD_BYTES_MIN}..{SSD_BYTES_MAX} bytes")
    return SsdPlace(Path(directory), size_bytes)


def as_ssd(value: object) -> str:
    """'DIR:SIZE' or empty, as it was written. Raises ValueError."""
    text = as_text(value)
    parse_ssd(text)
    return text


def as_path(value: object) -> Path:
    """A directory, ~ resolved. Raises ValueError."""
    if isinstance(value, Path):
        return value
    text = as_text(value)
    if not text:
        raise ValueError("must be a directory, not empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("begins with ~ and there is no home directory") from None


def without_password(url: str) -> str:
    """The address of a store as it may be shown, whatever is wrong with it."""
    shown = re.sub(r"//.*@", "//***@", url, flags=re.DOTALL)
    return re.sub(r"(password=)[^&]*", r"\1***", shown)
