"""Facts and questions that share no content word, so that one must infer the answer.

`{name}` is a person. Each fact has one question, and no fact answers the question of another.
"""

from __future__ import annotations

NAMES: tuple[str, ...] = (
    *("Henrik", "Yasmin", "Bruno", "Odile", "Tomas", "Priya", "Gustav", "Leila", "Marek"),
    *("Saskia", "Anton", "Freya", "Diego", "Noemi", "Rasmus", "Valeria", "Kenji", "Astrid"),
)

PAIRS: tuple[tuple[str, str], ...] = (
    (
        "{name} has photographed the Eiffel Tower from its own stairs.",
        "Which character has been to Paris?",
    ),
    (
        "{name} once climbed the Great Pyramid at sunrise.",
        "Which character has been to Egypt?",
    ),
    (
        "{name} got lost between the Colosseum and the Vatican.",
        "Which character has visited Rome?",
    ),
    (
        "{name} took a boat to the Statue of Liberty last summer.",
        "Which character has been to New York?",
    ),
    ("{name} walked along the Great Wall for three days.", "Which character has been to China?"),
    (
        "{name} fed the pigeons in front of Big Ben.",
        "Which character has been to London?",
    ),
    ("{name} bathed in the Dead Sea and could not sink.", "Which character has been to Israel?"),
    (
        "{name} saw kangaroos from the terrace of the Sydney Opera House.",
        "Which character has been to Australia?",
    ),
    (
        "{name} never eats meat, fish or sausages.",
        "Which character is a vegetarian?",
    ),
    (
        "{name} gets a rash and can hardly breathe when a kitten is near.",
        "Which character is allergic to cats?",
    ),
    (
        "{name} spends the night shift on the ward, bandaging wounds.",
        "Which character works as a nurse?",
    ),
    (
        "{name} fills cavities and pulls molars all day.",
        "Which character is a dentist?",
    ),
    (
        "{name} gets up at two to knead dough for the morning rolls.",
        "Which character is a baker?",
    ),
    (
        "{name} lands an Airbus in Frankfurt twice a week.",
        "Which character is a pilot?",
    ),
    (
        "{name} milks forty cows before breakfast.",
        "Which character is a farmer?",
    ),
    (
        "{name} defends the accused before the jury.",
        "Which character is a lawyer?",
    ),
    (
        "{name} practises Chopin's nocturnes every evening.",
        "Which character can play the piano?",
    ),
    (
        "{name} crossed the Channel in nothing but a bathing suit and goggles.",
        "Which character is a strong swimmer?",
    ),
    (
        "{name} needs a white cane to cross the street.",
        "Which character is blind?",
    ),
    (
        "{name} reads lips, since no sound gets through.",
        "Which character is deaf?",
    ),
    (
        "{name} said yes in front of the altar in June.",
        "Which character got married?",
    ),
    (
        "{name} checkmated the grandmaster in nineteen moves.",
        "Which character is good at chess?",
    ),
    (
        "{name} was carried off the slope with a broken binding and one pole.",
        "Which character had a skiing accident?",
    ),
    (
        "{name} blew out eighteen candles yesterday.",
        "Which character had a birthday?",
    ),
    (
        "{name} speaks with the neighbours in Lisbon without a dictionary.",
        "Which character knows Portuguese?",
    ),
    (
        "{name} has hives behind the house and sells what is in the combs.",
        "Which character makes honey?",
    ),
    (
        "{name} looks at Saturn's rings through a telescope each clear night.",
        "Which character is interested in astronomy?",
    ),
    (
        "{name} won the lottery and bought three castles.",
        "Which character is rich?",
    ),
)
