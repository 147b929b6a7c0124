"""Reads lines of JSONL files. Errors name file, line, field and value."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemserve.errors import ConfigError, shown
from gemserve.json_lines import BadLine, parse_objects


@dataclass(frozen=True, slots=True)
class Record:
    """One line. `number` counts from 1, blank lines included."""

    path: Path
    number: int
    fields: Mapping[str, object]

    def text(self, name: str) -> str:
        """A field that must be a text. Raises `ConfigError`, as all methods do."""
        value = self._given(name)
        if not isinstance(value, str):
            raise self.error(name, "must be a text")
        self._check_unicode(name, value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that must be a list of at least one text."""
        value = self._given(name)
        texts = [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
        if not isinstance(value, list) or not texts or len(texts) < len(value):
            raise self.error(name, "must be a list of texts, at least one")
        for text in texts:
            self._check_unicode(name, text)
        return tuple(texts)

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(
            f"{self.path}, line {self.number}: {name}={shown(self.fields[name])}: {problem}"
        )

    def _given(self, name: str) -> object:
        if name not in self.fields:
            raise ConfigError(f"{self.path}, line {self.number}: {name} is missing")
        return self.fields[name]

    def _check_unicode(self, name: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
            raise self.error(name, "is not valid Unicode") from error


def read_records(path: Path) -> tuple[list[Record], str]:
    """All lines that are not blank, and a digest of the file. Raises `ConfigError`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data={path}: {error.strerror}") from error
    try:
        records = [Record(path, number, fields) for number, fields in parse_objects(content)]
    except BadLine as error:
        raise ConfigError(f"{path}, line {error.number}: {error}") from error
    if not records:
        raise ConfigError(f"data={path}: holds no examples")
    return records, hashlib.sha256(content).hexdigest()
