"""`gemserve adapter train`: train an adapter on a file of prompts and completions."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.options import MODEL_OPTIONS, add_options, number, read_options
from gemserve.config import ModelConfig
from gemserve.errors import AdapterError, ConfigError

if TYPE_CHECKING:
    from gemserve_train.examples import TrainingExample

KINDS = ("ntk", "prefix", "activation", "lora")


def add_command(commands: Any) -> None:
    parser = commands.add_parser("train", help="train an adapter on a frozen model")
    parser.add_argument("--type", dest="kind", required=True, choices=KINDS)
    parser.add_argument("--data", type=Path, help="examples, one JSON object a line")
    parser.add_argument(
        "--eval-data",
        type=Path,
        help="examples that decide when training stops (default: a tenth of --data)",
    )
    parser.add_argument(
        "--out", type=Path, help="the adapter's folder; an interrupted run in it is continued"
    )
    _add_type_options(parser)
    _add_number_options(parser)
    parser.add_argument(
        "--max-minutes",
        type=number(0.01, kind=float),
        help="stop after this time; the learning rate comes down before (default: no limit)",
    )
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="keep no activations of layers but compute them twice: less memory, more time",
    )
    parser.add_argument(
        "--max-tokens", type=number(2), default=2048, help="longest example (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="count parameters; reads no weights")
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS)
    parser.set_defaults(run=run)


def _add_type_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--r", type=number(1), help="ntk: number of features, head_dim (the default) or twice that"
    )
    parser.add_argument("--s", type=number(1), default=16, help="ntk: rank (default: %(default)s)")
    parser.add_argument(
        "--length", type=number(1), default=16, help="prefix: positions (default: %(default)s)"
    )
    parser.add_argument(
        "--layer",
        type=number(0),
        help="activation: the vector is added before this layer (default: the middle one)",
    )
    parser.add_argument(
        "--rank", type=number(1), default=8, help="lora: rank (default: %(default)s)"
    )
    parser.add_argument(
        "--targets",
        type=lambda text: text.split(","),
        default=["q_proj", "k_proj", "v_proj", "o_proj"],
        help="lora: names of the modules to change (default: q_proj,k_proj,v_proj,o_proj)",
    )


def _add_number_options(parser: argparse.ArgumentParser) -> None:
    for name, low, kind, text in (
        ("epochs", 0.001, float, "passes over the examples"),
        ("batch-size", 1, int, "examples in one step"),
        ("learning-rate", 1e-9, float, "the highest learning rate"),
        ("weight-decay", 0, float, "weight decay of AdamW"),
        ("warmup-share", 0, float, "share of the steps in which the learning rate rises"),
        ("evals", 1, int, "number of evaluations"),
        (
            "patience",
            0,
            int,
            "evaluations without a lower loss after which training stops; 0: never",
        ),
        ("seed", 0, int, "seed of the start values and of the order of examples"),
    ):
        default = _DEFAULTS.get(name)
        told = "by type: see docs/adapters.md" if default is None else f"{default:g}"
        parser.add_argument(
            f"--{name}", type=number(low, kind=kind), help=f"{text} (default: {told})"
        )


# Found with benchmarks/adapters/comparison.py, see docs/adapters.md.
LEARNING_RATES = {"ntk": 1e-3, "prefix": 1e-1, "activation": 1.0, "lora": 3e-3}
_DEFAULTS: dict[str, float] = {
    "epochs": 3,
    "batch-size": 8,
    "weight-decay": 0,
    "warmup-share": 0.05,
    "evals": 10,
    "patience": 3,
    "seed": 0,
}


def run(arguments: argparse.Namespace) -> int:
    model: ModelConfig = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    model = replace(model, weights="dense", quantise="off")  # blocks have no gradients
    if arguments.dry_run:
        return _count(arguments, model)
    for name in ("data", "out"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"--{name}: is needed to train")
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("training needs the package accelerate; pip install 'gemserve[train]'")
    from gemserve.adapters.kinds import check_adaptable
    from gemserve.model.loading.loader import load
    from gemserve_train.examples import end_token
    from gemserve_train.trainer import TrainConfig, train

    loaded = load(model)
    check_adaptable(loaded.model)
    eos_id = end_token(loaded.tokenizer, loaded.eos_ids)
    examples, held_out = _read_examples(arguments, loaded.tokenizer, eos_id)
    settings = {
        f.name: getattr(arguments, f.name)
        for f in fields(TrainConfig)
        if getattr(arguments, f.name) is not None
    }
    settings.setdefault("learning_rate", LEARNING_RATES[arguments.kind])
    config = TrainConfig(**settings)
    texts = [example.ids for example in examples]
    parameters = _parameters(arguments, loaded.model, texts, config.seed)
    print(
        f"gemserve: {arguments.kind} for {model.model}: {parameters.num_parameters:,} parameters, "
        f"{len(examples)} examples, {len(held_out)} to evaluate with",
        flush=True,
    )
    result = train(
        loaded.model,
        parameters,
        examples,
        held_out,
        arguments.out,
        config,
        is_quiet=not sys.stderr.isatty(),
    )
    print(
        f"gemserve: {result.steps} steps in {result.seconds / 60:.1f} minutes, evaluation loss "
        f"{result.eval_loss:.4f}; the adapter is in {arguments.out}"
    )
    losses = [entry["eval_loss"] for entry in result.history if "eval_loss" in entry]
    if len(losses) > 1 and min(losses) == losses[0]:
        print(
            "gemserve: the evaluation loss was never lower than at its first evaluation, so that "
            f"adapter was kept; a learning rate below {config.learning_rate:g} may help"
        )
    if arguments.json:
        told = asdict(result)
        del told["history"]  # training.json has it
        print(json.dumps({"type": arguments.kind, **told}))
    return 0


def _read_examples(
    arguments: argparse.Namespace, tokenizer: Any, eos_id: int
) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """The examples to train on, and those to evaluate with. Raises `AdapterError`."""
    from gemserve_train.examples import read_examples

    limits = {"eos_id": eos_id, "max_tokens": arguments.max_tokens}
    examples = read_examples(arguments.data, tokenizer, **limits)
    if arguments.eval_data is not None:
        held_out = read_examples(arguments.eval_data, tokenizer, **limits)
    else:
        share = max(1, len(examples) // 10)
        examples, held_out = examples[:-share], examples[-share:]
    if not examples:
        raise AdapterError(f"{arguments.data}: must have at least 2 examples, or --eval-data")
    return examples, held_out


def _parameters(
    arguments: argparse.Namespace, model: Any, texts: Sequence[Sequence[int]], seed: int
) -> Any:
    """A new adapter of the requested kind. A prefix starts as the first text's beginning."""
    from gemserve_train.parameters import (
        ActivationParameters,
        NTKParameters,
        PrefixParameters,
    )

    if arguments.kind == "ntk":
        r = arguments.r or model.shape.head_dim
        return NTKParameters.beside(model, texts, r, arguments.s, seed)
    if arguments.kind == "activation":
        return ActivationParameters(model.shape, _layer(arguments, model.shape), model.dtype)
    if arguments.kind == "lora":
        from gemserve_train.lora_parameters import LoraParameters

        return LoraParameters(model, arguments.rank, arguments.targets, seed)
    text = list(texts[0])
    if arguments.length >= model.context_tokens:
        raise AdapterError(
            f"--length={arguments.length}: must be below the model's {model.context_tokens} tokens"
        )
    repeated = text * -(-arguments.length // len(text))
    return PrefixParameters(model, repeated[: arguments.length])


def _layer(arguments: argparse.Namespace, shape: Any) -> int:
    """The layer of an activation vector."""
    return shape.num_layers // 2 if arguments.layer is None else int(arguments.layer)


def _count(arguments: argparse.Namespace, model: ModelConfig) -> int:
    from gemserve.model.loading.loader import model_from_config
    from gemserve.model.shape import shape_of
    from gemserve_train.lora_parameters import count_lora
    from gemserve_train.parameters import count_parameters

    hf, dtype, _ = model_from_config(model)
    shape = shape_of(hf, dtype)
    r = arguments.r or shape.head_dim
    if arguments.kind == "lora":
        count = count_lora(hf, arguments.rank, arguments.targets)
    else:
        count = count_parameters(arguments.kind, shape, r=r, s=arguments.s, length=arguments.length)
    settings = {
        "ntk": {"r": r, "s": arguments.s},
        "prefix": {"length": arguments.length},
        "activation": {"layer": _layer(arguments, shape)},
        "lora": {"rank": arguments.rank, "targets": arguments.targets},
    }[arguments.kind]
    print(f"{arguments.kind} {settings} for {model.model}: {count:,} parameters")
    if arguments.json:
        print(json.dumps({"type": arguments.kind, "parameters": count, **settings}))
    return 0
