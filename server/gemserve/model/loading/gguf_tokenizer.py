"""Builds the tokenizer of a GGUF file by transformers' conversion, and fixes what that lacks."""

from __future__ import annotations

import json
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
_MATCHED_WHOLE = (3, 4)  # types of tokens: "control" and "user-defined"


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
        spellings = _put_placeholders(described) if kind == "gpt2" else {}
        backend, more = convert_gguf_tokenizer(file.architecture, described)
        if spellings:
            backend = _spelt(backend, spellings, len(tokens))
    except Exception as error:  # the conversion raises errors of almost any type
        raise ModelError(f"{file.path}: its tokenizer cannot be read: {error}") from error
    if kind == "gpt2":
        _split(backend, split, file)
    elif kind == "llama" and described.get("add_prefix_space") is False:
        _put_no_space_before(backend, file.architecture)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **options, **more
    )
    if spellings:
        _check_indices(tokenizer, tokens, list(spellings.values()), file)
    return tokenizer


def _put_placeholders(described: dict[str, Any]) -> dict[str, str]:
    """Replace the tokens that the conversion would lose, and return what each placeholder means.

    Where tokens are spelt in GPT-2's letters for bytes, transformers takes those that have other
    characters for text, even if the file says that they are matched as a whole, such as DeepSeek's
    `<｜User｜>`. The end of a text then gets an index beyond the vocabulary.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = set(bytes_to_unicode().values())
    tokens, spellings = described["tokens"], {}
    described["tokens"] = list(tokens)
    types = described.get("token_type") or ()
    for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in _MATCHED_WHOLE and not letters.issuperset(token):
            placeholder = described["tokens"][index] = f"<placeholder-{index}>"
            spellings[placeholder] = token
    return spellings


def _spelt(backend: Any, spellings: dict[str, str], num_tokens: int) -> Any:
    """The tokenizer with the tokens that placeholders stand for, and none that the file lacks."""
    from tokenizers import Tokenizer

    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {spellings.get(key, key): index for key, index in vocab.items()}
    content["added_tokens"] = [
        {**token, "content": spellings.get(token["content"], token["content"])}
        for token in content["added_tokens"]
        if token["id"] < num_tokens
    ]
    return Tokenizer.from_str(json.dumps(content))


def _check_indices(tokenizer: Any, tokens: list[str], whole: list[str], file: GgufFile) -> None:
    """Raise `ModelError` unless the tokens of `whole`, and all others, have indices of the file."""
    vocab = tokenizer.get_vocab()
    known = dict(enumerate(tokens))
    wrong = [token for token, index in vocab.items() if index not in known]
    wrong += [token for token in whole if known.get(vocab.get(token, -1)) != token]
    if wrong:
        raise ModelError(
            f"{file.path}: its tokenizer cannot be read: token {shown(wrong[0])} would have "
            "another index than in the file"
        )


def _put_no_space_before(backend: Any, architecture: str) -> None:
    """Take text as it is. transformers puts a space before it, whatever the file says."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    if architecture.startswith("gemma"):  # never has one
        return
    if architecture == "phi3":
        backend.normalizer = normalizers.Replace(" ", "▁")
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
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
