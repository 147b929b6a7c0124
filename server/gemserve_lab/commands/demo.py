"""`gemserve demo`: asks a server about a fact in a long document, with and without a filter."""

from __future__ import annotations

import argparse
from typing import Any

from gemserve.cli.options import number, read_value
from gemserve.ending_signals import ending_signals_raised

MODELS = ("smollm2", "builtin")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="hide a fact in a long document and ask for it, with and without a filter"
    )
    parser.add_argument(
        "--model", choices=MODELS, help="default: smollm2 if its file is installed, else builtin"
    )
    parser.add_argument(
        "--tokens", help="length of the document; default: 6,000 (smollm2), 16,384 (builtin)"
    )
    parser.add_argument("--seed", help="which document and fact; default: one for each model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    tokens, seed = (
        None if text is None else read_value(name, text, number(low))
        for name, text, low in (
            ("--tokens", arguments.tokens, 100),
            ("--seed", arguments.seed, 0),
        )
    )
    from gemserve_lab.demo.run import default_model, run_demo

    with ending_signals_raised():  # so that the server ends, too
        return run_demo(arguments.model or default_model(), tokens, seed)
