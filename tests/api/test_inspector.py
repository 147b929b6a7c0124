"""The inspector page's files: open, with a strict policy, and no part of the API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gemserve.api.access.gate import page_files
from tests.fakes import Api, FakeCore, api_over, replace_file

pytestmark = pytest.mark.anyio


async def test_the_page_needs_no_key(tokenizer: Any, tmp_path: Path) -> None:
    """The page asks for the key, so it cannot need one itself."""
    keys = replace_file(tmp_path / "keys", "sk-a")
    async with api_over(FakeCore(), tokenizer, api_key_file=keys) as api:
        for path in page_files():
            assert (await api.client.get(path)).status_code == 200, path
        assert (await api.client.post("/", json={})).status_code == 405
        for path in ("/v1/models", "/inspector/", "/inspector/../v1/models", "/inspector"):
            assert (await api.client.get(path)).status_code == 401, path


async def test_every_file_has_a_strict_policy(api: Api) -> None:
    for path in page_files():
        headers = (await api.client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


async def test_the_page_names_only_files_that_are_there(api: Api) -> None:
    """Behind a proxy's path an absolute address would lead elsewhere."""
    page = (await api.client.get("/")).text
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert named
    assert {f"/{name}" for name in named} <= set(page_files())
    for path in page_files():
        if path.endswith(".js"):
            source = (await api.client.get(path)).text
            imports = re.findall(r'^import .* from "(.*[.]js)";$', source, re.MULTILINE)
            assert all(name.startswith("./") for name in imports)
            assert {f"/inspector/{name[2:]}" for name in imports} <= set(page_files())


async def test_the_page_is_no_part_of_the_document(api: Api) -> None:
    paths = (await api.client.get("/openapi.json")).json()["paths"]
    assert not set(page_files()) & set(paths)
