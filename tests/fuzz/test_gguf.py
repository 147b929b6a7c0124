"""A changed GGUF file is loaded or refused by name: nothing else, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.gguf_file import GgufFile, read_gguf
from gemserve.model.loading.loader import load
from tests.compiled_step import compiled_step
from tests.fuzz.cases import MIB, bounded, cases, changed_bytes
from tests.model import gguf_files

KINDS = (Kind.F32, Kind.Q8_0, Kind.Q5_1)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> Iterator[None]:
    """Blocks stay as they are if there is a compiler."""
    with compiled_step():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return [gguf_files.save("llama", path, kind=kind).read_bytes() for kind in KINDS]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed") / "a.gguf"


def settings_end(content: bytes) -> int:
    """Where the vocabulary begins: what stands before it decides about shapes and sizes."""
    return content.index(b"tokenizer.ggml.tokens")


def read(path: Path) -> GgufFile | None:
    try:
        return read_gguf(path)
    except ModelError as error:
        assert str(path) in str(error)
        return None


@given(st.data())
@cases(40)
def test_a_header_is_read_or_refused(files: list[bytes], path: Path, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(files))
    hot = data.draw(st.sampled_from((settings_end(whole), len(whole))))
    path.write_bytes(data.draw(changed_bytes(whole, hot)))
    with bounded("gguf header", cpu_s=5, grown_bytes=300 * MIB):
        file = read(path)
    if file is not None:
        assert all(t.start + t.num_bytes <= path.stat().st_size for t in file.tensors)


@given(st.data())
@cases(2, many_times=0.1)
def test_a_model_is_loaded_or_refused(files: list[bytes], path: Path, data: st.DataObject) -> None:
    """The reader's checks are not all: settings size layers, and tokens become a tokenizer."""
    whole = data.draw(st.sampled_from(files))
    path.write_bytes(data.draw(changed_bytes(whole, settings_end(whole))))
    with bounded("gguf model", cpu_s=60, grown_bytes=600 * MIB):
        try:
            load(ModelConfig(model=str(path), device="cpu", dtype="float32"))
        except ModelError as error:
            assert "a.gguf" in str(error)
