"""A system prompt of 2,000 tokens against the NTK adapter that is fitted to it.

The prompt is a handbook: prose with a few facts in it. Chats ask about a text of the user's own,
where the prompt should change nothing, or about a fact of the handbook: one that the chats it is
fitted on ask about too, or one that none of them does, which only the prompt's keys can tell. How
alike the answers are is told for each; so is what the model says without the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import results

from gemserve.adapters.folder import write_folder
from gemserve.adapters.prefix import Prefix
from gemserve.adapters.store import AdapterStore
from gemserve.adapters.training.conversion_texts import ConversionText, after_text
from gemserve.adapters.training.convert import ConvertConfig, agreement, convert
from gemserve.adapters.training.parameters import read_prefix
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.evaluation.tasks.haystack import draw_filler
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loader import LoadedModel, load
from gemserve.synthetic.problems import Problem, ProblemMaker
from gemserve.synthetic.prose import stdlib_sentences
from gemserve.types import FilterParams, Finished, Request, SamplingParams, TextDelta

TESTED = 100  # chats of each kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1900, help="of prose in the prompt")
    parser.add_argument("--facts", type=int, default=16, help="half of which are asked about")
    parser.add_argument("--chats", type=int, default=400, help="to fit on")
    parser.add_argument("--asked", type=float, default=0.5, help="share of them about its facts")
    parser.add_argument("--fit-steps", type=int, default=600)
    parser.add_argument("--distill-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    results.add_common(parser)
    arguments = parser.parse_args()
    loaded = load(ModelConfig(device=arguments.device))
    model, rng = loaded.model, Random(f"convert {arguments.seed}")
    prose = list(draw_filler(loaded.tokenizer, stdlib_sentences(), arguments.tokens, rng))
    facts = [ProblemMaker(rng).single() for _ in range(arguments.facts)]
    for fact in facts:
        at = rng.randrange(len(prose))
        prose[at:at] = fact.statements
    text = " ".join(prose)
    asked = round(arguments.asked * arguments.chats)
    taught = [own(rng) for _ in range(arguments.chats - asked)]
    known = facts[: len(facts) // 2]
    taught += [about(rng.choice(known)) for _ in range(asked)]
    rng.shuffle(taught)
    tested = {
        "own text": [own(rng) for _ in range(TESTED)],
        "asked before": [about(fact) for fact in known],
        "never asked": [about(fact) for fact in facts[len(known) :]],
    }
    ids, probes = probes_of(loaded, text, taught)
    keys, values = read_prefix(model, ids)
    prefix = Prefix("", "", keys=keys, values=values)
    config = ConvertConfig(
        r=model.shape.head_dim,
        fit_steps=arguments.fit_steps,
        distill_steps=arguments.distill_steps,
        seed=arguments.seed,
    )
    start = time.perf_counter()
    parameters, fit = convert(model, prefix, probes, config, results.note)
    spent_s = time.perf_counter() - start
    rows: list[dict[str, Any]] = [
        {
            "positions": len(ids),
            "prefix_bytes": prefix.num_bytes,
            "parameters": parameters.num_parameters,
            "convert_s": spent_s,
            "layer_error": statistics.mean(fit.fitted),
            "layer_error_without": statistics.mean(fit.without),
        }
    ]
    for kind, chats in tested.items():
        _, held_out = probes_of(loaded, text, chats)
        for name, other in (("nothing", None), ("ntk 16", parameters)):
            alike = agreement(model, prefix, other, held_out)
            rows.append({"chats": kind, "instead": name, **asdict(alike)})
    with tempfile.TemporaryDirectory() as root:
        write_folder(
            Path(root) / "adapter",
            kind=parameters.kind,
            settings=parameters.settings,
            tensors=parameters.tensors(),
            base=base_of(model),
        )
        store = AdapterStore(model, Path(root), 1 << 30)
        store.load("a", "adapter")
        rows += served(loaded, text, tested["own text"], store.get("a"), arguments.repeats)
    results.finish("convert", arguments.device, rows, arguments.json)


Chat = list[dict[str, str]]


def own(rng: Random) -> Chat:
    """A question about a text that comes with it."""
    problem = ProblemMaker(rng).single()
    return turns(f"{' '.join(problem.statements)}\n\n{problem.question}", problem)


def about(problem: Problem) -> Chat:
    """A question about what only the handbook says."""
    return turns(problem.question, problem)


def turns(question: str, problem: Problem) -> Chat:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": problem.answers[0].text},
    ]


def probes_of(
    loaded: LoadedModel, text: str, chats: list[Chat]
) -> tuple[tuple[int, ...], list[ConversionText]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
        return after_text(loaded.tokenizer, text, path, max_tokens=4096)


def served(
    loaded: LoadedModel, text: str, chats: list[Chat], adapter: Adapter, repeats: int
) -> list[dict[str, Any]]:
    """Whole answers that are right, and the time to the first token, by the engine."""
    core = assemble(loaded, EngineConfig(kv_memory_bytes=256 << 20))
    arms: dict[str, tuple[list[dict[str, str]], Adapter | None]] = {
        "the prompt": ([{"role": "system", "content": text}], None),
        "nothing": ([], None),
        "ntk 16": ([], adapter),
    }
    rights: dict[str, list[bool]] = {name: [] for name in arms}
    firsts: dict[str, list[float]] = {name: [] for name in arms}
    for chat in [*chats[:repeats], *chats]:  # the first ones warm up
        for name, (system, own_adapter) in arms.items():  # in turn: side by side
            ids = loaded.tokenizer.apply_chat_template(
                [*system, *chat[:-1]], add_generation_prompt=True, return_dict=False
            )
            said, first_s = answer(core, tuple(ids), own_adapter)
            rights[name].append(said.strip() == chat[-1]["content"])
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
    """What the engine says, and seconds to its first token."""
    request = Request(
        request_id="benchmark",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=16, temperature=0.0),
        filter=FilterParams(method="none", keep=16),
        adapter=adapter,
    )
    said, first_s, start = "", 0.0, time.perf_counter()
    for event in core.run_alone(request):
        if isinstance(event, TextDelta):
            first_s = first_s or time.perf_counter() - start
            said += event.text
        elif isinstance(event, Finished):
            assert event.error is None, event.error
    return said, first_s


if __name__ == "__main__":
    main()
