"""Writes the samples of this folder: what gemserve keeps on disk, in formats of several versions.

    python -m tests.samples.make_samples

`present` is what this version writes, `newer` the same with a format that nobody knows yet. Run it
when a format changes, after `present` was moved to a folder named by the old format: those are as
the commits named here wrote them, and are not made anew.

    cache/kv-1                   the commit before f54b542c
    calibration/only_layer       9cdb600d
    calibration/words            58d61e79, without what was measured
    calibration/second_look      a0e3b89d, without what was measured
    adapter/first                2c9cb19d
    library/without_versions     af38d882
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from gemserve.adapters import folder as adapter_folder
from gemserve.calibration.files import read_calibration, write_calibration
from gemserve.engine.cache import files as cache_files
from gemserve.model.base_model import BaseModel

SAMPLES = Path(__file__).parent
SALT = bytes(range(32))
SHAPE = (1, 1, 2)
CALIBRATION = {
    "format": 1,
    "filter_layer": 3,
    "heads": [[2, 1], [3, 3]],
    "ends_with": True,
    "coverage_bound": 0.4,
    "window_bound": 0.3,
    "window": 1536,
    "auto_keep": 128,
    "recall": {"words": 0.9, "meaning": 0.8},
}
# the shape of tests.models.build("llama"), whatever its weights are
BASE = BaseModel(
    architecture="LlamaForCausalLM",
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    vocab_size=4096,
)


def make_cache(folder: Path, name: str) -> None:
    """A cache folder with one file of format `name`."""
    folder.mkdir(parents=True)
    (folder / "salt").write_bytes(SALT)
    chain = cache_files.hash_chain(SALT, b"seed", np.arange(cache_files.CHAIN_TOKENS))
    info = cache_files.FileInfo(
        path=folder / f"kv-{chain[-1].hex()}.safetensors",
        chain=chain,
        num_tokens=cache_files.CHAIN_TOKENS,
        shape=SHAPE,
        dtype="F32",
        element_bytes=4,
        block_tokens=cache_files.CHAIN_TOKENS,
        ids=frozenset(),
        seconds_per_cost=1e-9,
    )
    present, cache_files.FORMAT = cache_files.FORMAT, name
    try:
        writer = cache_files.FileWriter(info, SALT)
        writer.add(memoryview(bytes(cache_files.CHAIN_TOKENS * info.token_bytes)))
        writer.finish()
        writer.publish()
    finally:
        cache_files.FORMAT = present


def make_calibration(path: Path, file_format: int) -> None:
    write_calibration(path, CALIBRATION | {"format": file_format})
    if file_format == 1:
        read_calibration(path, num_layers=4, num_heads=4)


def make_adapter(folder: Path, file_format: int) -> None:
    keys = torch.linspace(-1, 1, 4 * 2 * 16).view(4, 2, 1, 16)
    adapter_folder.write_folder(
        folder,
        kind="prefix",
        settings={},
        tensors={"keys": keys, "values": keys.flip(0)},
        base=BASE,
    )
    path = folder / "adapter.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"format": file_format}, indent=1) + "\n"
    )


def make_library(folder: Path, file_format: str) -> None:
    """A library of one file, packed: most of a small database is empty."""
    from transformers import AutoTokenizer

    from gemserve.model.loading.loader import BUILTIN_PATH
    from gemserve_library.library import DATABASE
    from tests.library.worlds import add, open_library, text_source

    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "sample"
        library = open_library(made)
        text = "The ferry to Malmo leaves at nine."
        add(library, AutoTokenizer.from_pretrained(BUILTIN_PATH), [text_source("ferry.txt", text)])
        library.close()
        with closing(sqlite3.connect(made / DATABASE)) as connection:
            connection.execute(
                "UPDATE settings SET value = ? WHERE name = 'format'", (file_format,)
            )
            connection.commit()
        for path in made.iterdir():
            if path.stat().st_size:
                packed = gzip.compress(path.read_bytes(), mtime=0)
                (folder / f"{path.name}.gz").write_bytes(packed)


def main() -> None:
    for kind in ("cache", "adapter", "library"):
        for name in ("present", "newer"):
            shutil.rmtree(SAMPLES / kind / name, ignore_errors=True)
    make_cache(SAMPLES / "cache" / "present", cache_files.FORMAT)
    make_cache(SAMPLES / "cache" / "newer", "gemserve-kv-99")
    make_calibration(SAMPLES / "calibration" / "present.json", 1)
    make_calibration(SAMPLES / "calibration" / "newer.json", 99)
    make_adapter(SAMPLES / "adapter" / "present", adapter_folder.FORMAT)
    make_adapter(SAMPLES / "adapter" / "newer", 99)
    make_library(SAMPLES / "library" / "present", "1")
    make_library(SAMPLES / "library" / "newer", "99")


if __name__ == "__main__":
    main()
