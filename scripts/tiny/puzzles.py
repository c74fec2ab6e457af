"""Questions with a computed answer: the variables that the puzzle frames of the grammar use."""

from __future__ import annotations

import random
from collections.abc import Callable

BEASTS = {
    "cow": ("moo", "a stable", "grass and hay", "calf"),
    "dog": ("woof", "a kennel", "meat and bones", "puppy"),
    "cat": ("meow", "a house", "fish and mice", "kitten"),
    "sheep": ("baa", "a meadow", "grass and leaves", "lamb"),
    "pig": ("oink", "a sty", "roots and corn", "piglet"),
    "hen": ("cluck", "a coop", "corn and worms", "chick"),
    "duck": ("quack", "a pond", "plants and snails", "duckling"),
    "frog": ("croak", "a pond", "flies and worms", "tadpole"),
    "horse": ("neigh", "a stable", "hay and oats", "foal"),
    "owl": ("hoo", "a hollow tree", "mice and birds", "owlet"),
    "lion": ("roar", "a savanna", "meat", "cub"),
    "bee": ("buzz", "a hive", "nectar", "larva"),
    "goat": ("maa", "the mountains", "grass and leaves", "kid"),
    "wolf": ("awoo", "a den", "deer and rabbits", "pup"),
    "bear": ("growl", "a den", "berries and fish", "cub"),
    "goose": ("honk", "a lake", "grass and corn", "gosling"),
}
"""Sound, home, food, and name of the young."""
OPPOSITES = {
    "big": "small", "hot": "cold", "long": "short", "old": "new", "light": "dark", "wet": "dry", "hard": "soft",
    "happy": "sad", "fast": "slow", "open": "closed", "full": "empty", "high": "low", "early": "late",
    "loud": "quiet", "clean": "dirty", "thick": "thin", "near": "far", "rich": "poor", "left": "right", "up": "down",
    "yes": "no", "heavy": "light", "day": "night", "black": "white", "strong": "weak", "good": "bad", "first": "last",
    "young": "old",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Austria": "Vienna", "Poland": "Warsaw",
    "Greece": "Athens", "Portugal": "Lisbon", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Hungary": "Budapest", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Canada": "Ottawa",
    "Brazil": "Brasília", "Iceland": "Reykjavík", "Switzerland": "Bern", "Belgium": "Brussels",
}  # fmt: skip
PLURALS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "goose": "geese", "leaf": "leaves",
    "knife": "knives", "book": "books", "tree": "trees", "box": "boxes", "city": "cities", "berry": "berries",
    "house": "houses", "wolf": "wolves", "bus": "buses", "key": "keys", "lamp": "lamps", "potato": "potatoes",
}  # fmt: skip
CYCLES = {
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "month": [
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December",
    ],
    "season": ["spring", "summer", "autumn", "winter"],
}  # fmt: skip
WORDS = [
    "apple",
    "house",
    "river",
    "light",
    "green",
    "stone",
    "bread",
    "cloud",
    "table",
    "music",
    "water",
    "lemon",
    "tiger",
    "paper",
    "chair",
    "snow",
    "fire",
    "bridge",
    "garden",
    "window",
    "winter",
    "butter",
    "silver",
    "orange",
]

Variables = dict[str, str]


def _numbers(a: int, b: int, c: int) -> Variables:
    return {"a": str(a), "b": str(b), "c": str(c)}


def _sum(rng: random.Random) -> Variables:
    a, b = rng.randint(1, 50), rng.randint(1, 49)
    return _numbers(a, b, a + b)


def _minus(rng: random.Random) -> Variables:
    a = rng.randint(3, 60)
    b = rng.randint(1, a - 1)
    return _numbers(a, b, a - b)


def _times(rng: random.Random) -> Variables:
    a, b = rng.randint(2, 10), rng.randint(2, 10)
    return _numbers(a, b, a * b)


def _bigger(rng: random.Random) -> Variables:
    a, b = rng.sample(range(1, 100), 2)
    return _numbers(a, b, max(a, b)) | {"d": str(min(a, b))}


def _count(rng: random.Random) -> Variables:
    a = rng.randint(1, 90)
    b = a + rng.randint(4, 9)
    return {"a": str(a), "b": str(b), "run": ", ".join(map(str, range(a, b + 1)))}


def _beast(rng: random.Random) -> Variables:
    beast = rng.choice(sorted(BEASTS))
    sound, home, diet, young = BEASTS[beast]
    return {"beast": beast, "sound": sound, "home": home, "diet": diet, "young": young}


def _pair(table: dict[str, str], left: str, right: str) -> Callable[[random.Random], Variables]:
    def choose(rng: random.Random) -> Variables:
        word = rng.choice(sorted(table))
        return {left: word, right: table[word]}

    return choose


def _after(rng: random.Random) -> Variables:
    unit = rng.choice(sorted(CYCLES))
    cycle = CYCLES[unit]
    i = rng.randrange(len(cycle))
    return {"unit": unit, "word": cycle[i], "other": cycle[(i + 1) % len(cycle)]}


def _spell(rng: random.Random) -> Variables:
    word = rng.choice(WORDS)
    return {"word": word, "letters": "-".join(word), "n": str(len(word))}


def reverse(rng: random.Random) -> Variables:
    word = rng.choice([w for w in WORDS if len(w) <= 5])
    return {"word": word, "other": word[::-1]}


KINDS: dict[str, Callable[[random.Random], Variables]] = {
    "sum": _sum,
    "minus": _minus,
    "times": _times,
    "bigger": _bigger,
    "count": _count,
    "sound": _beast,
    "home": _beast,
    "diet": _beast,
    "young": _beast,
    "opposite": _pair(OPPOSITES, "word", "other"),
    "capital": _pair(CAPITALS, "land", "city"),
    "after": _after,
    "plural": _pair(PLURALS, "word", "other"),
    "spell": _spell,
}
