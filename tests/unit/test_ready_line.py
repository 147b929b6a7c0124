"""The line with which a server says that it is ready."""

import json
import shlex

import pytest

from gemserve.http_server.ready_line import ready_line, url_to_try


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::2", "http://[fd00::2]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_the_address_is_one_that_can_be_opened(host: str, url: str) -> None:
    assert url_to_try(host, 80) == url


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_command_is_one_that_a_shell_takes(has_keys: bool) -> None:
    """A model's name may have a quote."""
    line = ready_line("0.0.0.0", 8000, "it's a model", has_keys=has_keys)
    words = shlex.split(line.partition("try: ")[2])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's a model"
    assert ("Authorization: Bearer KEY" in words) is has_keys
