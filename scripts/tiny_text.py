"""The small world that the tiny model knows: facts, the plain text that tells them, and the questions about them.

`plain_text` is what the base model reads while it is made: stories, lists and sums, and never a question. `chat_rows`
are the questions of the finetune. What is asked in the validation rows (a country, a word, a name, a pair of numbers)
is asked in no training row, so a right answer there shows that answering was learnt, not the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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
PLACES = words("river garden market forest harbour school bridge hill station kitchen castle village")
NAMES = [
    first + last
    for first in words("Ma Ta Be Lo Ki Ra Su No Da Fe Jo Vi El An Or Mi Pe Ga Lu He")
    for last in words("ra na ben lia dor mek tis vo ron nia lin sa ko rin da mo")
]
THINGS = sorted({*PLURALS, *YOUNG, *YOUNG.values(), *PLACES, *COLOURS})


def pick(random: Random, things: Sequence[str]) -> str:
    return things[random.randrange(len(things))]


def join(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + " and " + items[-1]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def some_things(random: Random) -> str:
    return " ".join(random.sample(THINGS, random.randint(3, 4)))


def some_run(random: Random) -> str:
    """Days, months or numbers in their order."""
    cycle = (DAYS, MONTHS, [str(number) for number in range(100)], [str(number) for number in range(100)])
    kind = cycle[random.randrange(len(cycle))]
    start = random.randrange(len(kind))
    return " ".join(kind[(start + step) % len(kind)] for step in range(4))


def some_pair(random: Random) -> str:
    return f"{random.randrange(10)} {random.randrange(10)}"


# Each `tell_…` says one thing about its subject in one of several ways; `one` and `other` are the paragraph's people.


def tell_capital(random: Random, one: str, other: str, country: str) -> str:
    city = CAPITALS[country]
    ways = (
        f"The capital of {country} is {city}.",
        f"{city} is the capital of {country}.",
        f"{one} went to {country} and saw the capital, {city}.",
        f"In {country}, the capital is {city}. {other} lives in {city}.",
        f"{one} comes from {city}, the capital of {country}.",
    )
    return pick(random, ways)


def tell_plural(random: Random, one: str, other: str, thing: str) -> str:
    many = PLURALS[thing]
    count = pick(random, ("two", "three", "four", "many", "some"))
    ways = (
        f"The plural of {thing} is {many}.",
        f"{one} had one {thing}. Now {one} has {count} {many}.",
        f"One {thing}, {count} {many}.",
        f"There was {article(thing)} by the {pick(random, PLACES)}. {other} saw {count} {many}.",
    )
    return pick(random, ways)


def tell_opposite(random: Random, one: str, other: str, word: str) -> str:
    opposite = OPPOSITES[word]
    ways = (
        f"The opposite of {word} is {opposite}.",
        f"It was not {word}, it was {opposite}.",
        f"{one} said {word}, but {other} said {opposite}.",
    )
    return pick(random, ways)


def tell_colour(random: Random, one: str, other: str, thing: str) -> str:
    colour = COLOURS[thing]
    ways = (
        f"The colour of {thing} is {colour}.",
        f"{one} saw {thing}, and it was {colour}.",
        f"{other} likes {colour}, like {thing}.",
    )
    return pick(random, ways)


def tell_young(random: Random, one: str, other: str, animal: str) -> str:
    young = YOUNG[animal]
    ways = (
        f"A young {animal} is called {article(young)}.",
        f"The {animal} had {article(young)}. {one} saw the {young}.",
        f"{other} saw the {animal} with the little {young}.",
    )
    return pick(random, ways)


def tell_run(random: Random, one: str, other: str, run: str) -> str:
    first, second, third, fourth = run.split()
    ways = (
        f"{first}, {second}, {third}, {fourth}.",
        f"After {first} comes {second}.",
        f"After {second} comes {third}.",
        f"{third} comes after {second}.",
        f"{one} said {first}. {other} said {second}.",
    )
    return pick(random, ways)


def tell_things(random: Random, one: str, other: str, things: str) -> str:
    items = things.split()
    lines = "\n".join(f"- {item}" for item in items)
    ways = (
        f"{one} has {join(items)}:\n{lines}\n",
        f"{lines}\nThese are {join(items)}.",
        f"{join(items)}. Backwards: {join(items[::-1])}.",
        f"{one} said {join(items)}, and {other} turned it around: {join(items[::-1])}.",
        f"{other} said {join(items)}. And again: {join(items)}.",
    )
    return pick(random, ways)


def tell_sum(random: Random, one: str, other: str, pair: str) -> str:
    left, right = map(int, pair.split())
    ways = (
        f"{left} plus {right} is {left + right}.",
        f"{left} and {right} make {left + right}.",
        f"{one} has {left}, {other} has {right}. They have {left + right}.",
    )
    return pick(random, ways)


def tell_meeting(random: Random, one: str, other: str, place: str) -> str:
    ways = (
        f"{one} met {other} at the {place}. Hello, {other}! said {one}. Hello, {one}! said {other}.",
        f"My name is {one}, said {one}. Nice to meet you, {one}! said {other}.",
        f"I am {other}! said {other}. Hello, {other}! said {one}.",
        f"{one} took {article(pick(random, THINGS))} to the {place} on {pick(random, DAYS)}.",
    )
    return pick(random, ways)


def one_of(subjects: Iterable[str]) -> Callable[[Random], str]:
    choices = list(subjects)
    return lambda random: pick(random, choices)


TOPICS: tuple[tuple[Callable[[Random], str], Callable[[Random, str, str, str], str]], ...] = (
    (one_of(CAPITALS), tell_capital),
    (one_of(CAPITALS), tell_capital),
    (one_of(PLURALS), tell_plural),
    (one_of(PLURALS), tell_plural),
    (one_of(OPPOSITES), tell_opposite),
    (one_of(OPPOSITES), tell_opposite),
    (one_of(COLOURS), tell_colour),
    (one_of(YOUNG), tell_young),
    (some_run, tell_run),
    (some_things, tell_things),
    (some_things, tell_things),
    (some_pair, tell_sum),
    (some_pair, tell_sum),
    (one_of(PLACES), tell_meeting),
    (one_of(PLACES), tell_meeting),
)


def plain_text(seed: int) -> Iterator[str]:
    """Paragraphs without end. Each stays with two people and two or three subjects, and comes back to them."""
    random = Random(seed)
    while True:
        one, other = random.sample(NAMES, 2)
        topics = [(tell, choose(random)) for choose, tell in (TOPICS[random.randrange(len(TOPICS))] for _ in range(3))]
        sentences = []
        for _ in range(random.randint(4, 7)):
            tell, subject = topics[random.randrange(len(topics))]
            sentences.append(tell(random, *random.sample((one, other), 2), subject))
        yield " ".join(sentences).replace("\n ", "\n")


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
    asked = [f"What is the opposite of {word}?", f"Which word is the opposite of {word}?"]
    return asked, f"The opposite of {word} is {OPPOSITES[word]}."


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
    return asked, f"Backwards: {join(words.split()[::-1])}."


def chat_rows(seed: int = 0, held_out: float = 0.15) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, validation rows) as messages."""
    random = Random(seed)
    things = list(dict.fromkeys(some_things(random) for _ in range(520)))
    tasks: list[tuple[Sequence[str], Callable[[str], tuple[list[str], str]]]] = [
        (list(CAPITALS), capital_questions),
        (list(PLURALS), plural_questions),
        (list(OPPOSITES), opposite_questions),
        (list(COLOURS), colour_questions),
        (list(YOUNG), young_questions),
        ([str(number) for number in range(10, 98)], next_questions),
        ([f"{left} {right}" for left in range(10) for right in range(10)], sum_questions),
        (random.sample(NAMES, 200), greeting_questions),
        (things[::2], list_questions),
        (things[1::2], backwards_questions),
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
