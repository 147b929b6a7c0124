"""How clients name a model that was given as a path: paths of the server used to be its name."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from gemserve.api.requests.model_names import ModelNames
from gemserve.config import ModelConfig, ServerConfig, also_named, served_name
from gemserve.errors import ModelNotFound

AUTO = ServerConfig()


def test_a_file_or_folder_gives_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "Small-1B", tmp_path / "gemma-270m.Q4_1.gguf"
    folder.mkdir()
    file.touch()
    assert served_name(ModelConfig(model=str(folder)), AUTO) == "Small-1B"
    assert served_name(ModelConfig(model=f"{folder}/"), AUTO) == "Small-1B"
    assert served_name(ModelConfig(model=str(file)), AUTO) == "gemma-270m.Q4_1"
    monkeypatch.chdir(folder)
    assert served_name(ModelConfig(model="."), AUTO) == "Small-1B"


@pytest.mark.parametrize("model", ["builtin", "smollm2", "org/name"])
def test_other_names_stay(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert served_name(ModelConfig(model=model), AUTO) == model


def test_the_option_is_the_only_name() -> None:
    chosen = ServerConfig(served_model_name="mine")
    assert served_name(ModelConfig(model="/models/x"), chosen) == "mine"
    assert also_named(ModelConfig(model="/models/x"), chosen) is None


def test_requests_may_still_name_the_path() -> None:
    """Clients that were set up with it would get 404s otherwise."""
    adapters = Mock()
    names = ModelNames("x", adapters, also_named(ModelConfig(model="/models/x"), AUTO))
    for model in ("x", "/models/x", None):
        assert names.describe_adapter(model) is None
    adapters.describe.assert_not_called()
    names.describe_adapter("/models/x:tone")
    adapters.describe.assert_called_once_with("tone")
    with pytest.raises(ModelNotFound, match="serves 'x'"):
        names.describe_adapter("/models/y")
