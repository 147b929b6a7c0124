"""Shows the text that a filter kept. The server detokenizes the ranges of the report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    from gemserve_client.client import GemserveClient
    from gemserve_client.replies import FilterReport


def show_kept(
    client: GemserveClient, message: ChatCompletionMessageParam, report: FilterReport
) -> None:
    """Print each kept range on stderr."""
    if report.selection is None:
        print(f"{report.method} keeps other passages in every layer", file=sys.stderr)
        return
    ids = _post(client, "tokenize", {"messages": [message]})["tokens"]
    for start, stop in report.selection:
        text = _post(client, "detokenize", {"tokens": ids[start:stop]})["prompt"]
        print(f"[{start}:{stop}] {text!r}", file=sys.stderr)


def _post(client: GemserveClient, name: str, body: dict[str, Any]) -> Any:
    """Send a request to an endpoint that is beside /v1 and not in it."""
    return client.post(str(client.base_url.join(f"../{name}")), cast_to=object, body=body)
