"""`jsonl`: a user's own file with one JSON object a line.

    {"context": "…", "question": "…", "answers": ["…", "…"]}

If there are several answers, the best match counts; with `metric` "items" or "contains" all of them
are expected. `metric` and `max_tokens` may be given too, and `gold`: the passage of the context
that holds the answer, or a list of passages. If the context has a passage more than once, the first
place counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemserve.errors import ConfigError, shown
from gemserve_lab.tasks.example_file import ExampleFile, FileExample, read_answers
from gemserve_lab.tasks.jsonl_records import Record, read_records

METRIC_NAMES = ("f1", "rouge_l", "items", "number", "code_similarity", "contains")
MAX_TOKENS = 128
_FIELDS = ("context", "question", "answers", "metric", "max_tokens", "gold")


def read_files(data: Path, subtasks: Sequence[str] | None) -> list[ExampleFile]:
    """Read the one file; its subtask is its name without the ending. Raises `ConfigError`."""
    for name in subtasks or ():
        if name != data.stem:
            raise ConfigError(f"subtasks={name}: must be {data.stem}, the name of the file")
    records, digest = read_records(data)
    cases = {record.number: read_case(record) for record in records}
    return [ExampleFile(subtask=data.stem, path=data, digest=digest, cases=cases)]


def read_case(record: Record) -> FileExample:
    for name in record.fields:
        if name not in _FIELDS:
            raise record.error(name, f"unknown field; must be among {', '.join(_FIELDS)}")
    question = record.text("question")
    if not question.strip():
        raise record.error("question", "must not be blank")
    metric = _metric(record)
    answers = read_answers(record, metric)
    if not all(answer.strip() for answer in answers):
        raise record.error("answers", "must not be blank")
    context = record.text("context")
    return FileExample(
        document=context,
        task=question,
        question=question,
        answers=answers,
        metric=metric,
        max_tokens=_max_tokens(record),
        gold=_gold(record, context),
    )


def _gold(record: Record, context: str) -> tuple[str, ...]:
    """The passages in the order of the context, without white space around them."""
    if "gold" not in record.fields:
        return ()
    is_list = isinstance(record.fields["gold"], list)
    given = record.texts("gold") if is_list else (record.text("gold"),)
    passages = [passage.strip() for passage in given]
    if not all(passages):
        raise record.error("gold", "must not be blank")
    for passage in passages:
        if passage not in context:
            raise record.error("gold", f"{shown(passage)} does not occur in the context")
    passages.sort(key=context.index)
    at = 0
    for passage in passages:
        at = context.find(passage, at)
        if at < 0:
            raise record.error("gold", f"{shown(passage)} overlaps with another passage")
        at += len(passage)
    return tuple(passages)


def _metric(record: Record) -> str:
    if "metric" not in record.fields:
        return METRIC_NAMES[0]
    metric = record.text("metric")
    if metric not in METRIC_NAMES:
        raise record.error("metric", f"must be among {', '.join(METRIC_NAMES)}")
    return metric


def _max_tokens(record: Record) -> int:
    value = record.fields.get("max_tokens", MAX_TOKENS)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise record.error("max_tokens", "must be a whole number from 1")
    return value
