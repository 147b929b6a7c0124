"""What other prompt filters were caught at, each turned into a promise of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from gemserve.calibration.search.example import ExampleDraw
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import Priority, TextBreaks
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.prompting.prompt import Prompt, chat_prompt, text_prompt
from gemserve.synthetic.prose import stdlib_sentences
from gemserve_kernels import select_backend
from gemserve_lab.run import run_example
from gemserve_lab.tasks.haystack import draw_filler
from gemserve_lab.tasks.needle import SUBTASKS

pytestmark = pytest.mark.usefixtures("use_compiled_step")
METHODS: tuple[FilterMethod, ...] = ("sieve", "position", "random")


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core(ModelConfig(), EngineConfig(kv_memory_bytes=256 << 20))


def document(core: Core, num_tokens: int, seed: int = 0) -> str:
    return " ".join(draw_filler(core.tokenizer, stdlib_sentences(), num_tokens, Random(seed)))


def kept_text(core: Core, prompt: Prompt, method: FilterMethod, keep: int) -> str:
    """What a method leaves of a prompt, special tokens included."""
    report = serve(core, prompt, FilterParams(method=method, keep=keep, return_selection=True))
    assert report.applied
    assert report.selection is not None
    kept = [prompt.ids[p] for start, stop in report.selection for p in range(start, stop)]
    assert report.protected_tokens > 0
    assert len(kept) == report.kept_tokens
    left = keep - (report.kept_tokens - report.protected_tokens)
    assert 0 <= left < (Sieve().passage_limit(keep) if method == "sieve" else 1)
    text: Any = core.tokenizer.decode(kept)
    return str(text)


def serve(core: Core, prompt: Prompt, params: FilterParams) -> FilterReport:
    request = Request(
        request_id="r",
        prompt_ids=prompt.ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        filter=params,
        protected=prompt.protected,
        breaks=prompt.breaks,
        question=prompt.question,
    )
    (report,) = [e.report for e in core.run_alone(request) if isinstance(e, Filtered)]
    return report


@pytest.mark.parametrize("method", METHODS)
def test_1_the_system_prompt_survives_every_request(core: Core, method: FilterMethod) -> None:
    """A prefix-cache hit silently dropped it; so a second, identical request is asked too."""
    rules = "Answer in one word. Never mention the weather, and be kind to the cat."
    messages = [
        {"role": "system", "content": rules},
        {"role": "user", "content": f"{document(core, 3000)}\n\nWhat is the code for the lamb?"},
    ]
    prompt = chat_prompt(core.tokenizer, messages)
    for _ in range(2):
        text = kept_text(core, prompt, method, 192)
        assert rules in text
        assert text.endswith("What is the code for the lamb?<|end|><|assistant|>")


@pytest.mark.parametrize("method", METHODS)
def test_2_turns_stay_whole_after_tool_results(core: Core, method: FilterMethod) -> None:
    """The output was a bare closing tag: the marks around a long tool result were thinned out."""
    messages = [
        {"role": "user", "content": "What is the code for the lamb?"},
        {"role": "assistant", "content": "Let me look it up."},
        {"role": "tool", "content": document(core, 3000, seed=1)},
    ]
    prompt = chat_prompt(core.tokenizer, messages)
    text = kept_text(core, prompt, method, 192)
    assert "What is the code for the lamb?<|end|>" in text
    assert text.endswith("<|end|><|assistant|>")
    for mark in ("<|begin|>", "<|user|>", "<|assistant|>", "<|end|>"):
        whole: Any = core.tokenizer.decode(prompt.ids)
        assert text.count(mark) == str(whole).count(mark)
    # a tool result that is the document does not use up what attention may choose
    if method == "sieve":
        tail = str(core.tokenizer.decode(prompt.ids[-192:]))
        assert text != tail


def code_evidence(prompt: Prompt, spot: int) -> Evidence:
    """One head that looks at one token."""
    num_tokens = len(prompt.ids)
    keys = torch.zeros(1, num_tokens, 8)
    keys[0, spot, 0] = 1.0
    queries = torch.zeros(1, 16, 8)
    queries[0, -1, 0] = 20.0
    layer = LayerEvidence(queries=queries, keys=keys, scale=1.0, softcap=None)
    return Evidence(
        num_tokens=num_tokens,
        layers={0: layer},
        rows=range(num_tokens - 16, num_tokens),
        backend=select_backend(keys.device),
        protected=prompt.protected,
        breaks=prompt.breaks,
    )


def test_3_code_is_kept_in_whole_lines(core: Core) -> None:
    """Picks token by token, or in blocks of a fixed size, left fragments of statements."""
    line = "    total_{} = compute(first={}, second=total_{})"
    lines = [line.format(i, i, i - 1) for i in range(90)]
    code = "\n".join(["```python", "def run(total_0):", *lines[1:], "```"])
    content = f"{document(core, 500)}\n\n{code}\n\n{document(core, 500)}\n\nWhat is total_40?"
    prompt = chat_prompt(core.tokenizer, [{"role": "user", "content": content}])
    starts = [p for p in prompt.breaks.lines if "total_" in decoded(core, prompt.ids[p : p + 12])]
    spot = next(p for p in starts if "total_41 =" in decoded(core, prompt.ids[p : p + 24]))
    nearby = starts[starts.index(spot) - 3 : starts.index(spot) + 5]

    def fragments(breaks: TextBreaks) -> int:
        """Lines kept in part, around a token of line 41."""
        evidence = replace(code_evidence(prompt, spot + 9), breaks=breaks)
        always = count_always_read(prompt.protected, len(prompt.ids))
        size = 320 + always
        budget = Budget(low=size, high=size, limit=size, protected=always)
        choice = Sieve().choose(evidence, budget, FilterParams(method="sieve", keep=320))
        kept = set(choice.positions.tolist())
        parts = [sum(p in kept for p in range(a, b)) / (b - a) for a, b in pairwise(nearby)]
        return sum(0 < part < 1 for part in parts)

    assert fragments(prompt.breaks) == 0
    assert fragments(TextBreaks()) > 0


def decoded(core: Core, ids: Sequence[int]) -> str:
    return str(core.tokenizer.decode(ids))


@pytest.mark.parametrize("method", ["sieve", "snapkv"])
@pytest.mark.slow
def test_6_recall_survives_compaction(core: Core, method: FilterMethod) -> None:
    """Wrong positions after compaction: needle recall fell to 0 of 21 while dense passed."""
    right = 0.0
    for index in range(21):
        draw = ExampleDraw(seed=6, num_tokens=1024, index=index, samples=21)
        example = SUBTASKS["single"](core.tokenizer, draw)
        (outcome,) = run_example(core, example, 21, [method], 0.125)
        right += outcome.score
    assert right >= 18


BEFORE = "Leave out the appendix, trust tables more than the text, and ignore what was withdrawn."
GATE = "Which of these four numbers opens the northern gate at night?"
OPTIONS = "A) 1234  B) 7777  C) 9812  D) 5541"


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        (
            "Reply in French, in one sentence.\n\n{}\n\nWhat is the code for the lamb?",
            {Priority.HEAD},
        ),
        (f"{{}}\n\n{BEFORE}\n\nWhat is the code for the lamb?", {Priority.BEFORE}),
        ("Who wrote this, and when?\n\n{}", {Priority.HEAD, Priority.QUESTION}),
        (f"{{}}\n\n{GATE}\n\n{OPTIONS}\n\nAnswer:", {Priority.BEFORE}),
    ],
    ids=[
        "before the document",
        "before the question",
        "a question first",
        "in several paragraphs",
    ],
)
def test_what_is_asked_survives(core: Core, content: str, lost: set[Priority]) -> None:
    """Nothing looks at how an answer is to be written until it is: it was filtered out.

    Nor did a prompt's last rows find a question; its own rows do.
    """
    content = content.format(document(core, 4000, seed=5))
    asked = [part for part in content.split("\n\n") if len(part) < 100]
    assert asked
    chat = chat_prompt(core.tokenizer, [{"role": "user", "content": content}])
    for prompt in (chat, text_prompt(core.tokenizer, content)):
        text = kept_text(core, prompt, "sieve", 256)
        assert all(part in text for part in asked)
        # attention does not find it
        others = tuple(s for s in prompt.protected if s.priority not in lost)
        unknown = replace(prompt, protected=others, question=())
        text = kept_text(core, unknown, "sieve", 160)
        assert not all(part in text for part in asked)


def test_a_long_question_keeps_its_beginning(core: Core) -> None:
    """Its last 64 tokens were kept: the reasons, without what was asked."""
    reasons = " ".join(f"I ask because of the {name} that we saw at noon." for name in "ABCDEFGHI")
    question = f"What is the code for the lantern?\n{reasons}"
    content = f"{document(core, 4000, seed=5)}\n\n{question}"
    for prompt in (
        chat_prompt(core.tokenizer, [{"role": "user", "content": content}]),
        text_prompt(core.tokenizer, content),
    ):
        assert "What is the code for the lantern?" in kept_text(core, prompt, "sieve", 256)
        assert question in kept_text(core, prompt, "sieve", 1024)


@pytest.mark.parametrize("method", METHODS)
def test_9_short_prompts_are_left_alone(core: Core, method: FilterMethod) -> None:
    """Without a least length they got slower and worse."""
    prompt = chat_prompt(core.tokenizer, [{"role": "user", "content": document(core, 1900)}])
    report = serve(core, prompt, FilterParams(method=method, keep=64))
    assert (report.applied, report.reason) == (False, "short_prompt")
    assert report.kept_tokens == report.prompt_tokens == len(prompt.ids)
