"""What each type of adapter learns of a task that the model cannot do, and its cost.

With --model the tasks are those of `adapter_tasks.py`, and `adapter_comparison.py` does the work.
The built-in model has to give a value in another notation. All contestants train on the same
examples in the same number of steps. Its learning rate is the one that did best on a seed that is
not reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.adapters import adapter_comparison, adapter_tasks
from benchmarks.shared import harness, results
from gemserve.adapters.folder import write_folder
from gemserve.adapters.kinds import load_adapter
from gemserve.adapters.prefix import Prefix
from gemserve.adapters.store import AdapterStore
from gemserve.adapters.training.conversion_texts import ConversionText
from gemserve.adapters.training.convert import ConvertConfig, convert
from gemserve.adapters.training.distill import Teacher
from gemserve.adapters.training.examples import TrainingExample, read_examples
from gemserve.adapters.training.lora_parameters import DEFAULT_TARGETS, LoraParameters
from gemserve.adapters.training.parameters import (
    ActivationParameters,
    NTKParameters,
    Parameters,
    PrefixParameters,
)
from gemserve.adapters.training.trainer import TrainConfig, train
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.evaluation.tasks.haystack import draw_filler
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loader import LoadedModel, load
from gemserve.synthetic.problems import ProblemMaker
from gemserve.synthetic.prose import stdlib_sentences
from gemserve.types import FilterParams, Finished, Request, SamplingParams, TextDelta

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# of the built-in model
TASKS: dict[str, Callable[[str], str]] = {
    "dashes": "-".join,
    "letters": lambda value: "".join(chr(ord("a") + int(digit)) for digit in value),
    "words": lambda value: " ".join(DIGITS[int(digit)] for digit in value),
    "parity": lambda value: "odd" if int(value) % 2 else "even",
    "digit": lambda value: DIGITS[int(value[0])],
    "style": lambda value: f"{value}, as you asked.",
    "framed": lambda value: f"It is {value}.",
}
RATES = {"ntk": 1e-2, "prefix": 5e-2, "activation": 1e-2, "lora": 3e-3, "converted": 5e-2}


@dataclass(frozen=True, slots=True)
class Contestant:
    """`size` is the rank s of ntk, the positions of a prefix, or the rank r of LoRA.

    "converted" is a prefix, trained as others are, and an NTK adapter of rank 16 that is fitted to
    it.
    """

    kind: str
    size: int

    @property
    def name(self) -> str:
        return self.kind if self.kind == "activation" else f"{self.kind} {self.size}"


CONTESTANTS = (
    Contestant("ntk", 4),
    Contestant("ntk", 16),
    Contestant("prefix", 1),
    Contestant("prefix", 10),
    Contestant("prefix", 100),
    Contestant("activation", 1),
    Contestant("lora", 8),
    Contestant("converted", 100),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="compare on this model (default: the built-in one)")
    parser.add_argument("--task", choices=[*TASKS, *adapter_tasks.TASKS], default="letters")
    parser.add_argument(
        "--only", help="contestants whose names begin so; with --model names or kinds: ntk 16,lora"
    )
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--filler", type=int, default=0, help="tokens of prose around the fact")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rate", type=float, help="instead of the type's own; not with --model")
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the examples")
    adapter_comparison.add_options(parser)
    results.add_common(parser)
    arguments = parser.parse_args()
    if (arguments.task in adapter_tasks.TASKS) != (arguments.model is not None):
        parser.error(f"--task {arguments.task}: --model goes with tasks of adapter_tasks.py")
    if arguments.model is not None:
        adapter_comparison.compare(arguments)
    else:
        compare_builtin(arguments)


def compare_builtin(arguments: argparse.Namespace) -> None:
    loaded = load(ModelConfig(device=arguments.device))
    core = assemble(loaded, EngineConfig(kv_memory_bytes=256 << 20))
    rows: list[dict[str, Any]] = []
    tested = chats(loaded, arguments.task, 200, arguments.filler, seed=0)
    seconds = decode_seconds(core, None, arguments.repeats)
    plain = {"adapter": "none", "parameters": 0, "score": exact(core, None, tested)}
    rows.append({**plain, "decode_ms": 1e3 * seconds})
    for contestant in CONTESTANTS:
        if arguments.only and not contestant.name.startswith(arguments.only):
            continue
        runs = []
        for seed in map(int, arguments.seeds.split(",")):
            results.note(f"{contestant.name}, seed {seed}")
            taught = chats(loaded, arguments.task, arguments.examples, arguments.filler, seed)
            rate = arguments.rate or RATES[contestant.kind]
            with trained(loaded, contestant, taught, seed, rate, arguments.epochs) as (
                adapter,
                count,
                spent_s,
            ):
                score = exact(core, adapter, tested)
                runs.append((score, spent_s, decode_seconds(core, adapter, arguments.repeats)))
        scores, times, steps = zip(*runs, strict=True)
        rows.append(
            {
                "adapter": contestant.name,
                "parameters": count,
                "score": statistics.mean(scores),
                "least": min(scores),
                "most": max(scores),
                "train_s": statistics.mean(times),
                "decode_ms": 1e3 * statistics.median(steps),
            }
        )
    results.finish("adapters", arguments.device, rows, arguments.json)


@dataclass(frozen=True, slots=True)
class Chat:
    prompt: tuple[int, ...]
    example: TrainingExample


def chats(loaded: LoadedModel, task: str, count: int, filler: int, seed: int) -> list[Chat]:
    """Facts, a question each, and its value in the task's notation."""
    rng = Random(f"adapters {task} {seed}")
    lines = []
    while len(lines) < count:
        problem = ProblemMaker(rng).single()
        value = problem.answers[0].text
        if not value.isdigit():
            continue
        prose = draw_filler(loaded.tokenizer, stdlib_sentences(), filler, rng)
        at = rng.randrange(len(prose) + 1)
        text = " ".join([*prose[:at], *problem.statements, *prose[at:]])
        messages = [
            {"role": "user", "content": f"{text}\n\n{problem.question}"},
            {"role": "assistant", "content": TASKS[task](value)},
        ]
        lines.append(json.dumps({"messages": messages}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        path.write_text("\n".join(lines))
        examples = read_examples(
            path, loaded.tokenizer, eos_id=min(loaded.eos_ids), max_tokens=4096
        )
    return [Chat(e.ids[: e.num_prompt], e) for e in examples]


@contextmanager
def trained(
    loaded: LoadedModel,
    contestant: Contestant,
    taught: list[Chat],
    seed: int,
    rate: float,
    epochs: float,
) -> Iterator[tuple[Adapter, int, float]]:
    """The adapter as it is served, its parameters, and the seconds its training took."""
    model, size = loaded.model, contestant.size
    examples = [chat.example for chat in taught]
    data = (examples[:-64], examples[-64:])
    config = TrainConfig(epochs=epochs, learning_rate=rate, patience=0, evals=4, seed=seed)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "adapter"
        start = time.perf_counter()
        made: Parameters = {
            "lora": lambda: LoraParameters(model, size, DEFAULT_TARGETS, seed),
            "ntk": lambda: NTKParameters.beside(
                model, [e.ids for e in examples], model.shape.head_dim, size, seed
            ),
            "prefix": lambda: PrefixParameters(model, (examples[0].ids * size)[:size]),
            "activation": lambda: ActivationParameters(model.shape, layer=size),
            "converted": lambda: PrefixParameters(model, (examples[0].ids * size)[:size]),
        }[contestant.kind]()
        count = train(model, made, *data, folder, config).num_parameters
        if contestant.kind == "converted":
            count = convert_folder(loaded, folder, examples)
        spent_s = time.perf_counter() - start
        store = AdapterStore(model, Path(root), 1 << 30)
        store.load("a", "adapter")
        yield store.get("a"), count, spent_s


def convert_folder(loaded: LoadedModel, folder: Path, examples: list[TrainingExample]) -> int:
    """Replace a trained prefix by an NTK adapter. Returns its number of parameters."""
    model, base = loaded.model, base_of(loaded.model)
    prefix = load_adapter("", folder, model, base, 1 << 30)
    assert isinstance(prefix, Prefix)
    probes = [ConversionText(e.ids, e.num_prompt) for e in examples]
    config = ConvertConfig(r=model.shape.head_dim, s=16, seed=1)
    made, _ = convert(Teacher(model, prefix), probes, config, results.note)
    write_folder(folder, kind=made.kind, settings=made.settings, tensors=made.tensors(), base=base)
    return made.num_parameters


def request_of(ids: tuple[int, ...], adapter: Adapter | None, max_tokens: int) -> Request:
    return Request(
        request_id="benchmark",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=FilterParams(method="none", keep=16),
        adapter=adapter,
    )


def exact(core: Core, adapter: Adapter | None, tested: list[Chat]) -> float:
    """Share of whole answers right, as the engine serves them, 32 at a time."""
    right = 0
    for low in range(0, len(tested), 32):
        batch = tested[low : low + 32]
        jobs = {core.add(request_of(c.prompt, adapter, 48)): c for c in batch}
        said: dict[Any, list[int]] = {job: [] for job in jobs}
        while not core.is_idle:
            for job, event in core.step():
                if isinstance(event, TextDelta):
                    said[job] += event.token_ids
                elif isinstance(event, Finished):
                    assert event.error is None, event.error
        right += sum(
            tuple(said[job]) == c.example.ids[c.example.num_prompt :] for job, c in jobs.items()
        )
    return right / len(tested)


def decode_seconds(core: Core, adapter: Adapter | None, repeats: int) -> float:
    """Median time of a step in which eight sequences of 256 tokens decode with the adapter."""
    steps: list[float] = []
    for repeat in range(repeats):
        for seed in range(8):
            ids = tuple(harness.random_ids(256, core.model.vocab_size, seed + 8 * repeat))
            core.add(replace_sampling(request_of(ids, adapter, 24)))
        while not core.is_idle:
            start = time.perf_counter()
            events = core.step()
            if sum(isinstance(event, TextDelta) for _, event in events) == 8:
                steps.append(time.perf_counter() - start)
    return statistics.median(steps)


def replace_sampling(request: Request) -> Request:
    return replace(request, sampling=replace(request.sampling, ignore_eos=True))


if __name__ == "__main__":
    main()
