"""What one client could see or change of another's: each case over a socket, with keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.access.gate import OPEN_PATHS, page_files
from gemserve.api.serving import build_serving
from gemserve.config import ServerConfig
from gemserve.engine.core import Core
from tests import adapters
from tests.bad_adapters import FOLDERS, PATHS, lay_out
from tests.fakes import COMPLETIONS, replace_file
from tests.served import KEEP, PATIENCE_S, Served, prose, served

# The question's words do not depend on the weights.
BY_ATTENTION = {**KEEP, "lexical": "off"}

ADAPTERS = "/v1/adapters"
QUESTION = "What is the code for the lamb?"


@dataclass(frozen=True, slots=True)
class Shared:
    """A server with two users and an administrator, who may load the adapters in `root`."""

    server: Served
    root: Path

    def ask(self, key: str, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "filter": BY_ATTENTION,
            **fields,
        }
        reply = self.server.post(COMPLETIONS, headers=bearer(key), **body)
        assert reply.status_code == 200, reply.text
        content: dict[str, Any] = reply.json()
        return content

    def load(self, name: str, path: str) -> httpx.Response:
        return httpx.post(
            self.server.url + ADAPTERS,
            json={"name": name, "path": path},
            headers=bearer("sk-admin"),
            timeout=PATIENCE_S,
        )


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def answer_of(reply: dict[str, Any]) -> tuple[str, Any]:
    return reply["choices"][0]["text"], reply["filter"]["selection"]


def cached_of(reply: dict[str, Any]) -> int:
    return int(reply["filter"]["cached_tokens"])


@pytest.fixture(scope="module")
def shared(builtin_core: Core, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("server")
    root = folder / "root"
    root.mkdir()
    for index, name in enumerate(("a", "b")):
        adapters.write(root / name, "prefix", builtin_core.model, seed=index)
    config = ServerConfig(
        adapter_dir=str(root),
        api_key_file=replace_file(folder / "keys", "sk-one", "sk-two"),
        admin_key_file=replace_file(folder / "admins", "sk-admin"),
    )
    with served(build_serving(builtin_core, model_name="builtin", config=config)) as server:
        yield Shared(server, root)


def test_keys_share_no_cached_documents(shared: Shared, tokenizer: Any) -> None:
    """The time of an answer told one tenant what another had asked."""
    prompt = f"{prose(tokenizer, 1200, seed=11)}\n\n{QUESTION}"
    first = shared.ask("sk-one", prompt)
    assert cached_of(first) == 0
    assert cached_of(shared.ask("sk-one", prompt)) > 1000
    other = shared.ask("sk-two", prompt)
    assert cached_of(other) == 0
    assert answer_of(other) == answer_of(first)
    assert cached_of(shared.ask("sk-two", prompt)) > 1000


@pytest.mark.parametrize("field", ["tenant", "session_id"])
def test_clients_do_not_choose_whose_cache_they_use(shared: Shared, field: str) -> None:
    """The salt came from the client, who could name another's."""
    body = {"prompt": "Hi", field: "sk-one"}
    reply = shared.server.post(COMPLETIONS, headers=bearer("sk-two"), **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


def test_a_client_s_salt_counts_within_its_key_only(shared: Shared, tokenizer: Any) -> None:
    prompt = f"{prose(tokenizer, 1200, seed=13)}\n\n{QUESTION}"
    assert cached_of(shared.ask("sk-one", prompt, cache_salt="sk-one")) == 0
    assert cached_of(shared.ask("sk-two", prompt, cache_salt="sk-one")) == 0
    assert cached_of(shared.ask("sk-one", prompt)) == 0
    assert cached_of(shared.ask("sk-one", prompt, cache_salt="sk-one")) > 1000


def test_an_adapter_is_part_of_what_is_cached(shared: Shared, tokenizer: Any) -> None:
    """Its identity was missing from the key, so that answers came from another model's states."""
    for name in ("a", "b"):
        assert shared.load(name, name).status_code == 200
    prompt = f"{prose(tokenizer, 1200, seed=12)}\n\n{QUESTION}"
    replies = [shared.ask("sk-one", prompt, adapter=each) for each in (None, "a", "b")]
    assert [cached_of(reply) for reply in replies] == [0, 0, 0]
    assert len({str(answer_of(reply)) for reply in replies}) == 3
    again = [shared.ask("sk-one", prompt, adapter=each) for each in (None, "a", "b")]
    assert all(cached_of(reply) > 1000 for reply in again)
    assert [answer_of(reply) for reply in again] == [answer_of(reply) for reply in replies]


def test_an_adapter_loaded_again_forgets_what_was_cached(
    shared: Shared, builtin_core: Core, tokenizer: Any
) -> None:
    """The same name with other weights found the old ones' states."""
    prompt = f"{prose(tokenizer, 1200, seed=13)}\n\n{QUESTION}"
    folder = shared.root / "changing"
    adapters.write(folder, "prefix", builtin_core.model, seed=3)
    old_version = shared.load("changing", "changing").json()["version"]
    old = shared.ask("sk-one", prompt, adapter="changing")
    adapters.write(folder, "prefix", builtin_core.model, seed=4)
    assert shared.load("changing", "changing").json()["version"] != old_version
    new = shared.ask("sk-one", prompt, adapter="changing")
    assert cached_of(new) == 0
    assert answer_of(new) != answer_of(old)
    assert shared.load("fresh", "changing").status_code == 200
    assert answer_of(shared.ask("sk-two", prompt, adapter="fresh")) == answer_of(new)


def test_adapters_come_from_their_folder_only(shared: Shared, builtin_core: Core) -> None:
    """`../`, an absolute path or a link read any file of the machine."""
    adapters.write(shared.root / "good", "prefix", builtin_core.model)
    lay_out(shared.root)
    assert shared.load("good", "good").status_code == 200
    for path in (*PATHS, str(shared.root / "good"), "/etc/passwd", "../keys"):
        reply = shared.load("stolen", path)
        assert reply.status_code == 400, path
        assert reply.json()["error"]["param"] == "path"
    names = [each["name"] for each in listed(shared)]
    assert "stolen" not in names


def listed(shared: Shared) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shared.server.get(ADAPTERS, bearer("sk-one")).json()["data"]
    return found


@pytest.mark.parametrize("kind", ["bin only", "pt only", "a header that lies", "linked weights"])
def test_nothing_but_safetensors_is_read(shared: Shared, builtin_core: Core, kind: str) -> None:
    """A pickle runs code when it is loaded."""
    name = kind.replace(" ", "-")
    adapters.write(shared.root / name / "x", "prefix", builtin_core.model)
    spoil, said = FOLDERS[kind]
    spoil(shared.root / name / "x")
    reply = shared.load(name, f"{name}/x")
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert name not in [each["name"] for each in listed(shared)]


def test_every_path_but_the_probes_needs_a_key(shared: Shared) -> None:
    """With keys set, endpoints outside of /v1 stayed open."""
    document = shared.server.get("/openapi.json", bearer("sk-one")).json()
    described = [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, methods in document["paths"].items()
        for method in methods
    ]
    assert len(described) > 20
    others = ["/openapi.json", "/docs", "/redoc", "/none", "/v1", "/v1/none", "/HEALTH"]
    others += ["//v1/models", "/v1//models", "/v1/models/", "//openapi.json", "/health/none"]
    for method, path in [*described, *(("GET", path) for path in others)]:
        reply = httpx.request(method, shared.server.url + path, timeout=PATIENCE_S)
        is_open = path in OPEN_PATHS | page_files().keys()
        assert (reply.status_code == 401) is not is_open, (method, path, reply.status_code)
    for key in ("", "sk-on", "sk-one ", "sk-three"):
        headers = {"Authorization": f"Bearer {key}x"}
        assert shared.server.get("/v1/models", headers).status_code == 401
    assert shared.server.get("/v1/models", bearer("sk-one")).status_code == 200
