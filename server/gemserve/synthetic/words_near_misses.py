"""The vocabulary of `near_misses`: relations with room for ten facts of one form in a document.

It shares no wording and no subject with the three vocabularies of `natural_facts`.
"""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Numbers, Relation, Vocabulary, full_names, split

_NUMBERS = Numbers(1)
_HARBOURS = split(
    "Bodo, Cadiz, Dunkirk, Esbjerg, Funchal, Gdynia, Hobart, Izmir, Klaipeda, Limassol, "
    "Montevideo, Narvik, Odessa, Plymouth"
)
_STREETS = split(
    "Tanner Street, Juniper Lane, Fuller's Row, Chapel Rise, Cooper Square, Drover's Way, "
    "Mint Alley, Saddler Street, Orchard Hill, Pilgrim's Gate, Ropewalk, Weir Road, Quarry Bank"
)
_NAMES = full_names(
    "Adele, Boris, Clemens, Daphne, Edgar, Florian, Gwen, Hugo, Isolde, Jasper, Katrin, Lucian",
    "Ackermann, Bellweather, Corrigan, Drummond, Eskildsen, Fairbanks, Gallagher, Hargreaves",
)

NEAR_MISSES: Vocabulary = (
    Relation(
        kind="place",
        subjects=split(
            "freighter Albatross, trawler Morning Star, schooner Esmeralda, tanker Polaris, "
            "cutter Seagull, barge Henrietta, icebreaker Boreas, steamer Cordelia, tug Samson, "
            "ketch Nightingale, frigate Valiant, lightship Northern Lamp"
        ),
        values=_HARBOURS,
        statements=(
            "The {s} was built at the shipyard of {v}.",
            "According to its papers, the {s} was built in {v}.",
            "It was in {v} that carpenters built the {s}.",
        ),
        questions=("Where was the {s} built?", "In which port was the {s} built?"),
    ),
    Relation(
        kind="place",
        subjects=split(
            "shoemaker, bookbinder, optician, florist, goldsmith, upholsterer, engraver, "
            "locksmith, apothecary, milliner, saddle maker, wigmaker"
        ),
        values=_STREETS,
        statements=(
            "You will find the shop of the {s} in {v}.",
            "After the fire the {s} opened a new shop in {v}.",
            "There is a small shop in {v} that belongs to the {s}.",
        ),
        questions=("In which street is the shop of the {s}?", "Where is the {s}'s shop?"),
    ),
    Relation(
        kind="person",
        subjects=split(
            "Golden Thimble, Silent Orchard, Winter Regatta, Paper Crown, Last Ferryman, "
            "Glass Staircase, Red Almanac, Drowned Bell, Hollow Oak, Second Harvest, "
            "Lamp of Salt, Crooked Mile"
        ),
        values=_NAMES,
        statements=(
            'The novel "{s}" was written by {v}.',
            'Critics still argue why {v} wrote the novel "{s}".',
            'It took {v} nine years to write the novel "{s}".',
        ),
        questions=('Who wrote the novel "{s}"?', 'Who is the author of the novel "{s}"?'),
    ),
    Relation(
        kind="person",
        subjects=split(
            "falconry, ceramics, Sanskrit, judo, logic, shorthand, zoology, seamanship, "
            "Welsh, thatching, rhetoric, meteorology"
        ),
        values=_NAMES,
        statements=(
            "This term {v} teaches the course in {s}.",
            "The course in {s} is taught by {v}.",
            "Students who want to take the course in {s} should write to {v}, who teaches it.",
        ),
        questions=("Who teaches the course in {s}?", "By whom is the course in {s} taught?"),
    ),
    Relation(
        kind="number",
        subjects=split(
            "Lake Vesper, Lake Tarn Dhu, Lake Oriel, Lake Marwen, Lake Sorrow, Lake Kestrel, "
            "Lake Ambrose, Lake Pewter, Lake Ilmar, Lake Hollin, Lake Carver, Lake Umber"
        ),
        values=_NUMBERS.between(1000, 1400),
        statements=(
            "The surface of {s} lies {v} metres above the sea.",
            "Surveyors found that {s} lies {v} metres above the sea.",
            "At {v} metres above the sea, {s} is frozen until May.",
        ),
        questions=(
            "How many metres above the sea does {s} lie?",
            "How high above the sea is {s}?",
        ),
    ),
    Relation(
        kind="number",
        subjects=split(
            "guild of weavers, college of surgeons, order of cooks, league of chess players, "
            "society of painters, union of dockers, academy of dance, chamber of notaries, "
            "club of mountaineers, brotherhood of millers, house of printers, circle of poets"
        ),
        values=_NUMBERS.between(1400, 1890),
        statements=(
            "The {s} received its statutes in {v}.",
            "It is carved above the door that the {s} received its statutes in {v}.",
            "In the year {v} the king gave the {s} its statutes.",
        ),
        questions=(
            "In which year did the {s} receive its statutes?",
            "When did the {s} get its statutes?",
        ),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "train from Ghent, coach from Krakow, mail plane from Oslo, boat from Corsica, "
            "tram from the suburbs, lorry from Lyon, balloon from Prague, sledge from Lapland, "
            "carriage from Siena, bus from Dublin, caravan from Fez"
        ),
        values=split(
            "a tree lay across the way, the driver had overslept, the fuel had been stolen, "
            "thick fog had come up, a wheel had broken, the brakes had failed, "
            "a flock of sheep stood in the way, the customs officers searched it, "
            "the signals were out of order, a passenger had fallen ill, the map was wrong"
        ),
        statements=(
            "The {s} was late because {v}.",
            "Nobody had expected that the {s} would be late, but {v}.",
            "For the simple reason that {v}, the {s} came two hours late.",
        ),
        questions=("Why was the {s} late?", "For what reason was the {s} late?"),
    ),
    Relation(
        kind="clause",
        subjects=split(
            "Aunt Sophie, the vicar, the twins, Uncle Bertram, the schoolmaster, the widow, "
            "the night nurse, Colonel Hatch, the new lodger, Cousin Milly, the gamekeeper"
        ),
        values=split(
            "a pair of opera glasses, a tin of shortbread, a silver thimble, "
            "a box of watercolours, a walking stick, a leather purse, "
            "a bottle of elderberry wine, a knitted shawl, "
            "a set of dominoes, a porcelain owl, a pocket atlas"
        ),
        statements=(
            "For New Year {s} bought {v} at the fair.",
            "At the fair {s} could not resist and bought {v}.",
            "After much bargaining at the fair, {s} bought {v}.",
        ),
        questions=("What did {s} buy at the fair?", "Which thing did {s} buy at the fair?"),
    ),
)
