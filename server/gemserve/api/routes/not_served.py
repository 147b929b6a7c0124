"""What a 404 says about the paths of other servers that this one does not serve."""

from __future__ import annotations

_OPENAI = (
    "It generates text: POST /v1/chat/completions, /v1/completions, /v1/responses or /v1/messages."
)
_OLLAMA = (
    "Of Ollama's paths it serves /api/chat, /api/generate, /api/show, /api/tags and /api/version."
)
_NOT_SERVED: dict[str, str] = {
    "/v1/embeddings": "embeddings",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/moderations": "moderations",
    "/v1/batches": "batches",
    "/v1/files": "files, but texts under /v1/documents",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/responses": "stored responses: nothing is stored",
    "/v1/messages/batches": "batches",
    # vLLM's
    "/pooling": "embeddings",
    "/classify": "classification",
    "/invocations": "SageMaker's invocations",
    # llama.cpp's
    "/completion": "llama.cpp's own completions",
    "/completions": "completions without /v1",
    "/chat/completions": "chats without /v1",
    "/models": "models without /v1",
    "/infill": "infilling",
    "/embedding": "embeddings",
    "/embeddings": "embeddings",
    "/reranking": "reranking there, but at POST /v1/rerank",
    "/slots": "slots: GET /load and /metrics tell what runs",
    "/apply-template": "templates: POST /tokenize with return_offsets gives a chat's text",
    "/lora-adapters": "llama.cpp's adapters, but those under /v1/adapters",
    # Ollama's
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/api/ps": "lists of loaded models: one model is served, see GET /api/tags",
    **dict.fromkeys(
        (f"/api/{word}" for word in ("pull", "push", "create", "copy", "delete", "blobs")),
        "other models than the one it was started with",
    ),
}


def not_served(path: str) -> str:
    """The message of the 404 for a path. Of those of other servers it says what they are for."""
    is_ollamas = _is_under(path, "/api")
    instead = _OLLAMA if is_ollamas else _OPENAI
    for prefix, what in _NOT_SERVED.items():
        if _is_under(path, prefix):
            return f"{path[:100]}: this server does not serve {what}. {instead}"
    return f"{path[:100]}: this server does not serve this path. {instead}"


def _is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
