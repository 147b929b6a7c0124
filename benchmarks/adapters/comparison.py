"""What each type of adapter learns of a task, beside prompts, and what it costs.

With --model the tasks are those of `tasks.py`. Every finished run is a line of a file, and a run
that is there is not repeated, so the comparison can be stopped and started again with the same
command. Without it the built-in model has to give a value in another notation. All contestants
train on the same examples in the same number of steps, with the learning rate that did best on a
seed that is not reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.adapters.tasks import SPLITS, TASKS, write_task
from benchmarks.shared import harness, results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from gemserve.adapters.folder import write_folder
from gemserve.adapters.kinds import load_adapter
from gemserve.adapters.prefix import Prefix
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.errors import AdapterError
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import LoadedModel, load
from gemserve.model.passes.causal_model import CausalModel
from gemserve.synthetic.problems import ProblemMaker
from gemserve.synthetic.prose import stdlib_sentences
from gemserve_lab.tasks.haystack import draw_filler
from gemserve_train.commands.adapter_train import LEARNING_RATES
from gemserve_train.conversion_texts import ConversionText
from gemserve_train.convert import ConvertConfig, convert
from gemserve_train.distill import Teacher
from gemserve_train.evaluation.answer_rules import RULES, interval, matching
from gemserve_train.evaluation.chats import Question, draw_shots, read_questions
from gemserve_train.evaluation.evaluate import evaluate
from gemserve_train.examples import TrainingExample, end_token, read_examples
from gemserve_train.lora_parameters import DEFAULT_TARGETS, LoraParameters
from gemserve_train.parameters import (
    ActivationParameters,
    NTKParameters,
    Parameters,
    PrefixParameters,
)
from gemserve_train.trainer import TrainConfig, TrainResult, train

_LONGEST = 1024  # tokens of a training example
_KV_BYTES = 1 << 30  # several comparisons share a GPU
_STEPS = 20
_TOKENS = 400  # of an answer: the first one still decodes when the last prompt has been read


@dataclass(frozen=True, slots=True)
class Contestant:
    """`size`: examples of few-shot, rank s of ntk, positions of a prefix, rank of LoRA, or layer.

    `width`: the features r of ntk as multiples of the head dimension. "converted" is a prefix,
    trained as others are, and an NTK adapter of rank 16 that is fitted to it.
    """

    kind: str
    size: int = 0
    width: int = 1

    @property
    def name(self) -> str:
        wide = f" r={self.width}d" if self.width > 1 else ""
        return self.kind if self.kind == "zero-shot" else f"{self.kind} {self.size}{wide}"

    @property
    def is_trained(self) -> bool:
        return self.kind in LEARNING_RATES

    def parameters(self, model: CausalModel, texts: Sequence[Any], seed: int) -> Parameters:
        """Untrained parameters. `texts`: token ids of the examples to train on."""
        if self.kind == "lora":
            return LoraParameters(model, self.size, DEFAULT_TARGETS, seed)
        if self.kind == "ntk":
            r = self.width * model.shape.head_dim
            return NTKParameters.beside(model, texts, r, self.size, seed)
        if self.kind == "activation":
            return ActivationParameters(model.shape, self.size, model.dtype)
        text = [*texts[0]] * -(-self.size // len(texts[0]))
        return PrefixParameters(model, text[: self.size])


# In the order of what is learnt from them. On SmolLM2-135M LoRA of ranks 1, 5 and 19 has as many
# parameters as a prefix of 10 and as ntk with s = 16 and 64.
CONTESTANTS = (
    Contestant("zero-shot"),
    Contestant("few-shot", 8),
    Contestant("few-shot", 32),
    Contestant("lora", 5),
    Contestant("ntk", 16),
    Contestant("prefix", 10),
    Contestant("lora", 1),
    Contestant("ntk", 4),
    Contestant("prefix", 100),
    Contestant("prefix", 1),
    Contestant("ntk", 64),
    Contestant("lora", 19),
    Contestant("ntk", 16, 2),
    *(Contestant("activation", layer) for layer in (1, 8, 15, 22)),
)

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_BUILTIN_TASKS: dict[str, Callable[[str], str]] = {
    "dashes": "-".join,
    "letters": lambda value: "".join(chr(ord("a") + int(digit)) for digit in value),
    "words": lambda value: " ".join(_DIGITS[int(digit)] for digit in value),
    "parity": lambda value: "odd" if int(value) % 2 else "even",
    "digit": lambda value: _DIGITS[int(value[0])],
    "style": lambda value: f"{value}, as you asked.",
    "framed": lambda value: f"It is {value}.",
}
_BUILTIN_RATES = {"ntk": 1e-2, "prefix": 5e-2, "activation": 1e-2, "lora": 3e-3, "converted": 5e-2}
_BUILTIN_CONTESTANTS = (
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
    parser.add_argument("--task", choices=[*_BUILTIN_TASKS, *TASKS], default="letters")
    parser.add_argument(
        "--only", help="contestants whose names begin so; with --model names or kinds: ntk 16,lora"
    )
    parser.add_argument("--examples", type=int, default=4000)
    parser.add_argument("--filler", type=int, default=0, help="tokens of prose around the fact")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rate", type=float, help="instead of the type's own; not with --model")
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the examples")
    parser.add_argument("--out", type=Path, help="file of finished runs, for --model")
    parser.add_argument("--adapters", type=Path, help="keep the trained adapters in this folder")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit of a run's training")
    parser.add_argument("--tests", type=int, default=200, help="questions asked, for --model")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rates", help="learning rates to try, for --model: 0.001,0.003")
    parser.add_argument(
        "--no-timing", action="store_true", help="on a busy machine: do not time requests"
    )
    results.add_common(parser)
    arguments = parser.parse_args()
    if (arguments.task in TASKS) != (arguments.model is not None):
        parser.error(f"--task {arguments.task}: --model goes with tasks of tasks.py")
    if arguments.model is not None:
        compare(arguments)
    else:
        compare_builtin(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Do the runs that the file of finished runs lacks, and print the table of all."""
    if arguments.out is None:
        raise SystemExit("--model needs --out, the file of finished runs")
    loaded = load(ModelConfig(model=arguments.model, device=arguments.device))
    engine = EngineConfig(calibrate="off", cache_memory=0.0, kv_memory_bytes=_KV_BYTES)
    core = assemble(loaded, engine)
    wanted = {name.strip() for name in (arguments.only or "").split(",")}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    given = (arguments.rates or "").split(",")
    rates = [float(rate) if rate else None for rate in given]  # None: the type's own
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(arguments, core, loaded, Path(folder))
        for seed, rate in itertools.product(seeds, rates):
            for contestant in CONTESTANTS:
                if not {"", contestant.kind, contestant.name} & wanted:
                    continue
                try:
                    comparison.do(contestant, seed, rate)
                except AdapterError as error:  # such as a run that diverged: the others go on
                    print(f"left out: {contestant.name}, seed {seed}: {error}", flush=True)
    rows = [run for run in read_runs(arguments.out) if settings(arguments).items() <= run.items()]
    results.finish("adapters", arguments.device, table(rows), arguments.json)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a table have in common."""
    names = ("model", "task", "tests", "epochs", "batch_size", "minutes")
    return {name: getattr(arguments, name) for name in names}


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each contestant and rate: the means over its seeds and their spread."""
    rows = []
    for key in dict.fromkeys((run["contestant"], run["rate"]) for run in runs):
        mine = [run for run in runs if (run["contestant"], run["rate"]) == key]
        scores = [run["score"] for run in mine]
        row = {"contestant": key[0], "rate": key[1], "seeds": len(mine)}
        row |= {"score": statistics.mean(scores), "least": min(scores), "most": max(scores)}
        numbers = ("loss", "parameters", "train_s", "ttft_ms", "decode_ms", "mixed_ms")
        for name in numbers:
            known = [run[name] for run in mine if run[name] is not None]
            row[name] = statistics.mean(known) if known else None
        rows.append(row)
    return rows


class Comparison:
    """One model and one task. `folder` gets the task's files and the adapters."""

    def __init__(
        self, arguments: argparse.Namespace, core: Core, loaded: LoadedModel, folder: Path
    ) -> None:
        self._given, self._core, self._loaded, self._folder = arguments, core, loaded, folder
        task = TASKS[arguments.task]
        self._max_tokens = task.max_tokens
        self._rules = {
            name: matching(task.pattern or "") if name == "pattern" else RULES[name]
            for name in task.rules
        }
        self._eos_id = end_token(loaded.tokenizer, loaded.eos_ids)
        wanted = (arguments.examples, max(20, arguments.examples // 10), arguments.tests)
        sizes = dict(zip(SPLITS, wanted, strict=True))
        # the same questions for all seeds, which are those of training
        self._sizes = write_task(arguments.task, folder, 1, sizes)

    def do(self, contestant: Contestant, seed: int, rate: float | None = None) -> None:
        """Do a run and append it to the file, unless it is there. `rate`: not the type's own."""
        given = self._given
        rate = rate or LEARNING_RATES.get(contestant.kind)
        key = {
            **settings(given),
            "contestant": contestant.name,
            "seed": seed,
            "rate": rate if contestant.is_trained else None,
            "examples": self._sizes["train"],
        }
        if find_run(read_runs(given.out), key) is not None:
            return
        results.note(f"{contestant.name}, seed {seed}")
        adapter, trained = self._train(contestant, seed, rate)
        questions = self._questions(contestant, seed)
        found = evaluate(
            self._core, contestant.name, adapter, questions, self._rules, self._max_tokens
        )
        scores = {rule: [round(s, 4) for s in values] for rule, values in found.scores.items()}
        first = next(iter(scores.values()))
        run = {
            **key,
            "score": statistics.fmean(first),
            "interval": interval(first),
            "scores": scores,
            "loss": found.loss,
            "parameters": trained.num_parameters if trained else 0,
            "steps": trained.steps if trained else 0,
            "eval_loss": trained.eval_loss if trained else None,
            "history": list(trained.history) if trained else [],
            "train_s": trained.seconds if trained else None,
            "prompt_tokens": found.prompt_tokens,
            "answers": list(found.answers[:10]),
            **self._times(adapter, questions),
        }
        append_run(given.out, run)

    def _times(
        self, adapter: Adapter | None, questions: Sequence[Question]
    ) -> dict[str, float | None]:
        if self._given.no_timing:
            return dict.fromkeys(("ttft_ms", "decode_ms", "mixed_ms"))
        return {**served(self._core, adapter, questions, self._given.repeats)}

    def _questions(self, contestant: Contestant, seed: int) -> list[Question]:
        train_file, test_file = (self._folder / f"{name}.jsonl" for name in ("train", "test"))
        shots = draw_shots(train_file, contestant.size, seed) if "few" in contestant.kind else []
        limit = self._core.model.context_tokens - 1
        tokenizer = self._core.tokenizer
        return read_questions(test_file, tokenizer, self._eos_id, shots=shots, max_tokens=limit)

    def _train(
        self, contestant: Contestant, seed: int, rate: float | None
    ) -> tuple[Adapter | None, TrainResult | None]:
        if not contestant.is_trained or rate is None:
            return None, None
        examples, held_out = (
            read_examples(
                self._folder / f"{name}.jsonl",
                self._loaded.tokenizer,
                eos_id=self._eos_id,
                max_tokens=_LONGEST,
            )
            for name in ("train", "valid")
        )
        model, folder = self._loaded.model, self._adapter_folder(contestant, seed, rate)
        started_s = time.perf_counter()
        made = contestant.parameters(model, [e.ids for e in examples], seed)
        config = TrainConfig(
            epochs=self._given.epochs,
            batch_size=self._given.batch_size,
            learning_rate=rate,
            evals=5,
            patience=0,
            seed=seed,
            max_minutes=self._given.minutes,
        )
        result = train(model, made, examples, held_out, folder, config)
        spent_s = time.perf_counter() - started_s
        served_model = self._core.model
        adapter = load_adapter("a", folder, served_model, base_of(served_model), 1 << 40)
        return adapter, replace(result, seconds=spent_s)

    def _adapter_folder(self, contestant: Contestant, seed: int, rate: float) -> Path:
        """Where this run's adapter will be. One that a run left there before is removed."""
        name = "-".join(f"{self._given.task} {contestant.name} {seed} {rate:g}".split())
        folder: Path = (self._given.adapters or self._folder) / name.replace("=", "")
        if folder.exists():
            shutil.rmtree(folder)
        return folder


def served(
    core: Core, adapter: Adapter | None, questions: Sequence[Question], repeats: int
) -> dict[str, float]:
    """Medians in ms: to a question's first token, and of decode steps of eight sequences.

    In the mixed batch half of the sequences have no adapter, and all have a filter.
    """
    vocab = core.model.vocab_size
    plain = [
        request_of(harness.random_ids(256, vocab, seed), adapter, _TOKENS, ignore_eos=True)
        for seed in range(8)
    ]
    mixed = [
        request_of(
            harness.random_ids(1024, vocab, seed),
            adapter if seed % 2 else None,
            _TOKENS,
            FilterParams(method="sieve", keep=256),
            ignore_eos=True,
        )
        for seed in range(8)
    ]
    return {
        "ttft_ms": first_token_ms(core, adapter, questions, repeats),
        "decode_ms": 1e3 * step_seconds(core, plain),
        "mixed_ms": 1e3 * step_seconds(core, mixed),
    }


def first_token_ms(
    core: Core, adapter: Adapter | None, questions: Sequence[Question], repeats: int
) -> float:
    """The median time to a question's first token. Each question is asked alone."""
    firsts = []
    for question in questions[: repeats + 1]:
        ids = question.example.ids[: question.example.num_prompt]
        started_s = time.perf_counter()
        for event in core.run_alone(request_of(ids, adapter, 2, ignore_eos=True)):
            if isinstance(event, TextDelta):
                firsts.append(time.perf_counter() - started_s)
                break
        while not core.is_idle:
            core.step()
    return 1e3 * statistics.median(firsts[1:])  # the first one warms up


def request_of(
    ids: Sequence[int],
    adapter: Adapter | None,
    max_tokens: int,
    chosen: FilterParams | None = None,
    *,
    ignore_eos: bool = False,
) -> Request:
    return Request(
        request_id="benchmark",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos),
        filter=chosen or FilterParams(method="none", keep=16),
        adapter=adapter,
    )


def step_seconds(core: Core, requests: Sequence[Request]) -> float:
    """The median time of `_STEPS` steps in which all requests decode. Then they are cancelled."""
    jobs = [core.add(request) for request in requests]
    steps: list[float] = []
    while len(steps) < _STEPS and not core.is_idle:
        started_s = time.perf_counter()
        events = core.step()
        if sum(isinstance(event, TextDelta) for _, event in events) == len(requests):
            steps.append(time.perf_counter() - started_s)
        errors = [e.error for _, e in events if isinstance(e, Finished) and e.error]
        assert not errors, errors
    for job in jobs:
        core.cancel(job)
    while not core.is_idle:
        core.step()
    return statistics.median(steps)


def compare_builtin(arguments: argparse.Namespace) -> None:
    loaded = load(ModelConfig(device=arguments.device))
    core = assemble(loaded, EngineConfig(kv_memory_bytes=256 << 20))
    rows: list[dict[str, Any]] = []
    tested = builtin_chats(loaded, arguments.task, 200, arguments.filler, seed=0)
    seconds = decode_seconds(core, None, arguments.repeats)
    plain = {"adapter": "none", "parameters": 0, "score": exact(core, None, tested)}
    rows.append({**plain, "decode_ms": 1e3 * seconds})
    for contestant in _BUILTIN_CONTESTANTS:
        name = "activation" if contestant.kind == "activation" else contestant.name
        if arguments.only and not name.startswith(arguments.only):
            continue
        runs = []
        for seed in map(int, arguments.seeds.split(",")):
            results.note(f"{name}, seed {seed}")
            sizes = (arguments.examples, arguments.filler)
            taught = builtin_chats(loaded, arguments.task, *sizes, seed)
            rate = arguments.rate or _BUILTIN_RATES[contestant.kind]
            config = TrainConfig(
                epochs=arguments.epochs, learning_rate=rate, patience=0, evals=4, seed=seed
            )
            adapter, count, spent_s = trained(loaded.model, contestant, taught, config)
            score = exact(core, adapter, tested)
            runs.append((score, spent_s, decode_seconds(core, adapter, arguments.repeats)))
        scores, times, steps = zip(*runs, strict=True)
        rows.append(
            {
                "adapter": name,
                "parameters": count,
                "score": statistics.mean(scores),
                "least": min(scores),
                "most": max(scores),
                "train_s": statistics.mean(times),
                "decode_ms": 1e3 * statistics.median(steps),
            }
        )
    results.finish("adapters", arguments.device, rows, arguments.json)


def builtin_chats(
    loaded: LoadedModel, task: str, count: int, filler: int, seed: int
) -> list[TrainingExample]:
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
            {"role": "assistant", "content": _BUILTIN_TASKS[task](value)},
        ]
        lines.append(json.dumps({"messages": messages}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        path.write_text("\n".join(lines))
        eos_id = end_token(loaded.tokenizer, loaded.eos_ids)
        return read_examples(path, loaded.tokenizer, eos_id=eos_id, max_tokens=4096)


def trained(
    model: CausalModel,
    contestant: Contestant,
    examples: list[TrainingExample],
    config: TrainConfig,
) -> tuple[Adapter, int, float]:
    """The adapter as it is served, its parameters, and the seconds its training took."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "adapter"
        started_s = time.perf_counter()
        made = contestant.parameters(model, [e.ids for e in examples], config.seed)
        count = train(model, made, examples[:-64], examples[-64:], folder, config).num_parameters
        if contestant.kind == "converted":
            count = convert_folder(model, folder, examples)
        spent_s = time.perf_counter() - started_s
        return load_adapter("a", folder, model, base_of(model), 1 << 30), count, spent_s


def convert_folder(model: CausalModel, folder: Path, examples: list[TrainingExample]) -> int:
    """Replace a trained prefix by an NTK adapter. Returns its number of parameters."""
    base = base_of(model)
    prefix = load_adapter("", folder, model, base, 1 << 30)
    assert isinstance(prefix, Prefix)
    probes = [ConversionText(e.ids, e.num_prompt) for e in examples]
    config = ConvertConfig(r=model.shape.head_dim, s=16, seed=1)
    made, _ = convert(Teacher(model, prefix), probes, config, results.note)
    write_folder(folder, kind=made.kind, settings=made.settings, tensors=made.tensors(), base=base)
    return made.num_parameters


def exact(core: Core, adapter: Adapter | None, tested: list[TrainingExample]) -> float:
    """Share of whole answers right, as the engine serves them, 32 at a time."""
    right = 0
    for low in range(0, len(tested), 32):
        jobs = {
            core.add(request_of(e.ids[: e.num_prompt], adapter, 48)): e
            for e in tested[low : low + 32]
        }
        said: dict[Any, list[int]] = {job: [] for job in jobs}
        while not core.is_idle:
            for job, event in core.step():
                if isinstance(event, TextDelta):
                    said[job] += event.token_ids
                elif isinstance(event, Finished):
                    assert event.error is None, event.error
        right += sum(tuple(said[job]) == e.ids[e.num_prompt :] for job, e in jobs.items())
    return right / len(tested)


def decode_seconds(core: Core, adapter: Adapter | None, repeats: int) -> float:
    """Median time of a step in which eight sequences of 256 tokens decode with the adapter."""
    vocab, times = core.model.vocab_size, []
    for repeat in range(repeats):
        prompts = (harness.random_ids(256, vocab, seed + 8 * repeat) for seed in range(8))
        requests = [request_of(ids, adapter, _STEPS + 4, ignore_eos=True) for ids in prompts]
        times.append(step_seconds(core, requests))
    return statistics.median(times)


if __name__ == "__main__":
    main()
