"""What a 404 says about the paths of other servers that this one does not serve."""

from __future__ import annotations

_NOT_SERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/moderations": "moderations",
    "/v1/rerank": "reranking",
    "/v1/batches": "batches",
    "/v1/files": "files, but texts under /v1/documents",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/responses": "stored responses: nothing is stored",
    "/v1/messages/batches": "batches",
}


def not_served(path: str) -> str | None:
    """The message of the 404 for a path that clients know from other servers."""
    for prefix, what in _NOT_SERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return (
                f"{path[:100]}: this server does not serve {what}. It generates text: POST "
                "/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages."
            )
    return None
