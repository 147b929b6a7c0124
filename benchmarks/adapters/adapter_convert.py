"""A system prompt of 2,000 tokens against the NTK adapter that is fitted to it.

The prompt is a handbook: prose with a few facts in it. The chats are of three kinds. Some ask about
a text of their own, and the prompt should not change their answers. Some ask about a fact of the
handbook that the fitting chats ask about, too. Some ask about a fact that no fitting chat asks
about, so only the prompt's keys hold it. For each kind the result says how often answers agree with
those after the prompt, with the adapter and with nothing in its place. With --model the prompts are
those of `adapter_convert_tasks.py`, and `adapter_convert_real.py` does the work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.adapters import adapter_convert_real
from benchmarks.adapters.adapter_convert_steps import Chat, conversion_texts, stored
from benchmarks.shared import results
from gemserve.adapters.prefix import Prefix
from gemserve.adapters.training.convert import ConvertConfig, convert
from gemserve.adapters.training.distill import Teacher, agreement
from gemserve.adapters.training.parameters import read_prefix
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.evaluation.tasks.haystack import draw_filler
from gemserve.model.adapter import Adapter
from gemserve.model.loader import LoadedModel, load
from gemserve.synthetic.problems import Problem, ProblemMaker
from gemserve.synthetic.prose import stdlib_sentences
from gemserve.types import FilterParams, Finished, Request, SamplingParams, TextDelta

TESTED = 100  # chats of each kind


def main() -> None:
    arguments = read_arguments()
    if arguments.model is not None:
        adapter_convert_real.convert_real(arguments)
    else:
        convert_builtin(arguments)


def convert_builtin(arguments: argparse.Namespace) -> None:
    loaded = load(ModelConfig(device=arguments.device))
    model, rng = loaded.model, Random(f"convert {arguments.seed}")
    text, facts = handbook(loaded, arguments.tokens, arguments.facts, rng)
    known = facts[: len(facts) // 2]
    fitting, tested = draw_chats(arguments, known, facts[len(known) :], rng)
    system = [{"role": "system", "content": text}]
    ids, texts = conversion_texts(loaded, system, fitting)
    keys, values = read_prefix(model, ids)
    prefix = Prefix("", "", keys=keys, values=values)
    config = ConvertConfig(
        r=model.shape.head_dim,
        fit_steps=arguments.fit_steps,
        distill_steps=arguments.distill_steps,
        seed=arguments.seed,
    )
    start = time.perf_counter()
    teacher = Teacher(model, prefix)
    parameters, fit = convert(teacher, texts, config, results.note)
    rows: list[dict[str, Any]] = [
        {
            "positions": len(ids),
            "prefix_bytes": prefix.num_bytes,
            "parameters": parameters.num_parameters,
            "convert_s": time.perf_counter() - start,
            "layer_error": statistics.mean(fit.fitted),
            "layer_error_without": statistics.mean(fit.without),
        }
    ]
    for kind, chats in tested.items():
        _, held_out = conversion_texts(loaded, system, chats)
        for name, other in (("nothing", None), ("ntk 16", parameters.adapter())):
            alike = agreement(teacher, other, held_out)
            rows.append({"chats": kind, "instead": name, **asdict(alike)})
    adapter = stored(model, parameters)
    rows += measure_served(loaded, text, tested["own text"], adapter, arguments.repeats)
    results.finish("convert", arguments.device, rows, arguments.json)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1900, help="tokens of prose in the prompt")
    parser.add_argument("--facts", type=int, default=16, help="the chats ask about half of them")
    parser.add_argument("--chats", type=int, help="chats to fit on, 400, or 120 with --model")
    parser.add_argument("--asked", type=float, default=0.5, help="share of chats about the facts")
    parser.add_argument("--fit-steps", type=int, help="for each layer, 600, or 0 with --model")
    parser.add_argument("--distill-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    adapter_convert_real.add_options(parser)
    results.add_common(parser)
    arguments = parser.parse_args()
    arguments.chats = arguments.chats or (120 if arguments.model else 400)
    if arguments.fit_steps is None:
        arguments.fit_steps = 0 if arguments.model else 600
    return arguments


def handbook(
    loaded: LoadedModel, num_tokens: int, num_facts: int, rng: Random
) -> tuple[str, list[Problem]]:
    """Prose with facts in it, and the facts."""
    prose = list(draw_filler(loaded.tokenizer, stdlib_sentences(), num_tokens, rng))
    facts = [ProblemMaker(rng).single() for _ in range(num_facts)]
    for fact in facts:
        at = rng.randrange(len(prose))
        prose[at:at] = fact.statements
    return " ".join(prose), facts


def draw_chats(
    arguments: argparse.Namespace, known: list[Problem], unknown: list[Problem], rng: Random
) -> tuple[list[Chat], dict[str, list[Chat]]]:
    """Chats to fit on, which ask about `known` facts only, and chats to test with by kind."""
    about_facts = round(arguments.asked * arguments.chats)
    fitting = [chat_with_text(rng) for _ in range(arguments.chats - about_facts)]
    fitting += [chat_about(rng.choice(known)) for _ in range(about_facts)]
    rng.shuffle(fitting)
    tested = {
        "own text": [chat_with_text(rng) for _ in range(TESTED)],
        "asked before": [chat_about(fact) for fact in known],
        "never asked": [chat_about(fact) for fact in unknown],
    }
    return fitting, tested


def chat_with_text(rng: Random) -> Chat:
    """A chat whose question is about a text in the same message."""
    problem = ProblemMaker(rng).single()
    return turns(f"{' '.join(problem.statements)}\n\n{problem.question}", problem)


def chat_about(problem: Problem) -> Chat:
    """A chat whose question only the handbook answers."""
    return turns(problem.question, problem)


def turns(question: str, problem: Problem) -> Chat:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": problem.answers[0].text},
    ]


def measure_served(
    loaded: LoadedModel, text: str, chats: list[Chat], adapter: Adapter, repeats: int
) -> list[dict[str, Any]]:
    """Share of right answers and time to the first token, measured with the engine."""
    core = assemble(loaded, EngineConfig(kv_memory_bytes=256 << 20))
    arms: dict[str, tuple[list[dict[str, str]], Adapter | None]] = {
        "the prompt": ([{"role": "system", "content": text}], None),
        "nothing": ([], None),
        "ntk 16": ([], adapter),
    }
    rights: dict[str, list[bool]] = {name: [] for name in arms}
    firsts: dict[str, list[float]] = {name: [] for name in arms}
    for chat in [*chats[:repeats], *chats]:  # the first ones warm up
        for name, (system, used_adapter) in arms.items():  # in turn, so that all see the same load
            ids = loaded.tokenizer.apply_chat_template(
                [*system, *chat[:-1]], add_generation_prompt=True, return_dict=False
            )
            reply, first_s = answer(core, tuple(ids), used_adapter)
            rights[name].append(reply.strip() == chat[-1]["content"])
            firsts[name].append(first_s)
    return [
        {
            "chats": "own text",
            "instead": name,
            "right": statistics.mean(rights[name][repeats:]),
            "ttft_ms": 1e3 * statistics.median(firsts[name][repeats:]),
        }
        for name in arms
    ]


def answer(core: Core, ids: tuple[int, ...], adapter: Adapter | None) -> tuple[str, float]:
    """The engine's answer, and seconds to its first token."""
    request = Request(
        request_id="benchmark",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=16, temperature=0.0),
        filter=FilterParams(method="none", keep=16),
        adapter=adapter,
    )
    reply, first_s, start = "", 0.0, time.perf_counter()
    for event in core.run_alone(request):
        if isinstance(event, TextDelta):
            first_s = first_s or time.perf_counter() - start
            reply += event.text
        elif isinstance(event, Finished):
            assert event.error is None, event.error
    return reply, first_s


if __name__ == "__main__":
    main()
