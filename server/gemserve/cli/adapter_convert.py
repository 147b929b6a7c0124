"""`gemserve adapter convert`: a long text, or a prefix, as an adapter that costs little."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemserve.cli.options import MODEL_OPTIONS, add_options, make_folder, number, read_options
from gemserve.cli.text_table import aligned
from gemserve.config import ModelConfig
from gemserve.errors import AdapterError, ConfigError


def add_command(commands: Any) -> None:
    parser = commands.add_parser("convert", help="compress a prefix or a long prompt")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prefix", type=Path, help="folder of a prefix, made by gemserve or by PEFT"
    )
    source.add_argument("--prompt", type=Path, help="text file with a system prompt")
    parser.add_argument("--type", dest="kind", default="ntk", choices=("ntk", "prefix"))
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="texts like those it will be used with, as for train; with --prompt only chats",
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
    from gemserve.adapters.convert import ConvertConfig, agreement, convert
    from gemserve.adapters.folder import write_folder
    from gemserve.adapters.lines import read_text
    from gemserve.adapters.prefix import Prefix
    from gemserve.adapters.probes import after_prefix, after_text
    from gemserve.adapters.table import load_adapter
    from gemserve.adapters.trainable import read_prefix
    from gemserve.model.base import base_of
    from gemserve.model.loader import load

    make_folder("out", arguments.out)
    model: ModelConfig = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    loaded = load(model)
    base = base_of(loaded.model)
    if arguments.prompt is not None:
        text = read_text(arguments.prompt)
        if not text.strip():
            raise AdapterError(f"{arguments.prompt}: must not be empty")
        ids, probes = after_text(
            loaded.tokenizer, text, arguments.data, max_tokens=arguments.max_tokens
        )
        longest = max(len(probe.after) for probe in probes)
        limit = loaded.model.context_tokens
        if len(ids) + longest > limit:
            raise AdapterError(
                f"{arguments.prompt}: has {len(ids)} tokens, which with a text of {longest} are "
                f"more than the model's {limit}"
            )
        keys, values = read_prefix(loaded.model, ids)
        prefix: Any = Prefix("", "", keys=keys, values=values)
    else:
        prefix = load_adapter("", arguments.prefix, loaded.model, base, 1 << 40)
        if not isinstance(prefix, Prefix):
            raise AdapterError(f"{arguments.prefix}: is no prefix")
        probes = after_prefix(loaded.tokenizer, arguments.data, max_tokens=arguments.max_tokens)
    if arguments.kind == "prefix":
        if any(probe.num_lead for probe in probes):
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
    config = ConvertConfig(
        r=arguments.r or loaded.model.shape.head_dim,
        s=arguments.s,
        fit_steps=arguments.fit_steps,
        distill_steps=arguments.distill_steps,
        seed=arguments.seed,
    )

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    parameters, fit = convert(loaded.model, prefix, probes, config, progress)
    write_folder(
        arguments.out,
        kind=parameters.kind,
        settings=parameters.settings,
        tensors=parameters.tensors(),
        base=base,
    )
    tested = probes[-max(1, len(probes) // 8) :]
    before = agreement(loaded.model, prefix, None, tested)
    after = agreement(loaded.model, prefix, parameters, tested)
    heads = ("layer", "without", "fitted", "relative error of attention's output")
    errors = [
        (str(layer), f"{without:.3f}", f"{fitted:.3f}", "")
        for layer, (without, fitted) in enumerate(zip(fit.without, fit.fitted, strict=True))
    ]
    print(*aligned([heads, *errors], left=(3,)), sep="\n")
    print(
        f"{prefix.num_positions} tokens, {prefix.num_bytes:,} bytes of keys and values, as "
        f"{parameters.num_parameters:,} parameters. On {len(tested)} texts held out the likeliest "
        f"tokens of the answer are the prefix's in {after.top1:.1%} (without either: "
        f"{before.top1:.1%}), all of them in {after.answers:.1%} ({before.answers:.1%}); "
        f"divergence {after.kl:.4f} nats ({before.kl:.4f})"
    )
    if after.kl >= before.kl:
        print("gemserve: that is worse than nothing: more chats, or more steps, may help")
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
