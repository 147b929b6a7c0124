"""Flags and `GEMSERVE_…` variables of the commands, from one table."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from gemserve.cli.option_readers import (
    read_switch,
)
from gemserve.cli.option_tables import ENGINE_OPTIONS, MODEL_OPTIONS, SERVER_OPTIONS, Option
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError

_TABLE_FIELDS = frozenset(o.field for o in (*MODEL_OPTIONS, *ENGINE_OPTIONS, *SERVER_OPTIONS))


def add_options(parser: argparse.ArgumentParser, *tables: tuple[Option, ...]) -> None:
    defaults = {**vars_of(ModelConfig()), **vars_of(EngineConfig()), **vars_of(ServerConfig())}
    for option in (o for table in tables for o in table):
        default = defaults[option.field]
        shown = option.unset if default in (None, ()) else default
        parser.add_argument(
            option.flag,
            action="append" if option.repeats else "store",
            dest=option.field,
            metavar=option.flag.removeprefix("--").upper().replace("-", "_"),
            help=f"{option.help} (default: {shown}; {option.variable})",
        )


def refuse_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` for a `GEMSERVE_…` variable that no setting of the server reads."""
    tables = (*MODEL_OPTIONS, *ENGINE_OPTIONS, *SERVER_OPTIONS)
    known = {option.variable for option in tables}
    # A shell may also hold the client's variables. GEMSERVE_API_KEY is refused, because whoever
    # gives it to a server expects that clients need it.
    known.add("GEMSERVE_URL")
    if "GEMSERVE_API_KEY" in environment:
        raise ConfigError(
            "GEMSERVE_API_KEY: this is the client's; a server's keys are in --api-key-file"
        )
    unknown = [name for name in environment if name.startswith("GEMSERVE_") and name not in known]
    if unknown:
        raise ConfigError(
            *(
                f"{name}: no such setting; `gemserve serve --help` lists them all"
                for name in unknown
            )
        )


def apply_environment(
    parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ
) -> None:
    """Let `GEMSERVE_…` variables set those flags of a command that are in no table."""
    for action in parser._actions:
        flags = [o for o in action.option_strings if o.startswith("--") and o != "--help"]
        name = "GEMSERVE_" + flags[0].removeprefix("--").replace("-", "_").upper() if flags else ""
        if name not in environment or action.dest in _TABLE_FIELDS:
            continue
        text = environment[name]
        is_switch = action.nargs == 0
        action.default = read_switch(text) if is_switch else text


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def read_options(
    arguments: argparse.Namespace,
    table: tuple[Option, ...],
    config_type: Callable[..., Any],
    environment: Mapping[str, str] = os.environ,
) -> Any:
    """Build a config from flags, then the environment, then its own defaults.

    Raises one `ConfigError` for all values that are wrong.
    """
    config, problems = read_good_options(arguments, table, config_type, environment)
    if problems:
        raise ConfigError(*problems)
    return config


def read_good_options(
    arguments: argparse.Namespace,
    table: tuple[Option, ...],
    config_type: Callable[..., Any],
    environment: Mapping[str, str] = os.environ,
) -> tuple[Any, list[str]]:
    """A config without the values that are wrong, and what is wrong with them."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    unreadable: set[str] = set()
    for option in table:
        text, name = getattr(arguments, option.field, None), option.flag
        if option.repeats and text is not None:
            text = ",".join(text)
        if text is None:
            text, name = environment.get(option.variable), option.variable
        if text is None:
            continue
        try:
            values[option.field] = option.read(text)
        except ValueError as error:
            problems.append(f"{name}={text}: {error}")
            unreadable.add(option.field)
    while True:
        try:
            return config_type(**values), problems
        except ConfigError as error:
            for problem in error.problems:
                named = {field for field in values if re.search(rf"\b{field}\b", problem)}
                if not any(re.search(rf"\b{field}\b", problem) for field in unreadable):
                    problems.append(problem)
                for field in named or set(values):
                    del values[field]
