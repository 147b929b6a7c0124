"""`longbench`: the English and code datasets of LongBench, from local JSONL files.

Metrics and lengths of answers are LongBench's (Bai et al., *LongBench: A Bilingual, Multitask
Benchmark for Long Context Understanding*, 2024). The wording of prompts is gemserve's own, and
prompts that are too long are not cut. LongBench-E's files are named with `_e`. The Chinese datasets
are refused, because their published scores depend on one word segmenter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemserve.errors import ConfigError
from gemserve_lab.tasks.example_file import ExampleFile, FileExample, read_answers
from gemserve_lab.tasks.jsonl_records import Record, read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The text `before` and `after` the context, and how an answer is scored.

    `{input}` in `after` is the line's own question. Datasets whose context already shows the
    expected form of an answer are not `is_chat`: their prompt is plain text. `is_one_line`: see
    `Example`.
    """

    before: str
    after: str
    metric: str
    max_tokens: int
    is_chat: bool = True
    is_one_line: bool = False


_PASSAGES = Dataset(
    before="Several passages follow; a question about them comes after the last one.",
    after=(
        "Use the passages above. Reply with nothing but the answer, in as few words as it takes.\n"
        "\nQuestion: {input}"
    ),
    metric="f1",
    max_tokens=32,
)
DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset(
        before="Below is a whole story: a book, or the script of a film.",
        after="From the story, answer in a short phrase; explain nothing.\n\nQuestion: {input}",
        metric="f1",
        max_tokens=128,
    ),
    "qasper": Dataset(
        before="Below is a research paper.",
        after=(
            'Answer from the paper, in a phrase or at most one sentence: with "yes" or "no" if that'
            ' is what is asked, with "unanswerable" if the paper does not tell.\n'
            "\nQuestion: {input}"
        ),
        metric="f1",
        max_tokens=128,
    ),
    "multifieldqa_en": Dataset(
        before="Below is a long text.",
        after="Answer briefly from the text, and say nothing else.\n\nQuestion: {input}",
        metric="f1",
        max_tokens=64,
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": Dataset(
        before="Below is a report by a public office.",
        after="Summarise this report in about a page.",
        metric="rouge_l",
        max_tokens=512,
    ),
    "qmsum": Dataset(
        before="Below is the record of a meeting.",
        after="From this record, answer in one or a few sentences.\n\nRequest: {input}",
        metric="rouge_l",
        max_tokens=512,
    ),
    "multi_news": Dataset(
        before="Below are several articles from the news.",
        after="Summarise all of these articles together in about a page.",
        metric="rouge_l",
        max_tokens=512,
    ),
    "trec": Dataset(
        before="Each question is followed by its type. Name the type of the last question.\n\n",
        after="\n{input}",
        metric="classification",
        max_tokens=64,
        is_chat=False,
        is_one_line=True,
    ),
    "triviaqa": Dataset(
        before=(
            "Each question is about the passage before it, and its answer is as short as can be. "
            "Answer the last question in the same way.\n\n"
        ),
        after="\n\n{input}",
        metric="f1",
        max_tokens=32,
        is_chat=False,
        is_one_line=True,
    ),
    "samsum": Dataset(
        before=(
            "Each dialogue is followed by a summary of a few short sentences. Summarise the last "
            "dialogue in the same way.\n\n"
        ),
        after="\n\n{input}",
        metric="rouge_l",
        max_tokens=128,
        is_chat=False,
        is_one_line=True,
    ),
    "passage_count": Dataset(
        before="The paragraphs below come from an encyclopedia; some stand there more than once.",
        after=(
            "How many different paragraphs are there, if each is counted once? Reply with that "
            "number and nothing else."
        ),
        metric="number",
        max_tokens=32,
    ),
    "passage_retrieval_en": Dataset(
        before="Thirty numbered paragraphs follow, and after them the summary of one.",
        after=(
            "Summary: {input}\n\nWhich of the paragraphs does it summarise? Reply in the form "
            '"Paragraph 7", and with nothing else.'
        ),
        metric="number",
        max_tokens=32,
    ),
    "lcc": Dataset(
        before="Write the line that comes next in this code.\n\n",
        after="The next line:\n",
        metric="code_similarity",
        max_tokens=64,
        is_chat=False,
    ),
    "repobench-p": Dataset(
        before="Write the line that comes next in the last file of this code.\n\n",
        after="{input}The next line:\n",
        metric="code_similarity",
        max_tokens=64,
        is_chat=False,
    ),
}
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


def read_files(data: Path, subtasks: Sequence[str] | None) -> list[ExampleFile]:
    """One file, or those of a folder: the requested ones, or all that can be scored.

    If a folder has a dataset of both LongBench and LongBench-E, LongBench's is read. Raises
    `ConfigError`.
    """
    if not data.exists():
        raise ConfigError(f"data={data}: No such file or directory")
    if not data.is_dir():
        names = [data.stem]
        for name in subtasks or ():
            if name != data.stem:
                raise ConfigError(f"subtasks={name}: must be {data.stem}, the name of the file")
    elif subtasks is not None:
        names = list(subtasks)
    else:
        names = [n for n in DATASETS if _path(data, n).exists()]
        names = names or [f"{n}_e" for n in DATASETS if _path(data, f"{n}_e").exists()]
        if not names:
            raise ConfigError(
                f"data={data}: has no file named after a dataset, such as hotpotqa.jsonl"
            )
    for name in names:
        find_dataset(name)
    return [read_file(_path(data, name) if data.is_dir() else data, name) for name in names]


def find_dataset(name: str) -> Dataset:
    """Find a dataset by name. Raises `ConfigError` if it is unknown or Chinese."""
    if name in CHINESE:
        raise ConfigError(f"subtasks={name}: Chinese datasets are not scored")
    dataset = DATASETS.get(name.removesuffix("_e"))
    if dataset is None:
        raise ConfigError(
            f"subtasks={name}: no dataset of LongBench; must be among {', '.join(DATASETS)}"
        )
    return dataset


def read_file(path: Path, name: str) -> ExampleFile:
    dataset = find_dataset(name)
    records, digest = read_records(path)
    cases = {record.number: read_case(record, dataset) for record in records}
    return ExampleFile(subtask=name, path=path, digest=digest, cases=cases)


def read_case(record: Record, dataset: Dataset) -> FileExample:
    context, question = record.text("context"), record.text("input")
    gap = "\n\n" if dataset.is_chat else ""
    answers = read_answers(record, dataset.metric)
    labels = record.texts("all_classes") if dataset.metric == "classification" else ()
    for answer in answers if labels else ():
        if answer not in labels:
            raise record.error("answers", f"must be among all_classes, {len(labels)} labels")
    return FileExample(
        document=f"{dataset.before}{gap}{context}",
        task=dataset.after.replace("{input}", question),
        question=question if question.strip() else dataset.after,
        answers=answers,
        metric=dataset.metric,
        max_tokens=dataset.max_tokens,
        labels=labels,
        is_chat=dataset.is_chat,
        is_one_line=dataset.is_one_line,
    )


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"
