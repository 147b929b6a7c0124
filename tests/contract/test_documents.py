"""Stored documents with a real model: a first question finds what the warm-up has read, whichever
client asks; and our client's and the OpenAI SDK's types for them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import responses
from openai.types.chat import ChatCompletionUserMessageParam

from gemserve.api.replies import document_types
from gemserve.api.requests.document_body import DocumentBody
from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve_client import AsyncGemserveClient, GemserveClient, documents, file_part, replies
from tests.fakes import live_server

FILLER = "The river runs past the houses, they say; nobody counts them. " * 40
TEXT = f"{FILLER}The code for the lantern is 48213. {FILLER}"
QUESTION = "What is the code for the lantern?"
SEGMENT = 512  # the document's last one also has what stands between it and the question
ASKED: dict[str, Any] = {"model": "builtin", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = EngineConfig(
        kv_memory_bytes=1 << 28,
        filter_min_tokens=256,
        filter_keep=256,
        filter_layer=2,
        filter_window=SEGMENT,
    )
    core = build_core(ModelConfig(device="cpu", dtype="float32"), config)
    with live_server(build_serving(core, model_name="builtin", config=ServerConfig())) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[GemserveClient]:
    with GemserveClient(base_url=url, max_retries=0, timeout=100) as opened:
        yield opened
        for document in opened.documents.list():
            opened.documents.delete(document)


@pytest.fixture
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_the_first_question_finds_the_document(client: GemserveClient, sdk: openai.OpenAI) -> None:
    """The warm-up must read the very tokens that a chat begins with, or it was for nothing."""
    document = client.documents.create(f"Plan A. {TEXT}", wait=True)
    assert document.status == "ready"
    assert document.cached_tokens >= document.tokens > 1000
    user: ChatCompletionUserMessageParam = {
        "role": "user",
        "content": [
            {"type": "file", "file": {"file_id": document.id}},
            {"type": "text", "text": QUESTION},
        ],
    }
    reply = sdk.chat.completions.create(messages=[user], **ASKED)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    found = reply.usage.prompt_tokens_details.cached_tokens
    assert found is not None
    assert document.tokens - SEGMENT <= found <= document.tokens + 8
    cold = sdk.chat.completions.create(
        messages=[{"role": "user", "content": f"Plan B. {TEXT}\n{QUESTION}"}], **ASKED
    )
    assert cold.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    # what follows another beginning is found, too
    assert (cold.usage.prompt_tokens_details.cached_tokens or 0) < document.tokens - 100
    assert cold.choices[0].message.content == reply.choices[0].message.content
    assert "48213" in str(reply.choices[0].message.content)


def test_responses_and_anthropic_s_messages_find_it_too(
    client: GemserveClient, sdk: openai.OpenAI, url: str
) -> None:
    document = client.documents.create(f"Plan C. {TEXT}", wait=True)
    item: responses.EasyInputMessageParam = {
        "role": "user",
        "content": [
            {"type": "input_file", "file_id": document.id},
            {"type": "input_text", "text": QUESTION},
        ],
    }
    response = sdk.responses.create(
        model="builtin", temperature=0, max_output_tokens=16, input=[item]
    )
    assert "48213" in response.output_text
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens >= document.tokens - SEGMENT
    source = {"type": "file", "file_id": document.id}
    content = [{"type": "document", "source": source}, {"type": "text", "text": QUESTION}]
    body = {"model": "builtin", "max_tokens": 12, "temperature": 0}
    reply = httpx.post(
        f"{url}/v1/messages",
        json={**body, "messages": [{"role": "user", "content": content}]},
        timeout=100,
    ).json()
    assert "48213" in reply["content"][0]["text"]
    assert reply["usage"]["cache_read_input_tokens"] >= document.tokens - SEGMENT


def test_nothing_is_left_of_a_deleted_document(client: GemserveClient) -> None:
    """Neither of the warm-up nor of the questions: the next one reads everything again."""
    document = client.documents.create(f"Plan D. {TEXT}", wait=True, pin=True)
    assert document.pinned
    longer = f"{FILLER}\n{QUESTION}"  # so much that the cache keeps this prompt, too
    content = [file_part(document), text_part(longer)]
    asked = client.chat.completions.create(messages=[{"role": "user", "content": content}], **ASKED)
    assert asked.filter is not None
    assert asked.filter.cached_tokens >= document.tokens - SEGMENT
    assert client.documents.retrieve(document).cached_tokens > document.cached_tokens
    client.documents.delete(document)
    again = client.chat.completions.create(
        messages=[{"role": "user", "content": f"Plan D. {TEXT}\n{longer}"}], **ASKED
    )
    assert again.filter is not None
    assert again.filter.cached_tokens == 0
    assert again.choices[0].message.content == asked.choices[0].message.content


def test_our_client_s_calls(client: GemserveClient) -> None:
    document = client.documents.create(TEXT, name="river", ttl=60, filter="none", wait=True)
    assert (document.name, document.pinned, document.cached_tokens) == ("river", False, 0)
    assert document.expires_at == document.created_at + 60
    assert [each.id for each in client.documents.list()] == [document.id]
    assert client.documents.retrieve(document).id == document.id
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": [file_part(document), text_part(QUESTION)]}], **ASKED
    )
    assert "48213" in str(chat.choices[0].message.content)
    kept = client.filter(model="builtin", prompt=QUESTION, document=document.id)
    assert "48213" in kept.text
    text = client.completions.create(prompt=QUESTION, document=document.id, **ASKED)
    assert text.usage is not None
    assert text.usage.prompt_tokens > document.tokens
    client.documents.delete(document.id)
    for call in (client.documents.retrieve, client.documents.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            call(document)
        assert missing.value.code == "document_not_found"
    with pytest.raises(openai.NotFoundError):
        client.documents.retrieve("a/../b")


@pytest.mark.anyio
async def test_the_asynchronous_client(url: str) -> None:
    async with AsyncGemserveClient(base_url=url, max_retries=0, timeout=100) as client:
        document = await client.documents.create(TEXT, filter="none")
        assert [each.id async for each in await client.documents.list()] == [document.id]
        assert (await client.documents.retrieve(document)).id == document.id
        await client.documents.delete(document)
        with pytest.raises(openai.NotFoundError):
            await client.documents.retrieve(document)


def test_a_file_comes_as_the_sdk_sends_files(sdk: openai.OpenAI) -> None:
    """The fields and the form of `client.files.create`, at our path."""
    reply: Any = sdk.post(
        "/documents",
        cast_to=object,
        body={"purpose": "user_data", "expires_after": {"anchor": "created_at", "seconds": 90}},
        files=[("file", ("notes.txt", io.BytesIO(b"The lantern.")))],
        options={"headers": {"Content-Type": "multipart/form-data"}},
    )
    assert (reply["name"], reply["bytes"]) == ("notes.txt", 12)
    assert reply["expires_at"] - reply["created_at"] == 90
    sdk.delete(f"/documents/{reply['id']}", cast_to=object)


def text_part(text: str) -> Any:
    return {"type": "text", "text": text}


def test_types_say_what_the_server_takes_and_sends() -> None:
    assert {*replies.Document.model_fields, "object"} == set(
        document_types.Document.__annotations__
    )
    assert set(documents.DocumentRequest.__annotations__) < set(DocumentBody.model_fields)
