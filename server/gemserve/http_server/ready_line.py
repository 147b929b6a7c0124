"""What a server says when it is ready: where its page is, and a request to begin with. No torch."""

from __future__ import annotations

import ipaddress
import json
import shlex


def url_to_try(host: str, port: int) -> str:
    """An address of this machine, also where the server listens on all of them."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def ready_line(host: str, port: int, model: str, *, has_keys: bool) -> str:
    """`has_keys`: whether requests need one of the server's API keys.

    The request is a completion, because a model without a chat template answers these, too.
    """
    url = url_to_try(host, port)
    key = "-H 'Authorization: Bearer KEY' " if has_keys else ""
    body = shlex.quote(json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16}))
    return (
        f"ready: open {url}/ in a browser, or try: "
        f"curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d {body}"
    )
