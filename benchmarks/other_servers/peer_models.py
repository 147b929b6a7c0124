"""SmolLM2 in the forms that other servers read: a bfloat16 checkpoint and a bfloat16 GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from gemserve.config import ModelConfig
from gemserve.model.loading.checkpoint import open_checkpoint
from gemserve.model.loading.gguf import find_gguf

_WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type")
_MOSTLY_BF16 = 32  # general.file_type


def write_checkpoint(folder: Path) -> Path:
    """The weights as transformers' files, with tokenizer and chat template. Written once."""
    if not (folder / "model.safetensors").exists():
        checkpoint = open_checkpoint(ModelConfig(model="smollm2"))
        checkpoint.load_tokenizer().save_pretrained(folder)
        checkpoint.load_weights(torch.bfloat16).save_pretrained(folder)
    return folder


def write_bfloat16_gguf(path: Path) -> Path:
    """The GGUF file with its quantised tensors as bfloat16, everything else unchanged."""
    if path.exists():
        return path
    reader = GGUFReader(quantised_gguf())
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


def quantised_gguf() -> Path:
    path = find_gguf("smollm2")
    assert path is not None
    return path
