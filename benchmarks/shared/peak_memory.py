"""The memory that this process has, and the most that it has had since a mark. Linux only."""

from __future__ import annotations

from pathlib import Path


def mark() -> int:
    """Begin to measure the peak anew. Returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak() -> int:
    """The most resident bytes since the mark."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
