"""The natural vocabulary that confirms what calibration chose. No other one shares an entry."""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Numbers, Relation, Vocabulary, full_names, split

_NUMBERS = Numbers(1)
_ROOMS = split(
    "loft, barn, conservatory, vestry, wine shop, nursery, kitchen, lodge, windmill, brewery, "
    "cloister, garage, dining hall, summer house, watchtower, scullery"
)
_CITIES = split(
    "Oslo, Madrid, Prague, Boston, Venice, Athens, Montreal, Zurich, Lyon, Rotterdam, Osaka, "
    "Chicago, Lima"
)
_PEOPLE = full_names(
    "Helen, Samuel, Elena, Thomas, Julia, Simon, Laura, Hugo, Emma, Robert, Teresa, Arthur",
    "Bergman, Costa, Murphy, Jansen, Romero, Weber, Olsen, Grant, Petrov, Leclerc, Sato, Bennett",
)

_PLACES: Vocabulary = (
    Relation(
        kind="place",
        subjects=split(
            "parrot, tortoise, white cat, sheepdog, goldfish, canary, black goat, hedgehog, "
            "grey donkey, tame fox"
        ),
        values=_ROOMS,
        statements=(
            "The {s} sleeps in the {v}.",
            "At night the {s} always sleeps in the {v}.",
            "When it gets dark, the {s} goes to the {v} to sleep.",
        ),
        questions=("Where does the {s} sleep?", "Where does the {s} spend the night?"),
    ),
    Relation(
        kind="place",
        subjects=split(
            "umbrella, passport, fur coat, walking stick, straw hat, camera, purse, notebook, "
            "pair of glasses, wool scarf"
        ),
        values=_ROOMS,
        statements=(
            "My uncle left the {s} in the {v}.",
            "The {s} was forgotten in the {v} after the party.",
            "Someone must have left the {s} in the {v} yesterday.",
        ),
        questions=("Where was the {s} left?", "Where did somebody leave the {s}?"),
    ),
    Relation(
        kind="place",
        subjects=split(
            "new fireplace, tile stove, marble bath, long mirror, oak table, iron staircase, "
            "round window, grand piano, billiard table"
        ),
        values=_ROOMS,
        statements=(
            "The {s} was installed in the {v}.",
            "Two workers carried the {s} into the {v} and installed it there.",
            "According to the plan, the {s} was to be installed in the {v}.",
        ),
        questions=("Where was the {s} installed?", "In which room was the {s} installed?"),
    ),
    Relation(
        kind="place",
        subjects=split(
            "violin teacher, young dentist, tall sailor, retired judge, famous chemist, "
            "shy poet, rich banker, new priest, kind nurse, strict professor"
        ),
        values=_CITIES,
        statements=(
            "The {s} was born in {v}.",
            "The {s} comes from {v}, where she was born.",
            "Although few people know it, {v} is where the {s} was born.",
        ),
        questions=("Where was the {s} born?", "What is the birthplace of the {s}?"),
    ),
)

_PERSONS: Vocabulary = (
    Relation(
        kind="person",
        subjects=split(
            "lonely shepherd, silver river, sleeping giant, broken mirror, three sisters, "
            "golden fish, wandering star, winter rose, drunken sailor"
        ),
        values=_PEOPLE,
        statements=(
            "The song about the {s} was written by {v}.",
            "{v} wrote the song about the {s} in a single night.",
            "The song about the {s} is a work of {v}.",
        ),
        questions=(
            "Who wrote the song about the {s}?",
            "Who is the author of the song about the {s}?",
        ),
    ),
    Relation(
        kind="person",
        subjects=split(
            "Morning Star, Sea Eagle, Blue Dolphin, Northern Light, Ocean Queen, Wild Goose, "
            "Flying Fish, Silver Arrow, Brave Heart"
        ),
        values=_PEOPLE,
        statements=(
            "The captain of the {s} is {v}.",
            "For the last six years {v} has been the captain of the {s}.",
            "{v} became captain of the {s} in spring.",
        ),
        questions=("Who is the captain of the {s}?", "What is the name of the captain of the {s}?"),
    ),
    Relation(
        kind="person",
        subjects=split(
            "hidden waterfall, Roman coins, cave paintings, rare orchid, ancient temple, "
            "underground lake, whale skeleton, sunken ship, copper mine"
        ),
        values=_PEOPLE,
        statements=(
            "It is said that {v} discovered the {s}.",
            "The discovery of the {s} was made by {v}.",
            "While walking in the hills, {v} discovered the {s}.",
        ),
        questions=("Who discovered the {s}?", "Who made the discovery of the {s}?"),
    ),
    Relation(
        kind="person",
        subjects=split(
            "rose garden, twin babies, beehives, fire horses, palace carpets, bell tower, "
            "goat herd, fountain, fruit trees"
        ),
        values=_PEOPLE,
        statements=(
            "{v} looks after the {s}.",
            "The person who takes care of the {s} is {v}.",
            "The care of the {s} was left to {v}.",
        ),
        questions=("Who looks after the {s}?", "Who takes care of the {s}?"),
    ),
)

_FIGURES: Vocabulary = (
    Relation(
        kind="number",
        subjects=split(
            "fish market, pharmacy, flower shop, barber shop, toy store, public bath, "
            "ticket office, savings bank, pastry shop, tailor's shop"
        ),
        values=_NUMBERS.times(),
        statements=(
            "The {s} opens at {v}.",
            "Every day except Sunday the {s} opens its doors at {v}.",
            "From {v} on, the {s} is open.",
        ),
        questions=("At what time does the {s} open?", "When does the {s} open?"),
    ),
    Relation(
        kind="number",
        subjects=split(
            "town wall, school bus, water pump, elevator, garden fence, church bell, ice rink, "
            "street lamps, drawbridge"
        ),
        values=_NUMBERS.between(100, 990),
        statements=(
            "The repair of the {s} cost {v} euros.",
            "The town paid {v} euros for the repair of the {s}.",
            "To repair the {s}, {v} euros were needed.",
        ),
        questions=(
            "How much did the repair of the {s} cost?",
            "What was the cost of repairing the {s}?",
        ),
    ),
    Relation(
        kind="number",
        subjects=split(
            "wooden pier, railway tunnel, main street, hedge maze, canal lock, rope bridge, "
            "castle moat, airport runway, city park"
        ),
        values=_NUMBERS.between(30, 900),
        statements=(
            "The {s} is {v} metres long.",
            "From end to end the {s} measures {v} metres.",
            "The length of the {s} is {v} metres.",
        ),
        questions=("How long is the {s}?", "How many metres long is the {s}?"),
    ),
    Relation(
        kind="number",
        subjects=split(
            "harvest opera, spring symphony, moonlight ballet, peasant cantata, carnival waltz, "
            "forest suite, royal march, fairy tale operetta"
        ),
        values=_NUMBERS.between(1600, 1950),
        statements=(
            "The {s} was first performed in {v}.",
            "The first performance of the {s} was in the year {v}.",
            "In {v} an audience heard the {s} for the first time.",
        ),
        questions=(
            "In what year was the {s} first performed?",
            "When was the first performance of the {s}?",
        ),
    ),
)

_CLAUSES: Vocabulary = (
    Relation(
        kind="clause",
        subjects=split(
            "school trip, boat race, art exam, garden party, horse show, bicycle tour, "
            "film evening, council vote, tennis final"
        ),
        values=split(
            "bus driver was on holiday, river had frozen, paper had run out, "
            "grass was still wet, judges had the flu, road was blocked by snow, "
            "projector had burned out, key could not be found, rain did not stop"
        ),
        statements=(
            "The {s} was moved to Monday because the {v}.",
            "In the end the {s} was moved to Monday because the {v}.",
            "They moved the {s} to Monday because the {v}.",
        ),
        questions=(
            "Why was the {s} moved to Monday?",
            "For what reason was the {s} moved to Monday?",
        ),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "blacksmith, librarian, chief engineer, widow, postmaster, ferryman, watchmaker, "
            "old soldier, schoolmaster"
        ),
        values=split(
            "play cards with friends, walk along the beach, bake cherry cakes, "
            "paint small landscapes, listen to the radio, repair old umbrellas, "
            "collect wild mushrooms, write long letters, sing in the pub"
        ),
        statements=(
            "On Fridays the {s} likes to {v}.",
            "What the {s} likes to do on Fridays is {v}.",
            "When Friday comes, the {s} likes nothing better than to {v}.",
        ),
        questions=("What does the {s} like to do on Fridays?", "What does the {s} do on Fridays?"),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "doctor's house, parish church, toll house, hunting cabin, customs office, "
            "baker's van, pirate ship, royal coach"
        ),
        values=split(
            "crooked iron chimney, bright red door, broken weather vane, blue striped roof, "
            "row of stone lions, painted wooden shutters, huge golden star, two copper bells"
        ),
        statements=(
            "The {s} can be recognised by its {v}.",
            "You recognise the {s} by its {v}.",
            "Strangers easily recognise the {s}, thanks to its {v}.",
        ),
        questions=(
            "By what can the {s} be recognised?",
            "How can you recognise the {s}?",
        ),
    ),
)

CONFIRMATION: Vocabulary = _PLACES + _PERSONS + _FIGURES + _CLAUSES
