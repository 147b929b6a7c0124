"""Flags, `GEMSERVE_…` variables, which of them wins, and what a wrong one says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import commands_of, main, make_parser
from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    SERVER_OPTIONS,
    WITHOUT_VARIABLE,
    Option,
    add_options,
    read_options,
    refuse_unknown_variables,
    variable_of,
)
from gemserve.config import ATTENTION_BACKENDS, EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError

WITHOUT_FLAG = {
    *("step_target_s", "min_chunk_tokens", "host_memory", "when_cached"),
    *("body_memory_bytes", "body_timeout_s", "read_timeout_s", "logprobs_memory_bytes"),
    *("reply_memory_bytes", "max_queued_tokens", "document_memory_bytes"),
    *("max_pinned_documents", "library_disk_bytes"),
}
TABLES: list[tuple[tuple[Option, ...], Any]] = [
    (MODEL_OPTIONS, ModelConfig),
    (ENGINE_OPTIONS, EngineConfig),
    (SERVER_OPTIONS, ServerConfig),
]


def read(
    index: int, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Any:
    table, config_type = TABLES[index]
    parser = argparse.ArgumentParser()
    add_options(parser, *(t for t, _ in TABLES))
    return read_options(parser.parse_args(flags), table, config_type, environment or {})


@pytest.mark.parametrize("index", range(3))
def test_nothing_given_is_the_config_s_own_default(index: int) -> None:
    assert read(index) == TABLES[index][1]()


@pytest.mark.parametrize(("table", "config_type"), TABLES)
def test_every_field_has_a_flag_and_a_variable(table: Any, config_type: Any) -> None:
    fields = set(config_type.__dataclass_fields__) - WITHOUT_FLAG
    assert {o.field for o in table} == fields
    for option in table:
        assert option.variable == "GEMSERVE_" + option.flag[2:].upper().replace("-", "_")


def test_flags_are_read() -> None:
    flags = ["--filter", "gemfilter", "--filter-layer", "3", "--filter-keep", "0.25"]
    config = read(1, [*flags, "--max-queue", "7", "--max-prompt-tokens", "99"])
    assert (config.filter_method, config.filter_layer, config.filter_keep) == ("gemfilter", 3, 0.25)
    assert (config.max_queue, config.max_prompt_tokens) == (7, 99)
    windows = [read(1, ["--filter-window", text]).filter_window for text in ("512", "off", "auto")]
    assert windows == [512, "off", "auto"]
    assert read(2, ["--host", "::1", "--port", "0"]) == ServerConfig(host="::1", port=0)
    assert read(0, ["--trust-remote-code", "true"]).trust_remote_code is True


def test_the_environment_is_read() -> None:
    environment = {"GEMSERVE_FILTER_KEEP": "512", "GEMSERVE_FILTER": "none", "OTHER": "x"}
    config = read(1, environment=environment)
    assert config == EngineConfig(filter_keep=512, filter_method="none")
    assert isinstance(config.filter_keep, int)


def test_origins_may_be_repeated_or_listed() -> None:
    listed = ("https://a.example", "http://localhost:3000", "http://[::1]:80")
    flags = ["--cors-origin", f"{listed[0]}, {listed[1]}", "--cors-origin", listed[2]]
    assert read(2, flags).cors_origins == listed
    environment = {"GEMSERVE_CORS_ORIGIN": ",".join(listed)}
    assert read(2, environment=environment).cors_origins == listed
    assert read(2, ["--cors-origin", "*"], environment).cors_origins == ("*",)
    with pytest.raises(ConfigError, match="alone"):
        read(2, ["--cors-origin", "*", "--cors-origin", listed[0]])


def test_adapters_may_be_repeated_or_listed() -> None:
    flags = ["--adapter-dir", "d", "--adapter", "a=x/y=z, b.1=b", "--adapter", "C=c"]
    given = (("a", "x/y=z"), ("b.1", "b"), ("C", "c"))
    assert read(2, flags).adapters == given
    environment = {"GEMSERVE_ADAPTER": "a=x/y=z,b.1=b,C=c", "GEMSERVE_ADAPTER_DIR": "d"}
    assert read(2, environment=environment).adapters == given
    assert read(2, ["--adapter-memory", "64MiB"]).adapter_memory_bytes == 64 << 20
    for flags, said in (
        (["--adapter", "a=x"], "adapters='a=x': needs adapter_dir"),
        (["--adapter-dir", "d", "--adapter", "a=x,a=y"], "adapters='a=y': another one has"),
        (["--adapter-dir", "d", "--adapter", ".a=x"], r"adapters='.a=x': the name must be \[A-Z"),
        (["--adapter-dir", "d", "--adapter", f"{'a' * 65}=x"], "the name must be"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(2, flags)


def test_limits_per_key_need_keys() -> None:
    flags = ["--requests-per-minute", "60", "--concurrency-per-key", "4"]
    config = read(2, flags, {"GEMSERVE_API_KEY_FILE": "keys"})
    assert (config.requests_per_minute, config.concurrency_per_key) == (60, 4)
    with pytest.raises(ConfigError, match="requests_per_minute=60: needs api_key_file"):
        read(2, flags)


def test_a_flag_beats_the_environment_and_the_environment_the_default() -> None:
    environment = {"GEMSERVE_PORT": "1", "GEMSERVE_HOST": "0.0.0.0"}
    config = read(2, ["--port", "2"], environment)
    assert (config.port, config.host) == (2, "0.0.0.0")


def test_a_wrong_variable_does_not_matter_below_a_right_flag() -> None:
    assert read(2, ["--port", "2"], {"GEMSERVE_PORT": "x"}).port == 2


def test_auto_undoes_a_layer_from_the_environment() -> None:
    config = read(1, ["--filter-layer", "auto"], {"GEMSERVE_FILTER_LAYER": "3"})
    assert config.filter_layer is None


def test_where_weights_are_is_read() -> None:
    config = read(1, ["--offload-layers", "18"], {"GEMSERVE_FILTER_PRECISION": "fp8"})
    assert (config.offload_layers, config.filter_precision) == (18, "fp8")
    assert read(1, ["--offload-layers", "auto"]).offload_layers == "auto"


WRONG = [
    (2, "--port", "80a"),
    (2, "--port", ""),
    (1, "--filter", "snip"),
    (1, "--filter-layer", "1.5"),
    (1, "--filter-keep", "0"),
    (1, "--filter-keep", "15"),
    (1, "--filter-keep", "1.0"),
    (1, "--filter-keep", "-0.5"),
    (1, "--filter-keep", "nan"),
    (1, "--filter-keep", "inf"),
    (1, "--filter-keep", "many"),
    (1, "--max-queue", "1e3"),
    (1, "--filter-precision", "bf16"),
    (1, "--offload-layers", "all"),
    (1, "--offload-layers", "-1"),
    (2, "--requests-per-minute", "many"),
    (2, "--allowed-host", ""),
    (2, "--allowed-host", "gem.example.org:8000"),
    (2, "--allowed-host", "https://gem.example.org"),
    (2, "--allowed-host", "gem.example.org,*"),
    (2, "--cors-origin", ""),
    (2, "--cors-origin", "example.org"),
    (2, "--cors-origin", "https://Example.org"),
    (2, "--cors-origin", "https://example.org/"),
    (2, "--cors-origin", "https://*.example.org"),
    (2, "--cors-origin", "null"),
    (2, "--cors-origin", "https://example.org,"),
    (2, "--cors-origin", "*,https://example.org"),
    (2, "--adapter", "a"),
    (2, "--adapter", "=x"),
    (2, "--adapter", "a="),
    (2, "--adapter", ""),
    (2, "--adapter-memory", "0"),
    (2, "--adapter-memory", "much"),
    (0, "--dtype", "int8"),
    (0, "--attention-backend", "triton"),
    (1, "--cuda-graphs", "true"),
    (0, "--trust-remote-code", "maybe"),
]


@pytest.mark.parametrize(("index", "flag", "value"), WRONG)
def test_a_wrong_value_is_an_error_naming_where_it_came_from(
    index: int, flag: str, value: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(index, [f"{flag}={value}"])
    assert str(caught.value).startswith(f"{flag}={value}: ")
    variable = "GEMSERVE_" + flag[2:].upper().replace("-", "_")
    with pytest.raises(ConfigError) as caught:
        read(index, environment={variable: value})
    assert str(caught.value).startswith(f"{variable}={value}: ")


OUT_OF_RANGE = [
    (2, "--port", "-1"),
    (2, "--port", "65536"),
    (2, "--max-body-bytes", "0"),
    (2, "--requests-per-minute", "0"),
    (2, "--concurrency-per-key", "0"),
    (1, "--filter-min-tokens", "-1"),
    (1, "--filter-window", "255"),
    (1, "--filter-window", "-1"),
    (1, "--filter-window", "0.5"),
    (1, "--max-queue", "0"),
    (1, "--max-running", "0"),
    (1, "--filter-layer", "-1"),
]


@pytest.mark.parametrize(("index", "flag", "value"), OUT_OF_RANGE)
def test_a_number_that_cannot_be_is_refused_before_a_model_is_loaded(
    index: int, flag: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=value):
        read(index, [f"{flag}={value}"])


def test_the_command_ends_with_status_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--filter-keep", "3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--filter-keep=3" in error
    monkeypatch.setenv("GEMSERVE_PORT", "http")
    assert main(["serve"]) == 2
    assert "GEMSERVE_PORT=http" in capsys.readouterr().err


def test_a_wrong_key_file_is_an_error_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("fine\nnot fine\n")
    assert main(["serve", "--port", "0", "--api-key-file", str(path), "--model", "no/model"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path}: line 2: " in error
    assert "not fine" not in error


def test_a_missing_adapter_is_an_error_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "none")
    for flags, said in (
        (["--adapter-dir", missing], f"adapter_dir={missing}: no such folder"),
        (["--adapter-dir", str(tmp_path), "--adapter", "a=b"], "adapter=a=b: no such folder"),
    ):
        assert main(["serve", *flags, "--port", "0", "--model", "no/model"]) == 2
        assert capsys.readouterr().err == f"gemserve: {said}\n"


def test_an_unknown_variable_is_refused_and_the_client_s_address_is_not() -> None:
    """A server started with a key that it does not read would stand open."""
    refuse_unknown_variables({"GEMSERVE_PORT": "1", "GEMSERVE_URL": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="GEMSERVE_PROT: no such setting"):
        refuse_unknown_variables({"GEMSERVE_PROT": "1"})
    with pytest.raises(ConfigError, match="GEMSERVE_API_KEY: this is the client's"):
        refuse_unknown_variables({"GEMSERVE_API_KEY": "1"})


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--filter-kep", "3"])
    assert caught.value.code == 2
    assert "--filter-kep" in capsys.readouterr().err


COMMANDS = [command.prog for command in commands_of(make_parser())]
TEXTS = (
    *("7", "0.25", "on", "a=b", "https://a.example", "4GiB", "off", "dense", "float32", "int8"),
    *("full", "fp8", "json", "gemfilter", "true", ATTENTION_BACKENDS[-1]),
)
OF_TABLES = {option.flag: option for table, _ in TABLES for option in table}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command up to where it would begin: its settings, or None if one is refused."""
    found: dict[str, Any] = {}

    def run(arguments: argparse.Namespace) -> int:
        actions = arguments.parser._actions
        flags = [a.option_strings[-1] for a in actions if a.default is argparse.SUPPRESS]
        table = tuple(OF_TABLES[flag] for flag in flags if flag != "--help")
        left_out = dict.fromkeys(("parser", "from_variables", "run"))
        found.update(vars(arguments) | read_options(arguments, table, dict) | left_out)
        return 0

    def make() -> argparse.ArgumentParser:
        parser = make_parser()
        for command in commands_of(parser):
            command.set_defaults(run=run)
        return parser

    plain = make()  # takes longer than all else here

    def settings_of(words: Sequence[str], **variables: str) -> dict[str, Any] | None:
        found.clear()
        with monkeypatch.context() as patch:
            patch.setattr("gemserve.cli.main.make_parser", make if variables else lambda: plain)
            for name, text in variables.items():
                patch.setenv(name, text)
            try:
                return None if main(words) else dict(found)
            except SystemExit:
                return None

    return settings_of


def words_of(command: argparse.ArgumentParser, flag: argparse.Action) -> list[str]:
    """A command with all that it needs, but for one flag."""
    words = command.prog.split()[1:]
    for action in command._actions:
        if action.required and action is not flag:
            words += [*action.option_strings[-1:], next(iter(action.choices or ["word"]))]
    return words


@pytest.mark.parametrize("prog", COMMANDS)
def test_every_flag_of_every_command_is_a_variable(
    prog: str, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`library ACTION` and `ask` looked for libraries elsewhere than GEMSERVE_LIBRARY_DIR said."""
    (command,) = (each for each in commands_of(make_parser()) if each.prog == prog)
    for action in command._actions:
        if not action.option_strings or action.dest == "help":
            continue
        flag, words = action.option_strings[-1], words_of(command, action)
        name = variable_of(command, action)
        if name is None:
            assert (prog, flag) in WITHOUT_VARIABLE
            continue
        texts = ["true"] if action.nargs == 0 else [*(action.choices or TEXTS)]
        default = settings(words)
        for text in texts:
            given = [*words, flag if action.nargs == 0 else f"{flag}={text}"]
            by_flag = settings(given)
            if by_flag not in (None, default):
                break
        else:
            pytest.fail(f"no text sets {flag}")
        assert settings(words, **{name: text}) == by_flag, (flag, text)
        assert settings(given, **{name: "\\"}) == by_flag  # the flag wins
        capsys.readouterr()
        if action.nargs == 0 or settings([*words, f"{flag}=\\"]) is None:
            assert settings(words, **{name: "\\"}) is None
            assert f"gemserve: {name}=\\: " in capsys.readouterr().err


def test_a_flag_that_repeats_has_a_variable_for_all_its_values(settings: Any) -> None:
    words = ["ask", "notes.txt", "Who?"]
    found = settings(words, GEMSERVE_ALSO="Who, then?\nWhy?")
    assert found["also"] == ["Who, then?", "Why?"]
    assert settings([*words, "--also", "Who?"], GEMSERVE_ALSO="Why?")["also"] == ["Who?"]


def test_help_of_serve_names_the_variable_of_every_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    words = set(capsys.readouterr().out.replace(")", " ").split())
    flags = {w for w in words if w.startswith("--")} - {"--help"}
    missing = {f for f in flags if "GEMSERVE_" + f[2:].upper().replace("-", "_") not in words}
    assert missing == set()
