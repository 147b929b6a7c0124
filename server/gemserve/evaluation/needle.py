"""`needle`: one fact in filler of a given length, at depths spread over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from gemserve.engine.prompt import Prompt, chat_prompt, text_prompt
from gemserve.evaluation.prose import stdlib_sentences
from gemserve.evaluation.recall import draw_needles

SUBTASK = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt, the one right answer, and the tokens that hold it."""

    subtask: str
    num_tokens: int
    prompt: Prompt
    answer: str
    gold: tuple[tuple[int, int], ...]


def needle_examples(tokenizer: Any, num_tokens: int, samples: int, seed: int) -> Iterator[Example]:
    """`samples` prompts of at most `num_tokens` tokens, as close to it as whole sentences allow.

    Depths are spread evenly, from the document's start to its end.
    """
    sentences = stdlib_sentences()
    for index in range(samples):
        rng = Random(f"needle {seed} {num_tokens} {index}")
        (needle,) = draw_needles(rng, 1)
        depth = index / max(1, samples - 1)
        filler = draw_filler(tokenizer, sentences, num_tokens - _OVERHEAD, rng)
        at = round(depth * len(filler))
        text = " ".join([*filler[:at], needle.statement, *filler[at:]])
        yield _example(tokenizer, num_tokens, text, needle.statement, needle.question, needle.value)


_OVERHEAD = 96  # tokens left for template, statement and question


def draw_filler(
    tokenizer: Any, sentences: tuple[str, ...], num_tokens: int, rng: Random
) -> list[str]:
    """Consecutive sentences from a random place on, `num_tokens` tokens of them at most."""
    start = rng.randrange(len(sentences))
    chosen: list[str] = []
    total = 0
    batch = 64
    while True:
        picked = [sentences[(start + len(chosen) + i) % len(sentences)] for i in range(batch)]
        encoded = tokenizer.backend_tokenizer.encode_batch(
            [" " + s for s in picked], add_special_tokens=False
        )
        for sentence, encoding in zip(picked, encoded, strict=True):
            if total + len(encoding.ids) > num_tokens:
                return chosen
            total += len(encoding.ids)
            chosen.append(sentence)


def _example(
    tokenizer: Any, num_tokens: int, document: str, statement: str, question: str, answer: str
) -> Example:
    content = f"{document}\n\n{question}"
    if tokenizer.chat_template is None:
        prompt = text_prompt(tokenizer, f"{content}\nAnswer:")
    else:
        prompt = chat_prompt(tokenizer, [{"role": "user", "content": content}])
    at = prompt.text.index(statement)
    covered = [
        i for i, (low, high) in enumerate(prompt.offsets) if low < at + len(statement) and high > at
    ]
    gold = ((covered[0], covered[-1] + 1),)
    return Example(subtask=SUBTASK, num_tokens=num_tokens, prompt=prompt, answer=answer, gold=gold)
