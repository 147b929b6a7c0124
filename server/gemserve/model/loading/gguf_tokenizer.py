"""Builds the tokenizer of a GGUF file by transformers' conversion, and fixes what that lacks."""

from __future__ import annotations

import logging
from typing import Any

from gemserve.errors import ModelError, shown
from gemserve.model.loading.gguf_file import GgufFile

log = logging.getLogger("gemserve.loading")

# `tokenizer.ggml.pre` names how text is split before merges. transformers 5.23 knows some and
# splits the rest as GPT-2 does, silently. The names below split each digit from the next. SmolLM2's
# two spaces before a digit would otherwise become tokens that it was not trained on.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-v2-code", "roberta-bpe")
# With these a word that is in the vocabulary is a token whatever the merges say, and prompts begin
# with BOS. llama.cpp derives both from the name, because files need not have either setting.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")


def load_tokenizer(file: GgufFile) -> Any:
    """Build the tokenizer. Raises `ModelError` if the file has none, or an unreadable one."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    kind, tokens = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens"))
    if kind is None or not tokens:
        raise ModelError(f"{file.path}: has no tokenizer in it")
    described, options = (
        {
            name: file.metadata[f"tokenizer.{key}"]
            for key, name in GGUF_TOKENIZER_MAPPING[group].items()
            if f"tokenizer.{key}" in file.metadata
        }
        for group in ("tokenizer", "tokenizer_config")
    )
    split = described.get("pre_tokenizer_type")
    if kind == "llama" or split in _WHOLE_WORDS:
        options.setdefault("add_bos_token", True)
    elif kind == "gemma4":
        # the chat template writes BOS, and the file's flag is wrong
        options["add_bos_token"] = False
    for name in ("bos", "eos", "unk", "pad"):
        index = described.get(f"{name}_token_id")
        if index is not None and (type(index) is not int or not 0 <= index < len(tokens)):
            raise ModelError(
                f"{file.path}: its {name} token is {shown(index)}, and it has {len(tokens)} tokens"
            )
        options[f"{name}_token"] = None if index is None else tokens[index]
    try:
        backend, more = convert_gguf_tokenizer(file.architecture, described)
    except Exception as error:  # the conversion raises errors of almost any type
        raise ModelError(f"{file.path}: its tokenizer cannot be read: {error}") from error
    if kind == "gpt2":
        _split(backend, split, file)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **options, **more
    )


def _split(backend: Any, name: str | None, file: GgufFile) -> None:
    """Split text by the rule that the tokenizer names."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if name in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif name not in (*_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
        log.warning(
            "%s: its tokenizer splits text by rule %r, which is unknown here; it is split as "
            "GPT-2 does, so that some text becomes other tokens than the model was trained on",
            file.path,
            name,
        )
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True
