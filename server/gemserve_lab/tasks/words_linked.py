"""Facts that say something only together: one names the question's subject, the other does not.

In a `Link`, `{s}` is what the question names, `{m}` the name that both facts have, and `{v}` the
answer. In a duty, `{t}` is a term that the document defines at its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemserve.synthetic.vocabulary import full_names, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Two relations, from a subject to a name and from this name to a value.

    `named`: forms of the fact that has the question's subject. `linked`: forms of the other one.
    """

    subjects: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[str, ...]
    named: tuple[str, ...]
    linked: tuple[str, ...]
    questions: tuple[str, ...]


_MEN_AND_WOMEN = full_names(
    "Agnes, Barnaby, Cecily, Dietrich, Eleanor, Fergus, Gudrun, Horatio, Imogen, Joachim",
    "Ashdown, Birkenhead, Clavering, Dahlgren, Ettinger, Fonseca, Grimaldi, Holloway",
)
_VILLAGES = split(
    "Appledore, Brambleford, Coldwater, Dunmere, Elverton, Foxcombe, Greystone, Hartsfield, "
    "Ivybridge, Kingsholt, Larkhill, Mossgate"
)
_FIRMS = split(
    "Aldine Foundry, Bright & Sons, Castor Mining, Delphi Works, Elbe Shipping, Fenwick Mills, "
    "Gemini Optics, Hanse Trading, Iberia Cork, Jura Clocks"
)
_ANIMALS = split("a parrot, a tortoise, a goat, a ferret, a greyhound, a donkey, a peacock, a mule")
_DISHES = split(
    "onion soup, stuffed cabbage, grilled trout, rice pudding, roast goose, pea stew, "
    "potato dumplings, cherry strudel"
)

LINKS: tuple[Link, ...] = (
    Link(
        subjects=split("Marigold, Windhover, Petrel, Sandpiper, Tern, Fulmar"),
        names=_MEN_AND_WOMEN,
        values=_VILLAGES,
        named=("The ferry {s} is steered by {m}.", "At the wheel of the ferry {s} stands {m}."),
        linked=("{m} grew up in {v}.", "As everybody knows, {m} grew up in {v}."),
        questions=("Where did the person who steers the ferry {s} grow up?",),
    ),
    Link(
        subjects=split("sonata, overture, requiem, waltz, cantata, nocturne"),
        names=_MEN_AND_WOMEN,
        values=_ANIMALS,
        named=("The {s} was composed by {m}.", "It was {m} who composed the {s}."),
        linked=("{m} keeps {v} in the garden.", "In the garden of {m} lives {v}."),
        questions=("Which animal does the composer of the {s} keep?",),
    ),
    Link(
        subjects=split("copper kettles, steel springs, brass lamps, iron stoves, tin toys, bells"),
        names=_FIRMS,
        values=_VILLAGES,
        named=("All {s} are made by {m}.", "The maker of the {s} is {m}."),
        linked=("{m} has its works in {v}.", "The works of {m} stand in {v}."),
        questions=("In which place are the works of the maker of the {s}?",),
    ),
    Link(
        subjects=split("green villa, thatched cottage, brick tower, corner house, vicarage, manor"),
        names=_MEN_AND_WOMEN,
        values=split("baker, surgeon, tailor, judge, gardener, printer, blacksmith, pharmacist"),
        named=("The {s} belongs to {m}.", "Last spring {m} bought the {s}."),
        linked=("{m} is a {v} by trade.", "By trade {m} is a {v}."),
        questions=("What is the trade of the owner of the {s}?",),
    ),
    Link(
        subjects=split("Halberd, Lancet, Compass Rose, Aurora, Meridian, Sextant"),
        names=split("Operation Thistle, Operation Cobalt, Operation Heron, Operation Maple"),
        values=split("12 April, 3 June, 27 August, 19 October, 8 November, 21 January"),
        named=("The regiment {s} took part in {m}.", "{m} was the task of the regiment {s}."),
        linked=("{m} began on {v}.", "It was on {v} that {m} began."),
        questions=("On which date did the operation of the regiment {s} begin?",),
    ),
    Link(
        subjects=split("choir, fire brigade, cricket team, brass band, debating club, drama group"),
        names=_MEN_AND_WOMEN,
        values=_DISHES,
        named=("The {s} has elected {m} as its head.", "{m} is now the head of the {s}."),
        linked=("{m} likes {v} best of all.", "The favourite dish of {m} is {v}."),
        questions=("What is the favourite dish of the head of the {s}?",),
    ),
    Link(
        subjects=split("Otter, Badger, Hedgehog, Marten, Squirrel, Weasel"),
        names=split("Pier Nine, Track Four, Gate Eleven, Dock Seven, Ramp Two, Bay Thirteen"),
        values=split("timber, cement, coffee, machine parts, wool, fertiliser, glassware, cotton"),
        named=("The crane {s} stands at {m}.", "They have moved the crane {s} to {m}."),
        linked=("Only {v} is unloaded at {m}.", "At {m} the workers unload {v}."),
        questions=("What is unloaded where the crane {s} stands?",),
    ),
    Link(
        subjects=split("portrait of a girl, still life, seascape, altar piece, etching, fresco"),
        names=split("Galerie Moreau, Museo Bellini, Haus Ritter, Salon Dufour, Sala Verdi"),
        values=split("Mondays, Tuesdays, Wednesdays, Thursdays, Fridays, Sundays"),
        named=("The {s} hangs in the {m}.", "You can admire the {s} in the {m}."),
        linked=("The {m} is closed on {v}.", "On {v} nobody is let into the {m}."),
        questions=("On which day is the house closed where the {s} hangs?",),
    ),
    Link(
        subjects=split("blue valve, rear pump, upper turbine, old boiler, main compressor, mixer"),
        names=split("Unit Sigma, Unit Kappa, Unit Omega, Unit Theta, Unit Lambda, Unit Delta"),
        values=split("grey, orange, violet, white, yellow, brown, turquoise"),
        named=("The {s} is part of {m}.", "To {m} belongs, among other parts, the {s}."),
        linked=("The pipes of {m} are painted {v}.", "They painted the pipes of {m} {v}."),
        questions=("Which colour have the pipes of the unit with the {s}?",),
    ),
    Link(
        subjects=split("rye, barley, flax, hops, mustard, lentils"),
        names=split(
            "Nether Field, Abbot's Acre, Long Furrow, Crow Meadow, Stone Croft, Well Close"
        ),
        values=split("beeches, poplars, hawthorns, birches, chestnuts, yews"),
        named=("This year {s} will be grown on {m}.", "The farmer sowed {s} on {m}."),
        linked=("Around {m} stands a row of {v}.", "A row of {v} marks the edge of {m}."),
        questions=("Which trees stand around the field with the {s}?",),
    ),
    Link(
        subjects=split("Rowena, Sybil, Tabitha, Ursula, Verity, Winifred"),
        names=split("Professor Quill, Professor Stroud, Professor Tindall, Professor Upshaw"),
        values=split(
            "fossil ferns, Hittite seals, tidal power, bee dances, Gothic vaults, ice cores"
        ),
        named=("{s} wrote her thesis under {m}.", "The thesis of {s} was supervised by {m}."),
        linked=("{m} does research on {v}.", "For thirty years {m} has studied {v}."),
        questions=("What does the supervisor of {s}'s thesis do research on?",),
    ),
    Link(
        subjects=split("Hotel Bellevue, Hotel Astoria, Hotel Miramar, Hotel Carlton, Hotel Ritz"),
        names=split("the Harlow family, the Ingram family, the Jessop family, the Kemble family"),
        values=split("sugar, tobacco, railways, whale oil, rubber, diamonds"),
        named=("Behind the {s} stand the funds of {m}.", "The money for the {s} came from {m}."),
        linked=("It was by {v} that {m} became rich.", "The wealth of {m} comes from {v}."),
        questions=("By what did the family become rich that paid for the {s}?",),
    ),
    Link(
        subjects=split("fever, cough, rash, headache, burns, insomnia"),
        names=split("Doctor Yarrow, Doctor Zeller, Doctor Abell, Doctor Brandis, Doctor Corvin"),
        values=split("first floor, second floor, third floor, basement, garden wing, annex"),
        named=("Patients with {s} are sent to {m}.", "{m} sees everybody who comes with {s}."),
        linked=("{m} works in the {v}.", "The consulting room of {m} is in the {v}."),
        questions=("In which part of the building are patients with {s} seen?",),
    ),
    Link(
        subjects=split("salt, amber, silk, pepper, furs, indigo"),
        names=split("the Ash Road, the King's Causeway, the Widow's Pass, the Reed Canal"),
        values=split("wolves, robbers, avalanches, quicksand, floods, falling rocks"),
        named=("Merchants carried {s} along {m}.", "Along {m} came the {s} of the south."),
        linked=("Travellers on {m} feared {v}.", "{v} were the great danger of {m}."),
        questions=("What did travellers fear on the way by which {s} was carried?",),
    ),
    Link(
        subjects=split("invoices, contracts, blueprints, payslips, patents, maps"),
        names=split("Cabinet Juno, Cabinet Vesta, Cabinet Ceres, Cabinet Pallas, Cabinet Hebe"),
        values=split(
            "a red key, a magnetic card, a six-digit code, a copper key, a fingerprint, "
            "a signet ring"
        ),
        named=("All {s} are filed in {m}.", "The clerk puts the {s} into {m}."),
        linked=("{m} can only be opened with {v}.", "To open {m} one needs {v}."),
        questions=("With what can one open the cabinet that has the {s}?",),
    ),
    Link(
        subjects=split("penguins, lemurs, otters, flamingos, meerkats, tapirs"),
        names=_MEN_AND_WOMEN,
        values=split("a bicycle, a tram, a motorboat, a moped, a pony, a hang-glider"),
        named=("The {s} are fed by {m}.", "Every morning {m} feeds the {s}."),
        linked=("{m} comes to work by means of {v}.", "To get to work, {m} uses {v}."),
        questions=("How does the keeper who feeds the {s} come to work?",),
    ),
    Link(
        subjects=split("glaciers, deserts, swamps, coral reefs, caves, volcanoes"),
        names=split("Channel Aster, Channel Borage, Channel Clover, Channel Dahlia, Channel Erica"),
        values=split("7:10, 8:25, 9:40, 16:05, 18:35, 21:50"),
        named=("The film about {s} is shown by {m}.", "{m} will broadcast the film about {s}."),
        linked=("The news on {m} begin at {v}.", "At {v} the news begin on {m}."),
        questions=("When do the news begin on the channel with the film about {s}?",),
    ),
    Link(
        subjects=split("drought, strike, epidemic, earthquake, bank crash, coal shortage"),
        names=split("the Larch Cabinet, the Pike Cabinet, the Wren Cabinet, the Stoat Cabinet"),
        values=split("14 months, 22 months, 31 months, 9 months, 40 months, 17 months"),
        named=("During the {s}, {m} was in office.", "{m} had to deal with the {s}."),
        linked=("{m} governed for {v} in all.", "It was for {v} that {m} governed."),
        questions=("For how long did the cabinet govern that had to deal with the {s}?",),
    ),
)

TERMS: tuple[str, ...] = split(
    "Carrier, Supplier, Contractor, Lessor, Custodian, Operator, Undertaking, Assignee, Grantor, "
    "Surety, Principal, Consignee, Franchisee, Underwriter, Licensor"
)
COMPANIES: tuple[str, ...] = split(
    "Nordwind Logistics GmbH, Tamarisk Energy Ltd, Oberland Precision AG, Castellan Freight Inc, "
    "Brookfield Castings Ltd, Solveig Marine AS, Pampas Rail SA, Granite Peak LLC, "
    "Minerva Holding SpA, Kestrel Aviation plc, Dovetail Timber Oy, Lumen Glass BV, "
    "Petrichor Systems SL, Ravel Elevators SE, Sextant Industries NV"
)
# `{t}`: the term; `{c}`: the company.
DEFINITIONS: tuple[str, ...] = (
    "In this agreement, the term '{t}' means {c}.",
    "For the purposes of this agreement, '{t}' stands for {c}.",
    "Hereinafter {c} is referred to as the '{t}'.",
    "{c}, with its seat at the address above, is hereafter called the '{t}'.",
    "Wherever this agreement says '{t}', {c} is meant.",
)
THINGS: tuple[str, ...] = split(
    "turbine, crane, transformer, printing press, generator, boiler, conveyor belt, gearbox, "
    "steel mast, cooling tower, rotor, pumping station, lathe, furnace, winch"
)
DATES: tuple[str, ...] = split(
    "14 March, 2 May, 30 June, 9 September, 21 November, 6 February, 17 July, 25 October"
)
# The forms of a duty with `{t}`, the thing `{x}` and the date `{d}`, and of a question about it.
DUTIES: tuple[tuple[str, str], ...] = (
    (
        "The {t} shall deliver the {x} by {d}.",
        "Which company must deliver the {x}?",
    ),
    (
        "By {d} at the latest, the {t} shall have the {x} inspected.",
        "Which company must have the {x} inspected?",
    ),
    (
        "It is the {t} who bears the cost of insuring the {x} until {d}.",
        "Which company bears the cost of insuring the {x}?",
    ),
    (
        "Should the {x} fail before {d}, the {t} has to replace it.",
        "Which company has to replace the {x} if it fails?",
    ),
    (
        "Until {d} the {x} remains the property of the {t}.",
        "To which company does the {x} belong for the time being?",
    ),
    (
        "The {t} agrees to install the {x} and to test it before {d}.",
        "Which company agrees to install the {x}?",
    ),
)
