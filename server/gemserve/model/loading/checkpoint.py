"""Opens a model by name: a directory or hub id in transformers' layout, or a GGUF file."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.families.multimodal import TEXT_NAMES, text_config
from gemserve.model.loading import gguf, packed_checkpoints
from gemserve.model.loading.gguf_file import GgufFile, read_gguf
from gemserve.model.loading.gguf_tokenizer import load_tokenizer
from gemserve.model.loading.packed_formats import Packing
from gemserve.model.loading.quantised import (
    ask_for_dequantised,
    check_scales,
    find_packing,
    log_dequantised,
    quantisation_of,
)
from gemserve.model.loading.weight_files import check_complete, check_files
from gemserve_kernels.blocks import format_of

log = logging.getLogger("gemserve.loading")

_RANKS = "transformers.distributed.tensor_parallel"
BUILTIN_PATH = Path(str(files("gemserve.builtin") / "model"))


class Checkpoint(Protocol):
    """`source` is a path or a hub id.

    `config` is transformers' config with the checkpoint's dtype.
    """

    source: str
    config: Any

    @property
    def has_blocks(self) -> bool:
        """Whether matrices are in blocks that products read (`gemserve_kernels.blocks`)."""

    def plan_blocks(self, empty: Any) -> None:
        """Note at a model on the meta device what its weights take in blocks."""

    def norms(self, empty: Any) -> dict[str, torch.Tensor]:
        """The norms' weights by their names in a model on the meta device, if they are cheap."""

    def load_tokenizer(self) -> Any: ...

    def load_weights(
        self, dtype: torch.dtype, num_ranks: int = 1, *, in_blocks: bool = False
    ) -> Any:
        """A transformers model on the host. All of its weights have `dtype`.

        With several ranks it is this process's part of one, on the process's device. `in_blocks`:
        quantised weights stay as they are where the checkpoint has them in blocks.
        """


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Read the config, not the weights. Raises `ModelError`, or what transformers raises."""
    path = gguf.find_gguf(config.model)
    return HubCheckpoint(config) if path is None else GgufCheckpoint(read_gguf(path))


class GgufCheckpoint:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.source = str(file.path)
        self.config: Any = gguf.load_config(file)

    def load_tokenizer(self) -> Any:
        return load_tokenizer(self._file)

    def load_weights(
        self, dtype: torch.dtype, num_ranks: int = 1, *, in_blocks: bool = False
    ) -> Any:
        assert num_ranks == 1, "refused by `loader.check_ranks`"
        return gguf.load_weights(self._file, self.config, dtype, in_blocks=in_blocks)

    @property
    def has_blocks(self) -> bool:
        return any(format_of(tensor.type_id) for tensor in self._file.tensors)

    def plan_blocks(self, empty: Any) -> None:
        gguf.plan_blocks(self._file, empty)

    def norms(self, empty: Any) -> dict[str, torch.Tensor]:
        return gguf.read_norms(self._file, empty)


class HubCheckpoint:
    """A directory or a hub id, read by transformers. Packed matrices are read by gemserve."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import AutoConfig

        self.source = _resolve_source(config.model)
        self._options: dict[str, Any] = {
            "revision": config.revision,
            "trust_remote_code": config.trust_remote_code,
        }
        try:
            config = AutoConfig.from_pretrained(self.source, **self._options)
        except OSError as error:
            if Path(self.source).is_dir():
                raise
            raise ModelError(
                f"cannot load model {self.source!r}: no such directory or GGUF file here, and "
                f"not to be had from the hub: {' '.join(str(error).split())}"
            ) from error
        self.config: Any = text_config(config)
        self._names = TEXT_NAMES if self.config is not config else None

    @property
    def has_blocks(self) -> bool:
        return find_packing(self.source, self.config) is not None

    def plan_blocks(self, empty: Any) -> None:
        """Only by files that are on this machine: nothing is fetched."""
        packing = find_packing(self.source, self.config)
        if packing is None:
            return
        tensors = check_files(self._folder(), is_quantised=True)
        if not tensors:
            log.warning("%s: its weights are not here, and are planned dequantised", self.source)
        packed_checkpoints.plan_blocks(tensors, packing, empty, self._names)

    def norms(self, empty: Any) -> dict[str, torch.Tensor]:
        return {}

    def load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.source, **self._options)

    def load_weights(
        self, dtype: torch.dtype, num_ranks: int = 1, *, in_blocks: bool = False
    ) -> Any:
        from transformers import AutoModelForCausalLM

        packing = find_packing(self.source, self.config)
        if packing is not None:
            assert num_ranks == 1, "refused by `loader.check_ranks`"
            return self._load_packed(packing, dtype, in_blocks=in_blocks)
        options: dict[str, Any] = dict(self._options)
        if self._names is not None:
            options["key_mapping"] = self._names
        if num_ranks > 1:
            from transformers import DistributedConfig

            options["distributed_config"] = DistributedConfig(tp_size=num_ranks)
        settings = quantisation_of(self.config)
        is_local = Path(self.source).is_dir()
        if is_local:
            self._check_files(settings)
        ask_for_dequantised(self.config)
        # what the first would warn of is in the report; the second warns of ranks where there are
        # none
        quiet = ["transformers.modeling_utils"]
        if num_ranks == 1 or settings is not None:
            quiet.append(_RANKS)
        with _quiet(*quiet):
            model, report = AutoModelForCausalLM.from_pretrained(
                self.source,
                config=self.config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
        check_complete(self.source, model, report)
        if settings is not None:
            if not is_local:  # the files are here only now
                self._check_files(settings)
            # transformers leaves those without scales as they are stored
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            log_dequantised(self.source, settings, model, dtype)
        return model

    def _load_packed(self, packing: Packing, dtype: torch.dtype, *, in_blocks: bool) -> Any:
        if not Path(self.source).is_dir():
            self._fetch_files()
        tensors = check_files(self._folder(), is_quantised=True)
        if not tensors:
            raise ModelError(f"{self.source}: has no model.safetensors, nor an index of several")
        config = copy.deepcopy(self.config)
        del config.quantization_config
        with _quiet("transformers.modeling_utils", _RANKS):
            model = packed_checkpoints.load_weights(
                self.source,
                config,
                tensors,
                packing,
                dtype,
                in_blocks=in_blocks,
                key_mapping=self._names,
                trust_remote_code=self._options["trust_remote_code"],
            )
        from transformers import GenerationConfig

        with suppress(OSError):  # many checkpoints have no such file
            model.generation_config = GenerationConfig.from_pretrained(
                self.source, revision=self._options["revision"]
            )
        return model

    def _fetch_files(self) -> None:
        """Bring the weights' files onto this machine. Raises `OSError` if there are none."""
        from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
        from transformers.utils.hub import get_checkpoint_shard_files

        revision = self._options["revision"]
        find = partial(cached_file, self.source, revision=revision)
        if find(SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False) is None:
            index = find(SAFE_WEIGHTS_INDEX_NAME)
            get_checkpoint_shard_files(self.source, index, revision=revision)

    def _check_files(self, settings: Mapping[str, Any] | None) -> None:
        """Check the headers of the files, which must be on this machine."""
        tensors = check_files(self._folder(), is_quantised=settings is not None)
        if settings is not None:
            check_scales(settings, tensors)

    def _folder(self) -> Path:
        """The folder of the files that are on this machine."""
        from transformers.utils import CONFIG_NAME, cached_file

        revision = self._options["revision"]
        found = cached_file(self.source, CONFIG_NAME, revision=revision, local_files_only=True)
        assert found is not None, "it was read to make `config`"
        return Path(found).parent


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Leave out warnings of the loggers of those names."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _resolve_source(model: str) -> str:
    if model == "builtin":
        return str(BUILTIN_PATH)
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    path = Path(model).expanduser()
    if path.exists() or looks_like_path:
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model {model!r}: no such directory, or neither config.json nor a GGUF file in it"
            )
        return str(path)
    return model
