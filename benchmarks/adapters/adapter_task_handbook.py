"""The task `handbook`: questions about a handbook of about 1,500 tokens that is not in the prompt.

An adapter has to hold its facts. Each fact has one value and four wordings of its question.
Training sees two of them, and only for three quarters of the facts; `held_out` has the others.
"""

from __future__ import annotations

from random import Random

from benchmarks.adapters.adapter_task_cases import Case

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
_FACTS = (
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
_RULES = (
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


def _values() -> list[tuple[str, dict[str, str]]]:
    rng = Random("handbook")
    codes = rng.sample([f"{a}{b}{n}" for a in "BDFGK" for b in "LMRT" for n in range(10, 100)], 12)
    return [
        (desk, {"keeper": keeper, "place": place, "day": day, "code": code})
        for (desk, keeper, place, day), code in zip(_DESKS, codes, strict=True)
    ]


def handbook_text() -> str:
    """The handbook: a paragraph for each desk, and rules of the house between them."""
    paragraphs = ["Handbook of the Lindenau Collection. It says who is where, and what is allowed."]
    for at, (desk, values) in enumerate(_values()):
        told = [form.format(desk=desk, value=values[name]) for name, form, _, _ in _FACTS]
        rules = [_RULES[(at + step) % len(_RULES)] for step in (0, 2, 5, 7)]
        paragraphs.append(" ".join([*told, *rules]))
    return "\n\n".join(paragraphs) + "\n"


def handbook_cases(rng: Random, sizes: dict[str, int]) -> dict[str, list[Case]]:
    """`train` repeats questions until its size is reached; `held_out` asks about unseen facts."""
    splits: dict[str, list[Case]] = {name: [] for name in ("train", "valid", "test", "held_out")}
    facts = [(desk, name, value) for desk, own in _values() for name, value in own.items()]
    rng.shuffle(facts)
    unseen = set(facts[: len(facts) // 4])
    forms = {name: (taught, asked) for name, _, taught, asked in _FACTS}
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
