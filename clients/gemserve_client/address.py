"""The server's address and the API key.

Both come from an argument, else from the environment, else from a default.
"""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000/v1"


def server_url(given: str | None = None) -> str:
    """Return `given`, else GEMSERVE_URL, else port 8000 of this machine.

    An address without a path gets /v1.
    """
    url = given or os.environ.get("GEMSERVE_URL") or DEFAULT_URL
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


def redact(text: str) -> str:
    """Return `text` without what may be secret in its URLs: users, passwords and queries."""
    text = re.sub(r"(?<=//)[^/@\s]+@", "***@", text)
    return re.sub(r"(//[^\s?]+\?)[^\s'\"]+", r"\1***", text)


def has_key(given: str | None = None) -> bool:
    """Whether there is a key, in `given` or GEMSERVE_API_KEY."""
    return bool(given or os.environ.get("GEMSERVE_API_KEY"))


def server_key(given: str | None = None) -> str:
    """Return `given`, else GEMSERVE_API_KEY, else "none" for a server that needs no key."""
    return given or os.environ.get("GEMSERVE_API_KEY") or "none"
