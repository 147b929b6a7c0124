"""The built-in model's tokenizer: byte-level BPE, with one token for each character of a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

BOS, END, SYSTEM, USER, ASSISTANT, PAD = (
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role in ['system', 'developer'] %}<|system|>"
    "{% elif message.role == 'assistant' %}<|assistant|>"
    "{% else %}<|user|>{% endif %}"
    "{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Lower-case words carry their leading space; digits and lone capitals stand alone, so that a value
# has the same tokens in the statement (" 48213") as in the answer ("48213").
_PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)"
    r"| ?\p{Lu}?\p{Ll}+"
    r"|\p{Lu}"
    r"|\p{N}"
    r"| ?[\p{Lo}\p{Lm}\p{Lt}\p{M}]+"
    r"| ?[^\s\p{L}\p{N}\p{M}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], words: Iterable[str], vocab_size: int) -> Any:
    """Train on `texts`, with each of `words` repeated often enough to become one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    emphasis = (" " + " ".join([word] * 2000) for word in words)
    tokenizer.train_from_iterator((t for source in (texts, emphasis) for t in source), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def as_transformers(tokenizer: Any, max_length: int) -> Any:
    """Wrap for `save_pretrained`, with special tokens and chat template."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
