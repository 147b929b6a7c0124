"""`gemserve adapter convert`: turn a long text or a prefix into an NTK adapter."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.options import MODEL_OPTIONS, add_options, make_folder, number, read_options
from gemserve.cli.tables import aligned
from gemserve.config import ModelConfig
from gemserve.errors import AdapterError, ConfigError

if TYPE_CHECKING:  # imported for types only: a command that runs no model loads no torch
    from gemserve.adapters.prefix import Prefix
    from gemserve.model.base_model import BaseModel
    from gemserve.model.loading.loader import LoadedModel
    from gemserve.model.passes.causal_model import CausalModel
    from gemserve_train.conversion_texts import ConversionText
    from gemserve_train.convert import Fit
    from gemserve_train.distill import Agreement


def add_command(commands: Any) -> None:
    parser = commands.add_parser("convert", help="compress a prefix or a long prompt")
    parser.add_argument(
        "--prefix", type=Path, help="folder of a prefix, made by gemserve or by PEFT"
    )
    parser.add_argument("--prompt", type=Path, help="a text file with a system prompt")
    parser.add_argument("--type", dest="kind", default="ntk", choices=("ntk", "prefix"))
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="texts like those of later requests, in the format of train; with --prompt only chats",
    )
    parser.add_argument("--out", type=Path, required=True, help="the adapter's folder")
    parser.add_argument(
        "--r", type=number(1), help="number of features, head_dim (the default) or twice that"
    )
    parser.add_argument("--s", type=number(1), default=16, help="rank (default: %(default)s)")
    parser.add_argument(
        "--fit-steps",
        type=number(1),
        default=600,
        help="steps of fitting each layer (default: %(default)s)",
    )
    parser.add_argument(
        "--distill-steps",
        type=number(0),
        default=200,
        help="steps of training all layers together (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=number(2), default=2048, help="longest text (default: %(default)s)"
    )
    parser.add_argument("--seed", type=number(0), default=0, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.adapters.folder import write_folder
    from gemserve.model.base_model import base_of
    from gemserve.model.loading.loader import load

    if (arguments.prefix is None) == (arguments.prompt is None):
        raise ConfigError("--prefix, --prompt: one of them is needed, and not both")
    make_folder("out", arguments.out)
    model: ModelConfig = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    loaded = load(replace(model, weights="dense", quantise="off"))  # blocks have no gradients
    base = base_of(loaded.model)
    if arguments.prompt is not None:
        prefix, texts = _read_prompt(arguments, loaded)
    else:
        prefix, texts = _read_prefix(arguments, loaded, base)
    if arguments.kind == "ntk":
        return _fit(arguments, loaded.model, base, prefix, texts)
    if any(text.num_lead for text in texts):
        raise ConfigError(
            "--type=prefix: a chat's own beginning would stand behind this one; use ntk"
        )
    write_folder(
        arguments.out,
        kind="prefix",
        settings={"length": prefix.num_positions},
        tensors={"keys": prefix.keys, "values": prefix.values},
        base=base,
    )
    print(f"gemserve: {prefix.num_positions} positions as they are, in {arguments.out}")
    return 0


def _read_prompt(
    arguments: argparse.Namespace, loaded: LoadedModel
) -> tuple[Prefix, list[ConversionText]]:
    """The text of --prompt as a prefix, and the chats that follow it. Raises `AdapterError`."""
    from gemserve.adapters.prefix import Prefix, check_windows
    from gemserve_train.conversion_texts import after_text
    from gemserve_train.data_files import read_text
    from gemserve_train.parameters import read_prefix

    check_windows(loaded.model)
    if not loaded.model.is_rope_fixed:
        raise AdapterError(
            "--prompt: not for this model: its rotary embedding depends on the text's length"
        )
    text = read_text(arguments.prompt)
    if not text.strip():
        raise AdapterError(f"{arguments.prompt}: must not be empty")
    ids, texts = after_text(loaded.tokenizer, text, arguments.data, max_tokens=arguments.max_tokens)
    longest = max(len(text.after) for text in texts)
    limit = loaded.model.context_tokens
    if len(ids) + longest > limit:
        raise AdapterError(
            f"{arguments.prompt}: has {len(ids)} tokens, which with a text of {longest} are "
            f"more than the model's {limit}"
        )
    keys, values = read_prefix(loaded.model, ids)
    return Prefix("", "", keys=keys, values=values), texts


def _read_prefix(
    arguments: argparse.Namespace, loaded: LoadedModel, base: BaseModel
) -> tuple[Prefix, list[ConversionText]]:
    """The prefix of --prefix and the texts that follow it. Raises `AdapterError`."""
    from gemserve.adapters.kinds import load_adapter
    from gemserve.adapters.prefix import Prefix
    from gemserve_train.conversion_texts import after_prefix
    from gemserve_train.examples import end_token

    prefix = load_adapter("", arguments.prefix, loaded.model, base, 1 << 40)
    if not isinstance(prefix, Prefix):
        raise AdapterError(f"{arguments.prefix}: is no prefix")
    limits = {
        "eos_id": end_token(loaded.tokenizer, loaded.eos_ids),
        "max_tokens": arguments.max_tokens,
    }
    return prefix, after_prefix(loaded.tokenizer, arguments.data, **limits)


def _fit(
    arguments: argparse.Namespace,
    model: CausalModel,
    base: BaseModel,
    prefix: Prefix,
    texts: list[ConversionText],
) -> int:
    """Fit an NTK adapter to the prefix, write it, and print how well it stands for the prefix."""
    from gemserve.adapters.folder import write_folder
    from gemserve_train.convert import ConvertConfig, convert, num_held_out
    from gemserve_train.distill import Teacher, agreement

    config = ConvertConfig(
        r=arguments.r or model.shape.head_dim,
        s=arguments.s,
        fit_steps=arguments.fit_steps,
        distill_steps=arguments.distill_steps,
        seed=arguments.seed,
    )

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    teacher = Teacher(model, prefix)
    parameters, fit = convert(teacher, texts, config, progress)
    write_folder(
        arguments.out,
        kind=parameters.kind,
        settings=parameters.settings,
        tensors=parameters.tensors(),
        base=base,
    )
    held_out = texts[-num_held_out(texts) :]
    before = agreement(teacher, None, held_out)
    after = agreement(teacher, parameters.adapter(), held_out)
    _print_fit(fit, prefix, parameters.num_parameters, len(held_out), before, after)
    if arguments.json:
        result = {
            "type": "ntk",
            "positions": prefix.num_positions,
            "parameters": parameters.num_parameters,
            "layers": asdict(fit),
            "without": asdict(before),
            "fitted": asdict(after),
        }
        print(json.dumps(result))
    return 0


def _print_fit(
    fit: Fit,
    prefix: Prefix,
    num_parameters: int,
    num_texts: int,
    before: Agreement,
    after: Agreement,
) -> None:
    heads = ("layer", "without", "fitted", "relative error of attention's output")
    errors = [
        (str(layer), f"{without:.3f}", f"{fitted:.3f}", "")
        for layer, (without, fitted) in enumerate(zip(fit.without, fit.fitted, strict=True))
    ]
    print(*aligned([heads, *errors], left=(3,)), sep="\n")
    print(
        f"{prefix.num_positions} tokens, {prefix.num_bytes:,} bytes of keys and values, as "
        f"{num_parameters:,} parameters. On {num_texts} texts held out the likeliest "
        f"tokens of the answer are the prefix's in {after.top1:.1%} (without either: "
        f"{before.top1:.1%}), all of them in {after.answers:.1%} ({before.answers:.1%}); "
        f"divergence {after.kl:.4f} nats ({before.kl:.4f})"
    )
    if after.kl >= before.kl:
        print("gemserve: that is worse than nothing: more chats, or more steps, may help")
