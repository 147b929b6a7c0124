"""The natural vocabulary of `gemserve eval`. No other one shares an entry with it."""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Numbers, Relation, Vocabulary, full_names, split

_NUMBERS = Numbers(2)
_ROOMS = split(
    "boathouse, lighthouse, music room, gatehouse, tea house, map room, ice house, coach house, "
    "school hall, ferry office, weaving mill, salt store, town hall, orangery, arsenal, "
    "bell chamber, potting shed, reading room"
)
_CITIES = split(
    "Turin, Helsinki, Valencia, Bremen, Porto, Glasgow, Riga, Antwerp, Salzburg, Trieste, Malmo, "
    "Nairobi, Seattle, Cork"
)
_PEOPLE = full_names(
    "Marta, Ivan, Greta, Leonard, Beatrice, Konrad, Amelia, Stefan, Ingrid, Walter, Rosalind, "
    "Emil, Dorothea, Pavel",
    "Lindqvist, Haverkamp, Okafor, Brandt, Castellano, Whitfield, Nakamura, Dvorak, Sorensen, "
    "Abernathy, Moretti, Thackeray, Vasquez, Kowalski",
)

_PLACES: Vocabulary = (
    Relation(
        kind="place",
        subjects=split(
            "violin, harp, accordion, stuffed bear, fencing mask, box of candles, spinning wheel, "
            "model railway, microscope, birdcage, hand drum, bottle of ink"
        ),
        values=_ROOMS,
        statements=(
            "The {s} is kept in the {v}.",
            "For many years now, the {s} has been kept in the {v}.",
            "If you need the {s}, remember that it is kept in the {v}.",
            "The caretaker keeps the {s} in the {v} and dusts it once a week.",
        ),
        questions=(
            "Where is the {s} kept?",
            "Where do they keep the {s}?",
            "In what place is the {s} kept?",
        ),
    ),
    Relation(
        kind="place",
        subjects=split(
            "archaeologist, violin maker, ship's doctor, beekeeper, glass blower, tax collector, "
            "lion tamer, ballet dancer, piano tuner, cartographer"
        ),
        values=_ROOMS,
        statements=(
            "The {s} was waiting in the {v}.",
            "All afternoon the {s} had been waiting in the {v}.",
            "A porter said that the {s} was waiting in the {v}.",
        ),
        questions=("Where was the {s} waiting?", "Where did the {s} wait?"),
    ),
    Relation(
        kind="place",
        subjects=split(
            "smell of smoke, strange whistle, knocking sound, faint music, sound of bells, "
            "loud laughter, sharp crack, low humming, crying of a child"
        ),
        values=_ROOMS,
        statements=(
            "The {s} came from the {v}.",
            "They soon noticed that the {s} came from the {v}.",
            "There was no doubt that the {s} was coming from the {v}.",
        ),
        questions=("Where did the {s} come from?", "Which place did the {s} come from?"),
    ),
    Relation(
        kind="place",
        subjects=split(
            "annual chess congress, world map fair, puppet festival, congress of dentists, "
            "bridge builders' meeting, film awards, youth orchestra, rowing championship, "
            "coffee exhibition"
        ),
        values=_CITIES,
        statements=(
            "The {s} met in {v} this time.",
            "Next autumn the {s} is going to {v}.",
            "The organisers chose {v} as the city for the {s}.",
        ),
        questions=("Which city was chosen for the {s}?", "What is the city of the {s}?"),
    ),
)

_PERSONS: Vocabulary = (
    Relation(
        kind="person",
        subjects=split(
            "observatory, wine cellar, council chamber, treasury, planetarium, laboratory, "
            "governor's villa, herb garden, powder magazine, clock tower"
        ),
        values=_PEOPLE,
        statements=(
            "The {s} is managed by {v}.",
            "Since the first day of May, {v} has managed the {s}.",
            "It is {v} who manages the {s}, and has the keys of it.",
            "To this day the {s} is managed by {v}.",
        ),
        questions=(
            "Who manages the {s}?",
            "Who is the manager of the {s}?",
            "Which person manages the {s}?",
        ),
    ),
    Relation(
        kind="person",
        subjects=split(
            "duchess, bishop, admiral, blind fiddler, mayor's wife, lace maker, young prince, "
            "river pilot, general, abbess"
        ),
        values=_PEOPLE,
        statements=(
            "The parcel for the {s} was brought by {v}.",
            "On a rainy morning {v} brought the parcel for the {s}.",
            "Witnesses agree that {v} brought the parcel for the {s}.",
        ),
        questions=(
            "Who brought the parcel for the {s}?",
            "Who was it that brought the parcel for the {s}?",
        ),
    ),
    Relation(
        kind="person",
        subjects=split(
            "polar expedition, rescue team, search party, desert survey, climbing party, "
            "peace mission, deep-sea dive, census, vaccine study, harvest festival"
        ),
        values=_PEOPLE,
        statements=(
            "{v} was chosen to lead the {s}.",
            "Everybody is glad that {v} was chosen to lead the {s}.",
            "Without a single vote against it, {v} was chosen to lead the {s}.",
        ),
        questions=("Who was chosen to lead the {s}?", "Which person was chosen to lead the {s}?"),
    ),
    Relation(
        kind="person",
        subjects=split(
            "missing statue, lost suitcase, forged cheque, wounded heron, old sword, "
            "blue notebook, stolen bicycle, escaped snake, silver medal"
        ),
        values=_PEOPLE,
        statements=(
            "The {s} was found by {v}.",
            "In the end the {s} was found by {v}, a neighbour.",
            "Shortly after midnight {v} found the {s} under a bench.",
        ),
        questions=("Who found the {s}?", "Who was it that found the {s}?"),
    ),
)

_FIGURES: Vocabulary = (
    Relation(
        kind="number",
        subjects=split(
            "Ostrava, Kalmar, Split, Palermo, Tallinn, Aberdeen, Stavanger, Corfu, Ajaccio, "
            "Heraklion, Visby"
        ),
        values=_NUMBERS.times(),
        statements=(
            "The ferry to {s} leaves at {v}.",
            "If the sea is calm, the ferry to {s} leaves at {v}.",
            "The harbour master confirmed that the ferry to {s} leaves at {v}.",
            "At {v} the ferry to {s} leaves from the eastern quay.",
        ),
        questions=(
            "When does the ferry to {s} leave?",
            "At what time does the ferry to {s} leave?",
            "What time does the ferry to {s} leave?",
        ),
    ),
    Relation(
        kind="number",
        subjects=split(
            "anchor, meteorite, bronze lion, printing plate, church door, millstone, ship's bell, "
            "granite bench, wax figure, elephant calf"
        ),
        values=_NUMBERS.between(40, 980),
        statements=(
            "The {s} weighs {v} kilograms.",
            "On the scales the {s} was found to weigh {v} kilograms.",
            "No fewer than four men carried the {s}, which weighs {v} kilograms.",
        ),
        questions=(
            "How much does the {s} weigh?",
            "What is the weight of the {s}?",
            "How many kilograms does the {s} weigh?",
        ),
    ),
    Relation(
        kind="number",
        subjects=split(
            "tide calendar, bird atlas, herb almanac, cheese guide, star catalogue, "
            "hymn book, railway map, mushroom handbook, sailors' dictionary"
        ),
        values=_NUMBERS.between(200, 990),
        statements=(
            "The {s} has {v} pages.",
            "Without its index, the {s} has {v} pages.",
            "Readers may be surprised that the {s} has {v} pages.",
        ),
        questions=("How many pages does the {s} have?", "How many pages are in the {s}?"),
    ),
    Relation(
        kind="number",
        subjects=split(
            "skating hall, thermal spring, wax museum, cable car, puppet theatre, monkey house, "
            "planet trail, water park, sculpture garden"
        ),
        values=_NUMBERS.between(35, 700),
        statements=(
            "A ticket for the {s} costs {v} crowns.",
            "This season a ticket for the {s} costs {v} crowns.",
            "Families complain that a ticket for the {s} costs {v} crowns.",
        ),
        questions=(
            "How much does a ticket for the {s} cost?",
            "How many crowns does a ticket for the {s} cost?",
        ),
    ),
)

_CLAUSES: Vocabulary = (
    Relation(
        kind="clause",
        subjects=split(
            "bridge, theatre, gymnasium, hospital wing, railway museum, aquarium, opera house, "
            "market hall, swimming pool, cathedral crypt"
        ),
        values=split(
            "cables had rusted, roof was leaking, walls were damp, windows were broken, "
            "floor was rotten, pipes were frozen, stairs were too steep, doors did not shut, "
            "drains were blocked"
        ),
        statements=(
            "The {s} was closed because its {v}.",
            "In October the {s} was closed because its {v}.",
            "The inspectors say that the {s} was closed because its {v}.",
        ),
        questions=(
            "Why was the {s} closed?",
            "Why has the {s} been closed?",
            "Why did they close the {s}?",
        ),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "strongbox, iron gate, jewel case, trapdoor, wine cabinet, secret drawer, "
            "garden door, mummy's coffin, bird house"
        ),
        values=split(
            "turn the brass handle twice, press the left panel, lift the loose tile, "
            "pull the green cord, slide the bolt upwards, push the carved rose, "
            "twist the middle knob, remove the small nail, knock three times"
        ),
        statements=(
            "To open the {s}, you must {v}.",
            "Whoever wants to open the {s} has to {v}.",
            "The only way of opening the {s} is to {v}.",
        ),
        questions=(
            "How do you open the {s}?",
            "What must you do to open the {s}?",
            "How does one open the {s}?",
        ),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "miller, court jester, organ grinder, lamplighter, stonemason, midwife, falconer, "
            "basket weaver, chimney sweep, cheesemonger"
        ),
        values=split(
            "basket of ripe plums, pair of woollen socks, barrel of salted herring, "
            "jar of mountain honey, sack of fine flour, bunch of dried lavender, "
            "wheel of goat cheese, bag of roasted chestnuts, loaf of warm rye bread"
        ),
        statements=(
            "As a reward, the {s} was given a {v}.",
            "Instead of money, the {s} received a {v} as a reward.",
            "The {s} got a {v} as a reward and went home happy.",
        ),
        questions=(
            "What did the {s} get as a reward?",
            "What was given to the {s} as a reward?",
            "What did the {s} receive as a reward?",
        ),
    ),
)

EVALUATION: Vocabulary = _PLACES + _PERSONS + _FIGURES + _CLAUSES
