"""Readers of option values. Each takes a text and raises `ValueError` if it is invalid."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemserve.errors import ConfigError, RequestError
from gemserve.types import Keep, parse_keep


def choice(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return read


class BadNumber(ValueError, argparse.ArgumentTypeError):
    """Says what a number must be. argparse shows the message, too."""


def number(low: float, high: float = float("inf"), kind: type = int) -> Callable[[str], Any]:
    """A reader of finite numbers from `low` to `high`."""

    def read(text: str) -> Any:
        limits = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        wanted = f"must be a {'whole number' if kind is int else 'number'}, {limits}"
        try:
            value = kind(text)
        except ValueError:
            raise BadNumber(wanted) from None
        if not low <= value <= high or value == float("inf"):
            raise BadNumber(wanted)
        return value

    return read


def read_layer(text: str) -> int | None:
    return None if text == "auto" else int(number(0)(text))


def read_method(text: str) -> str:
    """A filter method that requests may name. The table of methods takes torch along."""
    from gemserve.filtering.methods import SERVED_METHODS

    return choice(*SERVED_METHODS)(text)


def read_offload(text: str) -> int | str:
    return text if text == "auto" else int(number(0)(text))


def make_folder(name: str, path: Path) -> None:
    """Make a folder before the work begins. Raises `ConfigError` naming the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}={path}: cannot be a folder ({error.strerror})") from error


def read_value(name: str, text: str, read: Callable[[str], Any]) -> Any:
    """Read an option that is in no table. Raises `ConfigError` naming option, value and reason."""
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from error


def read_keep(text: str) -> Keep:
    """A `keep` from the command line: "512", "0.05" or "auto"."""
    try:
        return parse_keep(text if text == "auto" else float(text))
    except RequestError as error:
        raise ValueError(str(error).partition(": ")[2]) from error


def read_bytes(text: str) -> int:
    """A size such as "4GiB", "512MiB", "8GB" or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B)", text.strip())
    if match is None:
        raise ValueError("must be a size such as 4GiB, 512MiB or 8GB")
    amount, unit = match.groups()
    base = 1024 if "i" in unit else 1000
    size = int(float(amount) * base ** ("KMGT".index(unit[0]) + 1 if unit else 0))
    if size < 1:
        raise ValueError("must be at least 1 byte")
    return size


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


def read_origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in text.split(","))
    if origins != ("*",) and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError("must be * alone, or origins such as https://example.org, without a path")
    return origins


_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


def read_hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    if hosts != ("*",) and not all(map(_HOST.fullmatch, hosts)):
        raise ValueError("must be * alone, or names such as gem.example.org, without a port")
    return hosts


def read_adapters(text: str) -> tuple[tuple[str, str], ...]:
    given = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and equals and path for name, equals, path in given):
        raise ValueError("must be NAME=PATH")
    return tuple((name, path) for name, _, path in given)


def read_switch(text: str) -> bool:
    if text not in ("0", "1", "true", "false"):
        raise ValueError("must be true or false")
    return text in ("1", "true")
