"""`gemserve demo`: hides a fact in a long document, asks for it twice, and compares."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.calibration.search.example import Example
from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.gguf import find_gguf
from gemserve.prompting.prompt import Prompt
from gemserve_lab.demo.demo_server import Result, Server
from gemserve_lab.demo.document import HiddenFact, natural_document, synthetic_document
from gemserve_lab.demo.output import print_kept, print_savings, print_table
from gemserve_lab.metrics import score_answer

WHOLE, FILTERED = "filter: none", "the default filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """How one model is shown."""

    draw: Callable[[Any, int, int], HiddenFact]
    num_tokens: int
    seed: int
    max_tokens: int


# With an earlier calibration (layer 7) smollm2's filtered answer was right for seeds 1 to 4 of
# 7, and its unfiltered answer for seed 4 of 6. With the shipped one only seed 4 was tried.
DEMOS = {
    "smollm2": Demo(draw=natural_document, num_tokens=6000, seed=4, max_tokens=24),
    "builtin": Demo(draw=synthetic_document, num_tokens=16384, seed=7, max_tokens=24),
}


def run_demo(model: str, num_tokens: int | None = None, seed: int | None = None) -> int:
    """Return exit status 0 if the filtered answer is right.

    `model`: a key of `DEMOS`, which has what is None here: the document's least number of tokens,
    and which document and fact.
    """
    demo = DEMOS[model]
    tokenizer = _tokenizer(model)
    num_tokens = demo.num_tokens if num_tokens is None else num_tokens
    seed = demo.seed if seed is None else seed
    hidden = demo.draw(tokenizer, num_tokens, seed)
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory), model)
        try:
            server.start()
            results = _ask_both(server, hidden, demo.max_tokens)
        finally:
            server.stop()
    verdicts = {label: is_right(result.text, hidden) for label, result in results.items()}
    print()
    print_table(results, verdicts)
    print_savings(results[WHOLE], results[FILTERED])
    print_kept(tokenizer, hidden, results[FILTERED].report["selection"])
    return 0 if verdicts[FILTERED] else 1


def default_model() -> str:
    """The real model if its package is installed; else the built-in one, with a message."""
    try:
        find_gguf("smollm2")
    except ModelError as error:
        print(f"{error}\nThe demo uses the built-in model instead.\n")
        return "builtin"
    return "smollm2"


def is_right(text: str, hidden: HiddenFact) -> bool:
    """Whether an answer contains all that is expected."""
    example = Example(
        subtask="demo",
        num_tokens=0,
        index=0,
        prompt=Prompt([], ()),
        question=hidden.question,
        answers=hidden.answers,
        metric="contains",
    )
    return score_answer(text, example) == 1


def _ask_both(server: Server, hidden: HiddenFact, max_tokens: int) -> dict[str, Result]:
    print(f'\nHidden {hidden.depth:.0%} into the document:  "{hidden.statement}"')
    if hidden.other:
        print(f'Further on, to mislead:  "{hidden.other}"')
    print(f'Question:  "{hidden.question}"\n')
    # a short first answer takes the cost of what only happens once
    print(f"{'Warming up:':<32}", end="", flush=True)
    server.ask("The code for the lamp is 123.\n\nWhat is the code for the lamp?", "none", 8)
    results: dict[str, Result] = {}
    for label, method in ((WHOLE, "none"), (FILTERED, None)):
        print(f"Asking with {label + ':':<20}", end="", flush=True)
        results[label] = server.ask(hidden.prompt, method, max_tokens)
    return results


def _tokenizer(model: str) -> Any:
    from gemserve.model.loading.checkpoint import open_checkpoint

    return open_checkpoint(ModelConfig(model=model)).load_tokenizer()
