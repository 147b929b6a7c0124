"""The scripts in `benchmarks`: each has to find the others, from whatever folder it is run."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from transformers import DynamicCache

from benchmarks.speed import carry_states, reading

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    path for path in sorted(FOLDER.rglob("*.py")) if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_puts_the_repository_root_on_the_path(path: Path) -> None:
    """Without this line it runs in the tests and by `-m`, and fails when it is run by its path."""
    text = path.read_text()
    if "\nfrom benchmarks" not in text:
        return
    depth = len(path.relative_to(FOLDER).parts)
    line = f"sys.path.insert(0, str(Path(__file__).parents[{depth}]))  # the repository root\n"
    assert line in text.partition("\nfrom benchmarks")[0]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_function_hides_a_module_of_its_script(path: Path) -> None:
    """A list called `results` had no `note`, and the script ended at its first measurement."""
    text = path.read_text()
    modules = {
        name.name
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks")
        for name in node.names
        if (FOLDER.parent / node.module.replace(".", "/") / f"{name.name}.py").exists()
    }
    tables = functions_in(symtable.symtable(text, str(path), "exec"))
    hidden = {(t.get_name(), name) for t in tables for name in modules & set(t.get_locals())}
    assert not hidden


def functions_in(table: symtable.SymbolTable) -> Iterator[symtable.Function]:
    for child in table.get_children():
        if isinstance(child, symtable.Function):
            yield child
        yield from functions_in(child)


def test_reading_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It made prompts without saying for which model."""
    for name in ("LLM", "Prompts"):
        monkeypatch.setattr(reading, name, create_autospec(getattr(reading, name)))
    monkeypatch.setattr("sys.argv", ["reading.py", "--lengths", "512", "--repeats", "1"])
    reading.main()
    assert "native-cpu:bfloat16" in capsys.readouterr().out


def test_a_pass_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU was not waited for, because its device is called "cuda:0"."""
    awaited: list[str] = []
    monkeypatch.setattr(carry_states.results, "synchronize", awaited.append)
    inner = SimpleNamespace(rotary_emb=lambda *_: None)
    model = SimpleNamespace(device=torch.device("cuda", 0), model=inner)
    carry_states.timed([], model, torch.zeros(1, 2, 4), [], torch.arange(2), DynamicCache())
    assert awaited == ["cuda", "cuda"]
