"""A GGUF file in the forms that other servers read: a bfloat16 checkpoint, a bfloat16 GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.checkpoint import open_checkpoint
from gemserve.model.loading.gguf import find_gguf

_WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type")
_MOSTLY_BF16 = 32  # general.file_type


def name_of(model: str) -> str:
    """The name by which every server has the model: "smollm2", or the file's without its ending."""
    return Path(model).stem


def gguf_file(model: str) -> Path:
    """Raises `ModelError` unless `model` is "smollm2" or a GGUF file, or a folder with one."""
    path = find_gguf(model)
    if path is None:
        raise ModelError(f"model {model!r}: no GGUF file")
    return path


def kv_bytes_per_token(model: str) -> int:
    """What the keys and values of one token take in bfloat16, in all layers."""
    config = open_checkpoint(ModelConfig(model=model)).config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(config.num_hidden_layers * 2 * kv_heads * head_dim * torch.bfloat16.itemsize)


def write_checkpoint(model: str, folder: Path) -> Path:
    """The weights as transformers' files, with tokenizer and chat template. Written once."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        checkpoint = open_checkpoint(ModelConfig(model=model, weights="dense"))
        checkpoint.load_tokenizer().save_pretrained(partial)
        checkpoint.load_weights(torch.bfloat16).save_pretrained(partial)
        partial.rename(folder)
    return folder


def write_bfloat16_gguf(model: str, path: Path) -> Path:
    """The GGUF file with its quantised tensors as bfloat16, everything else unchanged."""
    if path.exists():
        return path
    reader = GGUFReader(gguf_file(model))
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith(_WRITTEN_BY_WRITER):
            item_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], item_type)
    writer.add_file_type(_MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:  # norms stay in float32, as llama.cpp wants them
            writer.add_tensor(tensor.name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)
    return path
