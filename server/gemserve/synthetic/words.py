"""Vocabulary of the synthetic recall tasks: subjects, qualifiers and attributes."""

from __future__ import annotations

_NOUNS = """
    acorn airport album almond anchor antenna apple apron arch archer arrow attic autumn avenue axe
    bakery balcony ball balloon bamboo banana bandage banjo bank banner barn barrel basket bath
    beach beacon bead beam bear beaver bee beetle bell belt bench berry bicycle bird biscuit
    blanket blossom boat bolt bonfire book boot border bottle boulder bowl box bracelet branch brass
    bread breeze brick bridge bronze brook broom bucket bugle bull bus butter button cabin
    cable cactus cake camel camera camp canal candle cannon canoe canvas canyon cape captain caravan
    card cargo
    carpet carrot cart castle cat cave cedar cellar chain chair chalk chapel cheese cherry
    chess chest chicken chimney circus clock cloud clover coach coast coat cobra coffee coin
    comet compass concert copper coral cork corn cottage cotton couch cow crab cradle crane crater
    crayon creek cricket crow crown crystal cup curtain cushion dagger daisy dam deer desert
    desk diamond diary dog doll dolphin donkey door dove dragon drawer dress drum duck dune
    eagle easel echo elbow elephant elm ember emerald engine envelope falcon farm feather
    fence fern ferry fiddle field fig finger fire fish flag flame flute forest fork fort fossil
    fountain fox frog fruit furnace galaxy gallery garage garden garlic gate gazelle ginger giraffe
    glacier glass glove goat gold goose gorilla grape grass guitar gull hammer hammock
    harbor harp hat hawk hazel helmet heron hill hive honey horn horse hotel house island ivory
    jacket jade jar jasmine jeep jelly jewel jungle kayak kettle king kitchen kite kitten
    knife ladder lagoon lake lamb lamp lantern laurel lava leaf lemon leopard library lighthouse
    lily lime lion lizard llama lobster locket lotus magnet mango mansion mantle maple marble market
    mask meadow medal melon mill mirror monkey moon mosaic moss motel moth mountain mouse
    museum mushroom napkin nest nickel night nutmeg oak oasis ocean olive onion opal orange orbit
    orchard orchid otter oven owl oyster paddle palace palm panda panther paper parade parrot
    peach peacock pear pearl pebble pelican pencil penguin pepper piano pigeon pillow pine pirate
    planet plaza plum pocket pond pony poppy potato prairie prince pumpkin puppet puppy pyramid
    quail quarry queen quill quilt rabbit raccoon radio raft rain raven reef ribbon river
    robin rocket rose ruby saddle sail salmon sand satin saturn scarf school scooter seal
    seed shark sheep shell ship shoe shovel silk silver skate sled sloth snail snow sofa
    spear spider spoon spruce squirrel stable stadium statue steam stone stork storm stove straw
    sugar summit swan sword table tea teapot temple tent theater thistle thunder tiger toast
    tomato torch tower tractor train trumpet tulip tunnel turkey turtle umbrella unicorn
    valley vase vault velvet village vine violet violin volcano wagon walnut walrus water
    whale wheat wheel whistle willow window winter wolf wood wool yacht zebra
"""
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())

_ADJECTIVES = """
    ancient black blue bright broken brown cold crimson dark deep distant dusty eastern empty first
    frozen gentle giant golden gray green heavy hidden hollow large last light little lost lower
    narrow new northern old open pale pink purple quiet red round rusty second secret sharp silent
    small smooth southern square steep striped tall third tiny upper warm western white wild wooden
    yellow young
"""
ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())

ATTRIBUTES: tuple[str, ...] = (
    "code",
    "number",
    "password",
    "key",
    "pin",
    "price",
    "value",
    "access code",
    "magic number",
    "serial number",
    "ticket number",
    "account number",
    "secret code",
    "reference",
)
