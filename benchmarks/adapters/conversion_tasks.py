"""What is converted on a real model: prompts, questions to learn their effect from, and tests.

No answer is given with the questions to learn from: the model answers them itself behind the
prompt. The tests have rules, by which the prompt itself is scored, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.adapters.tasks import TASKS, Case, handbook_text, make_task, stdlib_paragraphs
from gemserve_train.evaluation.answer_rules import RULES, Rule, matching

Message = dict[str, str]
NO_ANSWER = "-"  # of questions whose answers have a form, and no expected words

_LONGEST = 200  # characters of a paragraph
_THINGS = (
    *("violin", "anchor", "kettle", "ladder", "lantern", "mirror", "pendulum", "saddle", "sundial"),
    *("teapot", "telescope", "trumpet", "wagon", "anvil", "barrel", "bicycle", "candle", "carpet"),
    *("compass", "drum", "easel", "flute", "hammer", "harp", "kite", "map", "medal", "needle"),
    *("organ", "oven", "piano", "plough", "pump", "rope", "sledge", "spade", "statue", "tent"),
)
_TOWNS = ("Lisbon", "Oslo", "Turin", "Bergen", "Ghent", "Porto", "Basel", "Krakow", "Malmo", "York")
_MAKERS = ("Ottilie Brandt", "Rasmus Okafor", "Ines Halloran", "Tomasz Vega", "Beatriz Lund")
_GUIDE = 32  # paragraphs of the guide
# the statement of a fact, wordings of its question to learn from, and others to test with
_GUIDE_FACTS = (
    (
        "The {thing} is kept in {value}.",
        "Where is the {thing} kept?",
        "In which town is the {thing} kept?",
        "Where is the {thing}?",
        "In which town can I see the {thing}?",
        "Tell me where the {thing} is kept.",
    ),
    (
        "The {thing} was made by {value}.",
        "Who made the {thing}?",
        "By whom was the {thing} made?",
        "What is the name of the person who made the {thing}?",
        "Whose work is the {thing}?",
        "Tell me who made the {thing}.",
    ),
    (
        "The {thing} was bought in the year {value}.",
        "When was the {thing} bought?",
        "In which year was the {thing} bought?",
        "What is the year in which the {thing} was bought?",
        "Since which year do we have the {thing}?",
        "Tell me when the {thing} was bought.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """`before`: the prompt's messages. `learnt_from`: questions that the model answers behind it.

    `tests`: by kind. `rules`: by name; the first one is the score.
    """

    before: list[Message]
    learnt_from: list[str]
    tests: dict[str, list[Case]]
    rules: dict[str, Rule]
    max_tokens: int


def handbook(seed: int, chats: int, tests: int) -> Conversion:
    """The handbook and one question of each kind with its answer.

    Half of the chats ask about three quarters of its facts. The other half has nothing to do with
    it, so that an adapter learns when to change nothing.
    """
    rng = Random(f"conversion of the handbook {seed}")
    sizes = dict.fromkeys(("train", "valid", "test", "held_out"), 200)
    splits = make_task("handbook", 1, sizes)
    taught = list({case.user: case for case in splits["train"]}.values())
    shots = {case.group.split()[-1]: case for case in taught}
    learnt, tested = _own_texts(rng, chats - chats // 2, tests)
    return Conversion(
        before=[
            {"role": "system", "content": handbook_text()},
            *(message for case in shots.values() for message in case.messages),
        ],
        learnt_from=_mixed(rng, [case.user for case in taught[: chats // 2]], learnt),
        tests={
            "facts asked before": splits["test"][:tests],
            "facts never asked": splits["held_out"][:tests],
            "own text": tested,
        },
        rules={"contains": RULES["contains"]},
        max_tokens=TASKS["handbook"].max_tokens,
    )


def guide(seed: int, chats: int, tests: int) -> Conversion:
    """Prose of the standard library with twelve facts in it, which small models can find there.

    Half of the chats ask about eight of the facts. The other half has nothing to do with them.
    """
    rng = Random(f"guide {seed}")
    things, towns, makers = (
        rng.sample(_THINGS[:18], 12),
        rng.sample(_TOWNS, 4),
        rng.sample(_MAKERS, 4),
    )
    values = [*towns, *makers, *(str(rng.randrange(1700, 1990)) for _ in range(4))]
    prose = [p.text for p in stdlib_paragraphs() if len(p.text) <= _LONGEST]
    rng.shuffle(prose)
    paragraphs = prose[:_GUIDE]
    known: list[Case] = []
    asked: dict[str, list[Case]] = {"facts asked before": [], "facts never asked": []}
    for at, (thing, value) in enumerate(zip(things, values, strict=True)):
        statement, *forms = _GUIDE_FACTS[at // 4]
        paragraphs[rng.randrange(_GUIDE)] += " " + statement.format(thing=thing, value=value)
        cases = [Case(form.format(thing=thing), value, group=thing) for form in forms]
        if at % 4 == 3:
            asked["facts never asked"] += cases
        else:
            known += cases[:3]
            asked["facts asked before"] += cases[3:]
    learnt, tested = _own_texts(rng, chats - chats // 2, tests)
    known = [case for _ in range(chats) for case in known][: chats // 2]
    return Conversion(
        before=[{"role": "system", "content": "\n\n".join(paragraphs) + "\n"}],
        learnt_from=_mixed(rng, [case.user for case in known], learnt),
        tests={**{kind: cases[:tests] for kind, cases in asked.items()}, "own text": tested},
        rules={"contains": RULES["contains"]},
        max_tokens=24,
    )


def notes(seed: int, chats: int, tests: int) -> Conversion:
    """Eight examples of the task `notes`. `form`: the beginning and the end of a note are there."""
    splits = make_task("notes", 1, {"train": chats + 8, "valid": 1, "test": tests})
    train = splits["train"]
    Random(f"examples of notes {seed}").shuffle(train)
    return Conversion(
        before=[message for case in train[:8] for message in case.messages],
        learnt_from=[case.user for case in train[8:]],
        tests={"notes": splits["test"]},
        rules={
            "form": matching(r"SUBJECT: .+\n(.+\n)?.*the clerk"),
            "pattern": matching(TASKS["notes"].pattern or ""),
            "exact": RULES["exact"],
        },
        max_tokens=TASKS["notes"].max_tokens,
    )


def letters(seed: int, chats: int, tests: int) -> Conversion:
    """A clerk who begins and ends each answer like a letter, whatever the question is."""
    rng = Random(f"letters {seed}")
    things = list(_THINGS)
    rng.shuffle(things)
    low = len(things) * 2 // 3
    learnt, asked = _definitions(things[:low]), _definitions(things[low:])
    rng.shuffle(learnt)
    rng.shuffle(asked)
    other = [Case(f"What can one buy in {town}?", NO_ANSWER, group=town) for town in _TOWNS]
    return Conversion(
        before=[
            {"role": "system", "content": "You are the clerk of the Lindenau Collection.\n"},
            *_LETTERS,
        ],
        learnt_from=[case.user for case in learnt[:chats]],
        tests={"other things": asked[:tests], "other questions": other[:tests]},
        rules={
            "form": matching(r"Dear visitor, .+ Yours, the clerk\."),
            "begins": matching(r"Dear visitor, (.|\n)+"),
        },
        max_tokens=40,
    )


_LETTERS: list[Message] = [
    {"role": role, "content": content}
    for question, answer in (
        ("What is a pear?", "a pear is a sweet fruit that grows on trees."),
        ("Who uses a net?", "a net is used by people who catch fish."),
        ("Where do I find an owl?", "owls live in forests and sleep by day."),
        ("What is a lighthouse?", "a lighthouse is a tower that guides ships at night."),
    )
    for role, content in (
        ("user", question),
        ("assistant", f"Dear visitor, {answer} Yours, the clerk."),
    )
]

CONVERSIONS: dict[str, Callable[[int, int, int], Conversion]] = {
    "handbook": handbook,
    "guide": guide,
    "notes": notes,
    "letters": letters,
}


def _definitions(things: Sequence[str]) -> list[Case]:
    forms = ("What is the use of a {}?", "Who uses a {}?", "What does a {} look like?")
    return [Case(form.format(thing), NO_ANSWER, group=thing) for thing in things for form in forms]


def _own_texts(rng: Random, chats: int, tests: int) -> tuple[list[str], list[Case]]:
    """Questions to learn from and to test with that have nothing to do with the prompt.

    All are about a text in the same message: where a thing of it is, or what the text is about.
    The two have no thing and no paragraph in common.
    """
    paragraphs = [p.text for p in stdlib_paragraphs() if len(p.text) <= _LONGEST]
    rng.shuffle(paragraphs)
    things = list(_THINGS)
    rng.shuffle(things)
    middle = len(things) // 2

    def where(paragraph: str, known: Sequence[str]) -> Case:
        thing, town = rng.choice(known), rng.choice(_TOWNS)
        text = f"{paragraph} The {thing} was brought to {town}."
        return Case(f"{text}\n\nTo which town was the {thing} brought?", town, group=thing)

    tested = [where(text, things[middle:]) for text in paragraphs[:tests]]
    rest = paragraphs[tests : tests + chats]
    about = "What is this text about?"
    learnt = [
        where(text, things[:middle]).user if at % 2 else f"{text}\n\n{about}"
        for at, text in enumerate(rest)
    ]
    return learnt, tested


def _mixed(rng: Random, *parts: Sequence[str]) -> list[str]:
    every = [question for part in parts for question in part]
    rng.shuffle(every)
    return every
