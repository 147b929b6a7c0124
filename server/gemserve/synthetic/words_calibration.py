"""The natural vocabulary that calibration chooses by. No other one shares an entry with it."""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Numbers, Relation, Vocabulary, full_names, split

_NUMBERS = Numbers(0)
_ROOMS = split(
    "pantry, attic, greenhouse, workshop, chapel, cellar, laundry room, stable, guest room, "
    "bakery, smithy, dairy, tannery, henhouse, cloakroom, sewing room"
)
_CITIES = split(
    "Lisbon, Toronto, Bergen, Krakow, Dublin, Naples, Seville, Vienna, Geneva, Hamburg, Kyoto, "
    "Denver, Cairo"
)
_PEOPLE = full_names(
    "Anna, Peter, Lucia, Martin, Sofia, Daniel, Clara, Oscar, Nora, Felix, Irene, Victor",
    "Hoffman, Keller, Rossi, Novak, Barton, Dupont, Silva, Larsen, Moreau, Fischer, Quinn, Walsh",
)

_PLACES: Vocabulary = (
    Relation(
        kind="place",
        subjects=split(
            "copper kettle, sewing machine, leather suitcase, spare blanket, garden rake, "
            "chess set, oil lamp, bread knife, silver tray, wicker basket, butter churn"
        ),
        values=_ROOMS,
        statements=(
            "The {s} is stored in the {v}.",
            "You will find the {s} in the {v}, next to the window.",
            "Since last winter the {s} has been standing in the {v}.",
            "It was decided that the {s} should stay in the {v}.",
        ),
        questions=(
            "Where is the {s} stored?",
            "Where can I find the {s}?",
            "In which room is the {s}?",
        ),
    ),
    Relation(
        kind="place",
        subjects=split(
            "choir practice, pottery class, village meeting, spring fair, wedding dinner, "
            "puppet show, poetry evening, dance lesson, flower auction, cooking contest"
        ),
        values=_ROOMS,
        statements=(
            "The {s} takes place in the {v}.",
            "This year the {s} will be held in the {v}.",
            "Everyone who comes to the {s} should go straight to the {v}.",
        ),
        questions=(
            "Where does the {s} take place?",
            "Where will the {s} be held?",
        ),
    ),
    Relation(
        kind="place",
        subjects=split(
            "wedding ring, love letter, ruby necklace, old will, treasure map, gold coin, "
            "family bible, secret recipe, pearl earring, stolen painting"
        ),
        values=_ROOMS,
        statements=(
            "The {s} was hidden in the {v}.",
            "Nobody knew that the {s} had been hidden in the {v}.",
            "Before the war, grandmother hid the {s} in the {v}.",
        ),
        questions=(
            "Where was the {s} hidden?",
            "Which place was the {s} hidden in?",
        ),
    ),
    Relation(
        kind="place",
        subjects=split(
            "steam engine, church organ, blue carpet, brass telescope, wooden carousel, "
            "racing yacht, stage curtain, printing press, crystal chandelier, carved altar"
        ),
        values=_CITIES,
        statements=(
            "The {s} was made in {v}.",
            "The {s} came from a factory in {v}.",
            "As far as anyone remembers, the {s} was brought here from {v}.",
        ),
        questions=(
            "Which city does the {s} come from?",
            "From which city did the {s} come?",
        ),
    ),
)

_PERSONS: Vocabulary = (
    Relation(
        kind="person",
        subjects=split(
            "old mill, post office, town museum, fire station, railway station, courthouse, "
            "cinema, village inn, harbour office, sawmill"
        ),
        values=_PEOPLE,
        statements=(
            "The roof of the {s} was repaired by {v}.",
            "After the storm, {v} repaired the roof of the {s}.",
            "It was {v} who repaired the roof of the {s}.",
        ),
        questions=(
            "Who repaired the roof of the {s}?",
            "Who was it that repaired the roof of the {s}?",
        ),
    ),
    Relation(
        kind="person",
        subjects=split(
            "best apple pie, longest jump, finest drawing, heaviest pumpkin, fastest swim, "
            "funniest story, tallest sunflower, prettiest kite, loudest whistle"
        ),
        values=_PEOPLE,
        statements=(
            "The prize for the {s} went to {v}.",
            "The judges gave {v} the prize for the {s}.",
            "With a proud smile {v} accepted the prize for the {s}.",
        ),
        questions=(
            "Who won the prize for the {s}?",
            "Who got the prize for the {s}?",
        ),
    ),
    Relation(
        kind="person",
        subjects=split(
            "geometry, Latin, botany, book binding, swimming, philosophy, archery, carpentry, "
            "astronomy, singing"
        ),
        values=_PEOPLE,
        statements=(
            "At the evening school {v} teaches {s}.",
            "The lessons in {s} are given by {v}.",
            "{v} has taught {s} for many years.",
        ),
        questions=("Who teaches {s}?", "Who is the teacher of {s}?"),
    ),
    Relation(
        kind="person",
        subjects=split(
            "red bicycle, grey pony, green caravan, little sailing boat, black motorcycle, "
            "stone cottage, apple orchard, yellow tractor, brown spaniel"
        ),
        values=_PEOPLE,
        statements=(
            "The {s} belongs to {v}.",
            "{v} bought the {s} and still owns it.",
            "Everybody in the street knows that {v} is the owner of the {s}.",
        ),
        questions=("Who owns the {s}?", "Whom does the {s} belong to?"),
    ),
)

_FIGURES: Vocabulary = (
    Relation(
        kind="number",
        subjects=split(
            "Florence, Munich, Warsaw, Brussels, Marseille, Leipzig, Granada, Basel, Innsbruck, "
            "Utrecht, Genoa"
        ),
        values=_NUMBERS.times(),
        statements=(
            "The train to {s} departs at {v}.",
            "On weekdays the train to {s} departs at {v} from the main platform.",
            "Travellers should know that the train for {s} leaves the station at {v}.",
        ),
        questions=(
            "At what time does the train to {s} depart?",
            "When does the train to {s} leave?",
        ),
    ),
    Relation(
        kind="number",
        subjects=split(
            "velvet armchair, wool coat, electric stove, tennis racket, marble clock, fur hat, "
            "rocking horse, camping tent, pocket watch, garden swing"
        ),
        values=_NUMBERS.between(100, 990),
        statements=(
            "The {s} costs {v} dollars.",
            "The price of the {s} is {v} dollars.",
            "In the shop on the corner the {s} was offered for {v} dollars.",
        ),
        questions=("How much does the {s} cost?", "What is the price of the {s}?"),
    ),
    Relation(
        kind="number",
        subjects=split(
            "chess club, rowing club, brass band, village choir, gardening society, hiking group, "
            "theatre company, football team, reading circle"
        ),
        values=_NUMBERS.between(25, 400),
        statements=(
            "The {s} has {v} members.",
            "At the last count the {s} had {v} members.",
            "There are {v} members in the {s}.",
        ),
        questions=("How many members does the {s} have?", "How many members are in the {s}?"),
    ),
    Relation(
        kind="number",
        subjects=split(
            "glass factory, sugar refinery, girls' school, city bank, shipping company, "
            "botanical garden, medical college, silk market, orphanage, zoo"
        ),
        values=_NUMBERS.between(1600, 1950),
        statements=(
            "The {s} was founded in {v}.",
            "In the year {v} the {s} was founded by a group of citizens.",
            "The {s} goes back to the year {v}, when it was founded.",
        ),
        questions=("In what year was the {s} founded?", "When was the {s} founded?"),
    ),
)

_CLAUSES: Vocabulary = (
    Relation(
        kind="clause",
        subjects=split(
            "concert, public lecture, summer ball, fashion show, piano recital, book reading, "
            "magic show, folk dance, charity dinner"
        ),
        values=split(
            "singer had lost her voice, hall was flooded, tickets were never printed, "
            "lights stopped working, guests missed their train, stage was too small, "
            "organist had broken his arm, mayor fell ill, heating had failed"
        ),
        statements=(
            "The {s} was cancelled because the {v}.",
            "At the last minute the {s} was cancelled because the {v}.",
            "To everyone's regret the {s} was cancelled because the {v}.",
        ),
        questions=(
            "Why was the {s} cancelled?",
            "What was the reason that the {s} was cancelled?",
        ),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "gardener, cook, night guard, housekeeper, farm boy, young servant, innkeeper, "
            "coachman, washerwoman"
        ),
        values=split(
            "feed the rabbits, sweep the courtyard, light the stoves, polish the silver spoons, "
            "fetch water from the well, open all the shutters, count the sheep, "
            "water the roses, wind up the clocks"
        ),
        statements=(
            "Before sunrise the {s} has to {v}.",
            "Every morning the {s} has to {v} before sunrise.",
            "It is the duty of the {s} to {v} before sunrise.",
        ),
        questions=(
            "What does the {s} have to do before sunrise?",
            "What must the {s} do before sunrise?",
        ),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "white stallion, new racing car, folding ladder, snow plough, fishing boat, "
            "paper lantern, mountain bicycle, wooden wheelchair"
        ),
        values=split(
            "gentle manner, low weight, bright colours, quiet motor, strong frame, "
            "simple design, clever brakes, smooth surface, long life"
        ),
        statements=(
            "The {s} was praised for its {v}.",
            "In the newspaper the {s} was praised for its {v}.",
            "Visitors praised the {s} because of its {v}.",
        ),
        questions=("What was the {s} praised for?", "What did people praise about the {s}?"),
    ),
)

CALIBRATION: Vocabulary = _PLACES + _PERSONS + _FIGURES + _CLAUSES
