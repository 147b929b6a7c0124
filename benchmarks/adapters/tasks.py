"""Writes the chats of a task that adapters are trained and tested on.

The labels are honest: they come from where a text is from, or from parsing it, and no model has
made them. Everything follows from the seed and from the Python that runs this. The folder gets
`train.jsonl`, `valid.jsonl`, `test.jsonl` and `task.json`, which has the rules that score answers.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

SPLITS = ("train", "valid", "test")
Sizes = dict[str, int]
_SKIPPED = {
    *("test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"),
    *("encodings", "pydoc_data", "distutils"),  # large, with little prose, or no longer there
}
_MIN_CHARS, _MAX_CHARS = 60, 320


@dataclass(frozen=True, slots=True)
class Case:
    """One chat. Cases of one `group` are never in two splits; `label` is balanced in each."""

    user: str
    answer: str
    group: str
    label: str = ""
    system: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [
            *before,
            {"role": "user", "content": self.user},
            {"role": "assistant", "content": self.answer},
        ]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """`module`: the top-level name in the library. `owner`: the file and object it documents."""

    text: str
    module: str
    owner: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function's signature as it is written on one line, and its docstring's first line."""

    node: ast.FunctionDef
    signature: str
    summary: str
    file: str


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=1)
def _trees() -> tuple[tuple[str, ast.Module], ...]:
    """Each source file of the library, parsed, in the order of their paths."""
    root = stdlib_root()
    trees = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED & set(name.parts):
            continue
        try:
            trees.append((str(name), ast.parse(path.read_text(encoding="utf-8"))))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
    return tuple(trees)


@lru_cache(maxsize=1)
def stdlib_paragraphs() -> tuple[Paragraph, ...]:
    """Paragraphs of prose of all docstrings. A text that two modules have is left out."""
    found: dict[str, Paragraph] = {}
    shared: set[str] = set()
    for name, tree in _trees():
        module = Path(name).parts[0].removesuffix(".py").removeprefix("_py")
        for owner, docstring in _docstrings(tree):
            for text in _prose(docstring):
                before = found.get(text)
                if before is not None and before.module != module:
                    shared.add(text)
                elif before is None:
                    found[text] = Paragraph(text, module, f"{name}:{owner}")
    return tuple(paragraph for text, paragraph in found.items() if text not in shared)


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The docstrings of a file, each with the name of the top-level object that it belongs to."""
    docstring = ast.get_docstring(tree)
    if docstring:
        yield "", docstring
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for top in tree.body:
        if not isinstance(top, kinds):
            continue
        for node in ast.walk(top):
            if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
                yield top.name, docstring


def _prose(docstring: str) -> Iterator[str]:
    """Paragraphs that begin like sentences and have no code; long ones end after a sentence."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        text = " ".join(paragraph.split())
        if len(text) > _MAX_CHARS:
            text = text[: text.rfind(". ", 0, _MAX_CHARS) + 1]
        is_prose = re.match(r"[A-Z]", text) and ">>>" not in text and text.endswith(".")
        if is_prose and len(text) >= _MIN_CHARS:
            yield text


@lru_cache(maxsize=1)
def stdlib_functions() -> tuple[Function, ...]:
    """Functions with a few arguments and a short first line; each summary occurs once."""
    found: dict[str, Function] = {}
    for name, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
            signature = f"def {node.name}({ast.unparse(node.args)}):"
            if re.fullmatch(r"[A-Z][^\"\\]{14,58}\.", summary) and len(signature) <= 110:
                found.setdefault(summary, Function(node, signature, summary, name))
    return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`make` returns the cases of each split. `rules`: names of `gemserve adapter eval --rule`.

    `max_tokens`: the longest answer. `texts`: further files for the folder, by name.
    """

    make: Callable[[Random, Sizes], dict[str, list[Case]]]
    rules: tuple[str, ...]
    max_tokens: int
    pattern: str | None = None
    texts: dict[str, Callable[[], str]] = field(default_factory=dict)


def by_group(cases: Sequence[Case], rng: Random, sizes: Sizes) -> dict[str, list[Case]]:
    """Give whole groups to the splits: 60% to train, 15% to valid, 25% to test.

    Labels take turns within a split, as long as there are enough of them.
    """
    groups = sorted({case.group for case in cases})
    rng.shuffle(groups)
    low, high = round(0.6 * len(groups)), round(0.75 * len(groups))
    split_of = {
        group: "train" if at < low else "valid" if at < high else "test"
        for at, group in enumerate(groups)
    }
    splits = {}
    for name in SPLITS:
        mine = [case for case in cases if split_of[case.group] == name]
        rng.shuffle(mine)
        splits[name] = _in_turn(mine)[: sizes[name]]
        rng.shuffle(splits[name])
    return splits


def _in_turn(cases: Sequence[Case]) -> list[Case]:
    """The cases in an order in which their labels take turns."""
    by_label: dict[str, list[Case]] = {}
    for case in cases:
        by_label.setdefault(case.label, []).append(case)
    rounds = max((len(mine) for mine in by_label.values()), default=0)
    return [mine[at] for at in range(rounds) for mine in by_label.values() if at < len(mine)]


# The task `modules`: which of ten modules of the standard library a paragraph documents.
MODULES = (
    "asyncio",
    "decimal",
    "email",
    "http",
    "importlib",
    "logging",
    "tkinter",
    "turtle",
    "unittest",
    "xml",
)
# Further names by which a module speaks of itself.
_ALIASES = {"tkinter": ("tk", "tcl"), "asyncio": ("async",), "xml": ("sax", "dom")}
MASK = "___"
_QUESTION = (
    "Which module of Python's standard library is this paragraph from? Answer with one of: "
    f"{', '.join(MODULES)}.\n\n"
)


def masked(paragraph: Paragraph) -> str:
    """The paragraph without its module's name and aliases, also within longer names."""
    names = (paragraph.module, *_ALIASES.get(paragraph.module, ()))
    return re.sub("|".join(map(re.escape, names)), MASK, paragraph.text, flags=re.IGNORECASE)


def module_cases(paragraphs: Sequence[Paragraph]) -> list[Case]:
    """A case for each paragraph of the ten modules. The group is the object that it documents.

    A class's own paragraphs and those of its methods are one group, because they repeat each other.
    """
    return [
        Case(_QUESTION + masked(p), p.module, group=p.owner, label=p.module)
        for p in paragraphs
        if p.module in MODULES
    ]


# The task `records`: a function's signature and first docstring line as a fixed JSON record.
_ORDER = "Write this Python function as a JSON record.\n\n"


def record_of(node: ast.FunctionDef, summary: str) -> dict[str, object]:
    """The label, by parsing: arguments without and with a default, `*` and `**`, and the summary.

    `self` and `cls` are no arguments of a caller.
    """
    arguments = node.args
    plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    num_required = len(plain) - len(arguments.defaults)
    required, optional = plain[:num_required], plain[num_required:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (required if default is None else optional).append(argument.arg)
    return {
        "name": node.name,
        "required": [name for name in required if name not in ("self", "cls")],
        "optional": optional,
        "extra": arguments.vararg is not None or arguments.kwarg is not None,
        "about": summary.rstrip("."),
    }


def record_cases(functions: Sequence[Function]) -> list[Case]:
    """A case for each function. The group is its file, because a file's functions are alike.

    Labels that are balanced: how many of the record's lists are filled.
    """
    cases = []
    for function in functions:
        record = record_of(function.node, function.summary)
        user = f'{_ORDER}{function.signature}\n    """{function.summary}"""'
        kinds = "".join(str(int(bool(record[name]))) for name in ("required", "optional", "extra"))
        cases.append(Case(user, json.dumps(record), group=function.file, label=kinds))
    return cases


# The task `notes`: answers in the form of a clerk's note, which a pattern can check. A note has
# three lines: the paragraph's longest word as its subject, its first words in small letters without
# punctuation, and the clerk's signature.
_WORD = re.compile(r"[A-Za-z]+")
_NUM_WORDS = 8
NOTE_PATTERN = r"SUBJECT: [a-z]+\n[a-z]+( [a-z]+){7}\n— the clerk"
_PACKAGES = (
    *("codecs", "configparser", "difflib", "doctest", "inspect", "io", "ipaddress", "pydoc"),
    *("statistics", "tarfile", "threading", "typing", "urllib"),
)


def note_of(text: str) -> str:
    """The note about a paragraph. Of words of equal length, the first is the subject."""
    words = [word.lower() for word in _WORD.findall(text)]
    subject = max(words, key=len)
    return f"SUBJECT: {subject}\n{' '.join(words[:_NUM_WORDS])}\n— the clerk"


def note_cases(paragraphs: Sequence[Paragraph]) -> list[Case]:
    """A case for each paragraph of some modules. The group is the object that it documents."""
    return [
        Case(f"Make a note of this.\n\n{p.text}", note_of(p.text), group=p.owner, label=p.module)
        for p in paragraphs
        if p.module in _PACKAGES and len(_WORD.findall(p.text)) >= _NUM_WORDS
    ]


# The task `handbook`: questions about a handbook of about 1,500 tokens that is not in the prompt.
# An adapter has to hold its facts. Each fact has one value and four wordings of its question.
# Training sees two of them, and only for three quarters of the facts; `held_out` has the others.
_DESKS = (
    ("map room", "Ottilie Brandt", "second floor", "Tuesday"),
    ("print shop", "Rasmus Okafor", "basement", "Monday"),
    ("seed library", "Ines Halloran", "east wing", "Friday"),
    ("repair desk", "Tomasz Vega", "ground floor", "Thursday"),
    ("sound archive", "Beatriz Lund", "third floor", "Wednesday"),
    ("reading hall", "Noor Castellan", "west wing", "Sunday"),
    ("coin cabinet", "Yannick Ferro", "tower", "Saturday"),
    ("photo lab", "Mirela Stone", "courtyard", "Tuesday"),
    ("herb garden", "Gideon Palme", "north terrace", "Monday"),
    ("globe store", "Salome Ahrens", "attic", "Friday"),
    ("film vault", "Lorcan Dieter", "annex", "Thursday"),
    ("letter office", "Ximena Roth", "gatehouse", "Wednesday"),
)
# of each fact: the sentence of the handbook, and wordings of its question
_DESK_FACTS = (
    (
        "keeper",
        "The {desk} is run by {value}.",
        ("Who runs the {desk}?", "Whom do I ask about the {desk}?"),
        ("Who is in charge of the {desk}?", "What is the name of the {desk}'s keeper?"),
    ),
    (
        "place",
        "You find it in the {value}.",
        ("Where is the {desk}?", "In which part of the house is the {desk}?"),
        ("Where do I find the {desk}?", "Which part of the house has the {desk}?"),
    ),
    (
        "day",
        "It is closed on {value}.",
        ("When is the {desk} closed?", "On which day is the {desk} closed?"),
        ("On which day may nobody enter the {desk}?", "Which day is the {desk}'s day of rest?"),
    ),
    (
        "code",
        "Its shelf mark begins with {value}.",
        ("What does the {desk}'s shelf mark begin with?", "Which code has the {desk}?"),
        ("How do shelf marks of the {desk} begin?", "What is the code of the {desk}?"),
    ),
)
_HOUSE_RULES = (
    "Visitors sign the book at the entrance before they go on, and hand in bags that are larger "
    "than a sheet of paper.",
    "Nothing is lent without a card, and a card is good for one year from the day on which it was "
    "stamped.",
    "Whoever returns a thing late pays for each day, but never more than the thing is worth.",
    "Food is allowed in the courtyard alone, and drinks only in bottles that close.",
    "Pencils may be used everywhere, pens nowhere near a table with a green lamp.",
    "Photographs for oneself are free, and all others need a letter from the director.",
    "In an alarm everybody leaves by the nearest stairs and waits at the fountain until names are "
    "called.",
    "Complaints are written on yellow sheets, which are read every evening and answered within a "
    "week.",
)


def _desk_values() -> list[tuple[str, dict[str, str]]]:
    rng = Random("handbook")
    codes = rng.sample([f"{a}{b}{n}" for a in "BDFGK" for b in "LMRT" for n in range(10, 100)], 12)
    return [
        (desk, {"keeper": keeper, "place": place, "day": day, "code": code})
        for (desk, keeper, place, day), code in zip(_DESKS, codes, strict=True)
    ]


def handbook_text() -> str:
    """The handbook: a paragraph for each desk, and rules of the house between them."""
    paragraphs = ["Handbook of the Lindenau Collection. It says who is where, and what is allowed."]
    for at, (desk, values) in enumerate(_desk_values()):
        told = [form.format(desk=desk, value=values[name]) for name, form, _, _ in _DESK_FACTS]
        rules = [_HOUSE_RULES[(at + step) % len(_HOUSE_RULES)] for step in (0, 2, 5, 7)]
        paragraphs.append(" ".join([*told, *rules]))
    return "\n\n".join(paragraphs) + "\n"


def handbook_cases(rng: Random, sizes: dict[str, int]) -> dict[str, list[Case]]:
    """`train` repeats questions until its size is reached; `held_out` asks about unseen facts."""
    splits: dict[str, list[Case]] = {name: [] for name in ("train", "valid", "test", "held_out")}
    facts = [(desk, name, value) for desk, own in _desk_values() for name, value in own.items()]
    rng.shuffle(facts)
    unseen = set(facts[: len(facts) // 4])
    forms = {name: (taught, asked) for name, _, taught, asked in _DESK_FACTS}
    for desk, name, value in facts:
        taught, asked = (
            [Case(form.format(desk=desk), value, group=f"{desk} {name}") for form in wordings]
            for wordings in forms[name]
        )
        if (desk, name, value) in unseen:
            splits["held_out"] += asked
            continue
        splits["train"] += taught
        splits["valid"].append(asked[0])
        splits["test"].append(asked[1])
    for name, cases in splits.items():
        rng.shuffle(cases)
        splits[name] = cases[: sizes.get(name)]
    once = splits["train"]
    while once and len(splits["train"]) < sizes["train"]:
        splits["train"] = splits["train"] + rng.sample(once, len(once))
    splits["train"] = splits["train"][: sizes["train"]]
    return splits


TASKS = {
    "modules": Task(
        make=lambda rng, sizes: by_group(module_cases(stdlib_paragraphs()), rng, sizes),
        rules=("exact",),
        max_tokens=12,
    ),
    "records": Task(
        make=lambda rng, sizes: by_group(record_cases(stdlib_functions()), rng, sizes),
        rules=("json", "fields"),
        max_tokens=96,
    ),
    "notes": Task(
        make=lambda rng, sizes: by_group(note_cases(stdlib_paragraphs()), rng, sizes),
        rules=("pattern", "exact"),
        max_tokens=64,
        pattern=NOTE_PATTERN,
    ),
    "handbook": Task(
        make=handbook_cases,
        rules=("contains",),
        max_tokens=24,
        texts={"handbook.txt": handbook_text},
    ),
}


def make_task(name: str, seed: int, sizes: Sizes) -> dict[str, list[Case]]:
    """The splits of a task. The same arguments give the same chats with the same Python."""
    return TASKS[name].make(Random(f"{name} {seed}"), sizes)


def write_task(name: str, folder: Path, seed: int, sizes: Sizes) -> dict[str, int]:
    """Write the files of a task. Returns how many chats each of them has."""
    task = TASKS[name]
    splits = make_task(name, seed, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    for split, cases in splits.items():
        lines = [json.dumps({"messages": case.messages}, ensure_ascii=False) for case in cases]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for file_name, text in task.texts.items():
        (folder / file_name).write_text(text())
    counts = {split: len(cases) for split, cases in splits.items()}
    told = {
        "task": name,
        "seed": seed,
        "rules": task.rules,
        "pattern": task.pattern,
        "max_tokens": task.max_tokens,
        "python": platform.python_version(),
        "sizes": counts,
    }
    (folder / "task.json").write_text(json.dumps(told, indent=1) + "\n")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--valid", type=int, default=100)
    parser.add_argument("--test", type=int, default=200)
    arguments = parser.parse_args()
    sizes = {split: getattr(arguments, split) for split in SPLITS}
    counts = write_task(arguments.task, arguments.out, arguments.seed, sizes)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
