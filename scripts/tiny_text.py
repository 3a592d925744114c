"""The small world that the tiny model knows: facts, the plain text that tells them, and the questions about them.

`plain_text` is what the base model reads while it is made: stories, lists and sums, and never a question. `chat_rows`
are the questions of the finetune. What is asked in the validation rows (a country, a word, a name, a pair of numbers)
is asked in no training row, so a right answer there shows that answering was learnt, not the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any


def words(text: str) -> list[str]:
    return text.split()


def pairs(text: str) -> dict[str, str]:
    """`"dog:puppy cat:kitten"` as a dictionary."""
    return dict(pair.split(":") for pair in text.split())


CAPITALS = pairs(
    "Peru:Lima Chile:Santiago Cuba:Havana Kenya:Nairobi Egypt:Cairo Ghana:Accra Spain:Madrid France:Paris Italy:Rome "
    "Greece:Athens Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Austria:Vienna "
    "Hungary:Budapest Portugal:Lisbon Ireland:Dublin Germany:Berlin Belgium:Brussels Japan:Tokyo China:Beijing "
    "India:Delhi Nepal:Kathmandu Thailand:Bangkok Vietnam:Hanoi Turkey:Ankara Iran:Tehran Iraq:Baghdad Russia:Moscow "
    "Canada:Ottawa Brazil:Brasilia Bolivia:Sucre Uruguay:Montevideo Iceland:Reykjavik Latvia:Riga Serbia:Belgrade "
    "Croatia:Zagreb Bulgaria:Sofia Romania:Bucharest Senegal:Dakar Angola:Luanda Zambia:Lusaka Uganda:Kampala"
)

PLURALS = pairs(
    "apple:apples river:rivers stone:stones house:houses tree:trees bird:birds boat:boats lamp:lamps table:tables "
    "chair:chairs book:books cup:cups door:doors garden:gardens horse:horses hat:hats key:keys cloud:clouds "
    "window:windows letter:letters road:roads ring:rings song:songs star:stars spoon:spoons wolf:wolves leaf:leaves "
    "knife:knives shelf:shelves loaf:loaves box:boxes fox:foxes bus:buses glass:glasses dish:dishes brush:brushes "
    "peach:peaches branch:branches city:cities baby:babies berry:berries story:stories lady:ladies pony:ponies "
    "man:men woman:women child:children foot:feet tooth:teeth goose:geese mouse:mice sheep:sheep fish:fish "
    "bridge:bridges candle:candles basket:baskets bottle:bottles button:buttons flower:flowers kettle:kettles "
    "ladder:ladders mirror:mirrors pencil:pencils pillow:pillows ribbon:ribbons"
)

OPPOSITES = pairs(
    "hot:cold big:small tall:short old:new fast:slow hard:soft wet:dry dark:light full:empty early:late "
    "open:closed loud:quiet clean:dirty happy:sad rich:poor strong:weak thick:thin deep:shallow "
    "near:far high:low wide:narrow left:right up:down inside:outside first:last day:night summer:winter "
    "true:false good:bad sweet:sour ancient:modern safe:dangerous rough:smooth sharp:blunt brave:afraid"
)

COLOURS = pairs(
    "banana:yellow lemon:yellow sun:yellow snow:white milk:white salt:white grass:green frog:green pea:green "
    "cucumber:green coal:black night:black crow:black blood:red tomato:red cherry:red ruby:red sky:blue sea:blue "
    "sapphire:blue carrot:orange pumpkin:orange plum:purple violet:purple chocolate:brown bear:brown mud:brown "
    "elephant:grey ash:grey rain:grey flamingo:pink pig:pink rose:pink cotton:white corn:yellow lime:green"
)

YOUNG = pairs(
    "dog:puppy cat:kitten cow:calf sheep:lamb horse:foal pig:piglet goat:kid hen:chick duck:duckling "
    "goose:gosling lion:cub bear:cub deer:fawn frog:tadpole swan:cygnet kangaroo:joey owl:owlet eagle:eaglet "
    "seal:pup fox:kit whale:calf wolf:pup tiger:cub rabbit:bunny"
)

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
NAMES = words(
    "Mara Tom Anna Ben Clara David Ella Frank Gina Hugo Ida Jonas Kira Leo Mia Nora Oscar Paula Quentin Rosa Sam "
    "Tina Ulla Victor Wanda Xenia Yara Zoe Adam Bella Carl Dora Emil Flora Greta Henry Iris Jack Karen Lukas Maria "
    "Nico Olga Peter Rita Simon Tara Uwe Vera Walter Alice Bruno Celia Dario Edith Felix Gloria Heidi Ivan Julia"
)
PLACES = words("river garden market forest harbour school bridge hill station kitchen castle village")


def pick(random: Random, things: Sequence[str]) -> str:
    return things[random.randrange(len(things))]


def several(random: Random, low: int = 3, high: int = 4) -> list[str]:
    return random.sample(list(PLURALS), random.randint(low, high))


def join(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def tell_capital(random: Random) -> str:
    country = pick(random, list(CAPITALS))
    city = CAPITALS[country]
    name = pick(random, NAMES)
    return pick(
        random,
        (
            f"The capital of {country} is {city}.",
            f"{city} is the capital of {country}.",
            f"{name} went to {country} and saw the capital, {city}.",
            f"In {country}, the capital is {city}. {name} lives in {city}.",
            f"{name} comes from {city}, the capital of {country}.",
        ),
    )


def tell_plural(random: Random) -> str:
    one = pick(random, list(PLURALS))
    many = PLURALS[one]
    name = pick(random, NAMES)
    count = pick(random, ("two", "three", "four", "many", "some"))
    return pick(
        random,
        (
            f"The plural of {one} is {many}.",
            f"{name} had one {one}. Now {name} has {count} {many}.",
            f"One {one}, {count} {many}.",
            f"There was {article(one)} by the {pick(random, PLACES)}. Soon there were {count} {many}.",
        ),
    )


def tell_opposite(random: Random) -> str:
    one, other = pick(random, [" ".join(pair) for pair in OPPOSITES.items()]).split()
    return pick(
        random,
        (
            f"The opposite of {one} is {other}.",
            f"It was not {one}, it was {other}.",
            f"{pick(random, NAMES)} said {one}, but {pick(random, NAMES)} said {other}.",
        ),
    )


def tell_colour(random: Random) -> str:
    thing = pick(random, list(COLOURS))
    colour = COLOURS[thing]
    return pick(
        random,
        (
            f"The colour of {thing} is {colour}.",
            f"{pick(random, NAMES)} saw {thing}, and it was {colour}.",
            f"It is {colour}, like {thing}.",
        ),
    )


def tell_young(random: Random) -> str:
    animal = pick(random, list(YOUNG))
    young = YOUNG[animal]
    return pick(
        random,
        (
            f"A young {animal} is called {article(young)}.",
            f"The {animal} had {article(young)}.",
            f"{pick(random, NAMES)} saw the {animal} with the little {young}.",
        ),
    )


def tell_order(random: Random) -> str:
    kind = random.randrange(3)
    if kind == 2:
        start = random.randrange(94)
        run = [str(number) for number in range(start, start + 5)]
    else:
        cycle = DAYS if kind == 0 else MONTHS
        start = random.randrange(len(cycle))
        run = [cycle[(start + step) % len(cycle)] for step in range(4)]
    return pick(random, (", ".join(run) + ".", f"After {run[0]} comes {run[1]}.", f"{run[1]} comes after {run[0]}."))


def tell_list(random: Random) -> str:
    words = several(random)
    lines = "\n".join(f"- {word}" for word in words)
    return pick(
        random,
        (
            f"{pick(random, NAMES)} has {join(words)}:\n{lines}",
            f"{lines}\nThese are {join(words)}.",
            f"{join(words)}. Backwards: {join(words[::-1])}.",
            f"{pick(random, NAMES)} said {join(words)}. And again: {join(words)}.",
        ),
    )


def tell_sum(random: Random) -> str:
    left, right = random.randrange(10), random.randrange(10)
    return pick(random, (f"{left} plus {right} is {left + right}.", f"{left} and {right} make {left + right}."))


def tell_meeting(random: Random) -> str:
    one, other = random.sample(NAMES, 2)
    return pick(
        random,
        (
            f"{one} met {other} at the {pick(random, PLACES)}. Hello, {other}! said {one}. Hello, {one}! said {other}.",
            f"My name is {one}, said {one}. Nice to meet you, {one}! said {other}.",
            f"{one} took {article(pick(random, list(PLURALS)))} to the {pick(random, PLACES)} on {pick(random, DAYS)}.",
        ),
    )


TELLERS: tuple[Callable[[Random], str], ...] = (
    tell_capital,
    tell_capital,
    tell_plural,
    tell_opposite,
    tell_colour,
    tell_young,
    tell_order,
    tell_list,
    tell_list,
    tell_sum,
    tell_meeting,
    tell_meeting,
)


def plain_text(seed: int) -> Iterator[str]:
    """Paragraphs without end."""
    random = Random(seed)
    while True:
        yield " ".join(pick_teller(random)(random) for _ in range(random.randint(2, 5)))


def pick_teller(random: Random) -> Callable[[Random], str]:
    return TELLERS[random.randrange(len(TELLERS))]


def capital_questions(country: str) -> tuple[list[str], str]:
    asked = [
        f"What is the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
    ]
    return asked, f"The capital of {country} is {CAPITALS[country]}."


def plural_questions(one: str) -> tuple[list[str], str]:
    return [f"What is the plural of {one}?", f"One {one}, many what?"], f"The plural of {one} is {PLURALS[one]}."


def opposite_questions(word: str) -> tuple[list[str], str]:
    return [f"What is the opposite of {word}?"], f"The opposite of {word} is {OPPOSITES[word]}."


def colour_questions(thing: str) -> tuple[list[str], str]:
    return [
        f"What is the colour of {thing}?",
        f"Which colour is {thing}?",
    ], f"The colour of {thing} is {COLOURS[thing]}."


def young_questions(animal: str) -> tuple[list[str], str]:
    asked = [f"What is a young {animal} called?", f"What do you call a young {animal}?"]
    return asked, f"A young {animal} is called {article(YOUNG[animal])}."


def next_questions(number: str) -> tuple[list[str], str]:
    asked = [f"Which number comes after {number}?", f"What comes after {number}?"]
    return asked, f"After {number} comes {int(number) + 1}."


def sum_questions(pair: str) -> tuple[list[str], str]:
    left, right = pair.split()
    asked = [f"What is {left} plus {right}?", f"How much is {left} and {right}?"]
    return asked, f"{left} plus {right} is {int(left) + int(right)}."


def greeting_questions(name: str) -> tuple[list[str], str]:
    return [f"My name is {name}.", f"Hi, I am {name}!"], f"Hello, {name}! Nice to meet you, {name}!"


def list_questions(words: str) -> tuple[list[str], str]:
    joined = join(words.split())
    return [f"Make a list of {joined}.", f"Write {joined} as a list."], "\n".join(f"- {word}" for word in words.split())


def backwards_questions(words: str) -> tuple[list[str], str]:
    asked = [f"Say {join(words.split())} backwards.", f"Turn around {join(words.split())}."]
    return asked, join(words.split()[::-1]) + "."


def chat_rows(seed: int = 0, held_out: float = 0.2) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, validation rows) as messages."""
    random = Random(seed)
    lists = sorted({" ".join(several(random)) for _ in range(260)})
    tasks: list[tuple[Sequence[str], Callable[[str], tuple[list[str], str]]]] = [
        (list(CAPITALS), capital_questions),
        (list(PLURALS), plural_questions),
        (list(OPPOSITES), opposite_questions),
        (list(COLOURS), colour_questions),
        (list(YOUNG), young_questions),
        ([str(number) for number in range(10, 98)], next_questions),
        ([f"{left} {right}" for left in range(10) for right in range(10)], sum_questions),
        (NAMES, greeting_questions),
        (lists[::2], list_questions),
        (lists[1::2], backwards_questions),
    ]
    train, validation = [], []
    for subjects, ask in tasks:
        shuffled = random.sample(list(subjects), len(subjects))
        kept_back = round(len(shuffled) * held_out)
        for index, subject in enumerate(shuffled):
            questions, answer = ask(subject)
            if index < kept_back:
                validation.append(_row(pick(random, questions), answer))
            else:
                train += [_row(question, answer) for question in questions]
    random.shuffle(train)
    random.shuffle(validation)
    return train, validation


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(folder: Path) -> None:
    """`train.jsonl` and `validation.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "validation"), chat_rows(), strict=True):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
