"""A GGUF file of blocks, changed, is loaded with the numbers of the `gguf` package, or refused."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH_NAMES
from hypothesis import event, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.loading.checkpoint import GgufCheckpoint
from gemserve.model.loading.gguf_file import read_gguf
from gemserve.model.loading.loader import load
from gemserve_kernels.blocks import FORMATS
from tests import models
from tests.compiled_step import compiled_step, needs_compiler
from tests.fuzz.cases import MIB, NUMBERS, bounded, cases
from tests.kernels.test_blocks import draw
from tests.model import gguf_files
from tests.step_prompts import Prompts

pytestmark = needs_compiler
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
ARCHITECTURES = ("llama", "qwen2")  # llama.cpp reorders rows of the first
ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor in a file's table, and its bytes. `dims`: the innermost first, as in files."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int
    data: bytes

    def packed(self) -> bytes:
        name, count = self.name.encode(), len(self.dims)
        numbers = (count, *self.dims, self.type_id, self.offset)
        return struct.pack(f"<Q{len(name)}sI{count}QIQ", len(name), name, *numbers)


@dataclass(frozen=True, kw_only=True)
class Base:
    """`metadata`: of a file, with its count. `full`: a tensor's name in transformers' model."""

    architecture: str
    metadata: bytes
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    full: dict[str, str]


def base_of(architecture: str, folder: Path, vocab_size: int) -> Base:
    """The base of a small model's file, which has a tokenizer if the vocabulary is large enough."""
    config = models.config(architecture)
    for name, size in {**SIZES, "vocab_size": vocab_size}.items():
        setattr(config, name, size)
    config.layer_types, config.head_dim = None, 64
    model = AutoModelForCausalLM.from_config(type(config)(**config.to_dict()))
    has_tokenizer = vocab_size == models.VOCAB
    path = gguf_files.write(
        folder / "base.gguf", model, architecture=architecture, has_tokenizer=has_tokenizer
    )
    content = path.read_bytes()
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, 1)
    names = {}
    for full in model.state_dict():
        stem, _, suffix = full.rpartition(".")
        names[f"{table.get_name(stem)}.{suffix}"] = full
    first = next(iter(names)).encode()
    return Base(
        architecture=architecture,
        metadata=content[16 : content.index(struct.pack("<Q", len(first)) + first)],
        config=model.config.to_dict(),
        shapes={name: tuple(model.get_parameter(full).shape) for name, full in names.items()},
        full=names,
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Base]]:
    with compiled_step():
        folder = tmp_path_factory.mktemp("bases")
        yield [base_of(architecture, folder, vocab_size=48) for architecture in ARCHITECTURES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    with compiled_step():
        yield base_of("llama", tmp_path_factory.mktemp("whole"), models.VOCAB)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed") / "a.gguf"


def rows_of(base: Base, formats: list[int]) -> list[Row]:
    """Tensors with random numbers: matrices in these formats in turn, vectors in float32."""
    rows, offset = [], 0
    for index, (name, shape) in enumerate(base.shapes.items()):
        kind = FORMATS[formats[index % len(formats)]]
        if len(shape) == 1:
            type_id, data = 0, np.linspace(0.5, 1, shape[0], dtype=np.float32).tobytes()
        else:
            type_id, data = kind.type_id, draw(kind, *shape, seed=index).numpy().tobytes()
        dims = tuple(reversed(shape))
        rows.append(Row(name=name, dims=dims, type_id=type_id, offset=offset, data=data))
        offset += -(-len(data) // ALIGNMENT) * ALIGNMENT
    return rows


def written(base: Base, rows: list[Row]) -> bytes:
    head = b"GGUF" + struct.pack("<IQ", 3, len(rows)) + base.metadata
    head += b"".join(row.packed() for row in rows)
    data = b"".join(row.data + bytes(-len(row.data) % ALIGNMENT) for row in rows)
    return head + bytes(-len(head) % ALIGNMENT) + data


SIZED = st.one_of(NUMBERS, st.sampled_from([16, 32, 48, 64, 256, 2**20, 2**40, 2**61]))
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("type", "dims", "form", "offset", "overlap", "name", "bytes", "out")),
        st.integers(0, 63),
        st.integers(0, 63),
        SIZED,
        st.lists(SIZED, max_size=5),
    ),
    max_size=3,
)
TYPES = [int(kind) for kind in GGMLQuantizationType]


def changed(rows: list[Row], changes: list[Any]) -> list[Row]:
    """The table after changes: each names a tensor, another one, a number, and a shape."""
    rows = list(rows)
    for kind, place, other, number, dims in changes:
        at = place % len(rows)
        row, beside = rows[at], rows[other % len(rows)]
        if kind == "type":
            type_id = TYPES[number % len(TYPES)] if other % 4 else number % 2**32
            rows[at] = replace(row, type_id=type_id)
        elif kind == "dims":
            rows[at] = replace(row, dims=tuple(dims))
        elif kind == "form":  # of as many numbers
            forms = [row.dims[::-1], (prod(row.dims),), (*row.dims, 1), (1, *row.dims), (0, *dims)]
            rows[at] = replace(row, dims=forms[number % len(forms)])
        elif kind == "offset":
            rows[at] = replace(row, offset=number)
        elif kind == "overlap":
            rows[at] = replace(row, offset=beside.offset)
        elif kind == "name":
            rows[at] = replace(row, name=beside.name if number % 2 else f"blk.{number % 3}.x")
        elif kind == "bytes":
            random = np.random.default_rng(number).bytes(len(row.data))
            rows[at] = replace(row, data=random if number % 2 else bytes(len(row.data)))
        elif len(rows) > 1:
            del rows[at]
    return rows


def by_gguf(base: Base, path: Path) -> dict[str, torch.Tensor]:
    """All parameters as the `gguf` package reads them, whose rows transformers puts into order."""
    processor = TENSOR_PROCESSORS.get(base.architecture, TensorProcessor)(base.config)
    found = {}
    for tensor in GGUFReader(path).tensors:
        with np.errstate(all="ignore"):
            numbers = quants.dequantize(np.array(tensor.data), tensor.tensor_type)
            numbers = numbers.reshape(tuple(reversed(tensor.shape.tolist())))
            weights = processor.process(numbers, tensor.name).weights
        found[base.full[tensor.name]] = torch.from_numpy(np.ascontiguousarray(weights)).float()
    return found


def load_weights(path: Path) -> Any | None:
    try:
        return GgufCheckpoint(read_gguf(path)).load_weights(torch.float32, in_blocks=True)
    except ModelError as error:
        assert str(path) in str(error)
        return None


@given(st.data())
@cases(40)
@pytest.mark.slow
def test_blocks_have_the_numbers_of_the_package(
    bases: list[Base], path: Path, data: st.DataObject
) -> None:
    base = data.draw(st.sampled_from(bases))
    rows = rows_of(base, data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    content = written(base, changed(rows, data.draw(CHANGES)))
    cut = data.draw(st.one_of(*[st.just(0)] * 4, st.integers(1, 2**20))) % len(content)
    path.write_bytes(content[: len(content) - cut])
    with bounded("gguf blocks", cpu_s=20, grown_bytes=200 * MIB), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_weights(path)
    if model is None:
        return
    event("loaded")  # `--hypothesis-show-statistics` counts them
    expected = by_gguf(base, path)
    for name, parameter in model.named_parameters():
        numbers = parameter.detach() + 0
        assert torch.equal(numbers.nan_to_num(), expected[name].nan_to_num()), name
        assert torch.equal(numbers.isnan(), expected[name].isnan()), name


SPANS = st.lists(st.tuples(st.integers(0, 2**32), st.binary(min_size=1, max_size=40)), max_size=4)


@given(st.data())
@cases(2, many_times=0.2)
def test_damaged_blocks_are_computed_or_refused(
    whole: Base, path: Path, data: st.DataObject
) -> None:
    """A step and the layers read the same numbers: where one is finite, the other one is."""
    rows = rows_of(whole, data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    content, size = bytearray(written(whole, rows)), sum(len(row.data) for row in rows)
    for place, changed_to in data.draw(SPANS):
        at = len(content) - 1 - place % size
        content[at : at + len(changed_to)] = changed_to[: len(content) - at]
    path.write_bytes(content)
    with bounded("gguf damaged blocks", cpu_s=60, grown_bytes=600 * MIB):
        try:
            model = load(ModelConfig(model=str(path), device="cpu", dtype="float32")).model
        except ModelError as error:
            assert "a.gguf" in str(error)
            return
        event("loaded")
        prompts = Prompts(model, [1, 40])
        stepped, by_layers = prompts.decode(with_cpu_step(model, "auto")), prompts.decode(model)
    assert torch.equal(stepped.isfinite(), by_layers.isfinite())
