"""Short Python functions with a one-line description: shapes for training, and other shapes for held-out text."""

from __future__ import annotations

import random
from dataclasses import dataclass

_VERBS = ("add", "get", "make", "compute", "find", "next", "check", "change", "new", "do")
_NOUNS = ("value", "number", "total", "result", "price", "score", "size", "item", "length", "count", "name", "word")
_LISTS = ("numbers", "values", "items", "words", "names", "prices", "scores", "lines")
_OPS = (("+", "adds {k} to"), ("-", "takes {k} away from"), ("*", "multiplies by {k}"), ("//", "divides by {k}"))


@dataclass(frozen=True)
class Snippet:
    """Source text, and what it does in the third person ("adds 2 to a number")."""

    source: str
    task: str


def training_snippet(rng: random.Random) -> Snippet:
    shapes = (_arithmetic, _loop_sum, _condition, _list_filter, _text, _count_up, _biggest)
    return rng.choice((*shapes, _counter, _number_lines, _try_open, _holder, _repeat, _parse))(rng)


def heldout_snippet(rng: random.Random) -> Snippet:
    return rng.choice((_while_loop, _class, _pairs, _try_int))(rng)


def _name(rng: random.Random) -> str:
    return f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"


def _arithmetic(rng: random.Random) -> Snippet:
    op, task = rng.choice(_OPS)
    k, arg, name = rng.randint(2, 20), rng.choice(_NOUNS), _name(rng)
    task = task.format(k=k) + (f" a {arg}" if task.endswith(("to", "from")) else "")
    if rng.random() < 0.5:
        return Snippet(f"def {name}({arg}):\n    return {arg} {op} {k}\n", task)
    return Snippet(f"def {name}({arg}):\n    result = {arg} {op} {k}\n    print(result)\n    return result\n", task)


def _loop_sum(rng: random.Random) -> Snippet:
    many, one, name = rng.choice(_LISTS), rng.choice(("x", "n", "item", "value")), _name(rng)
    start, op, word = rng.choice(((0, "+", "sum"), (1, "*", "product")))
    body = f"    total = {start}\n    for {one} in {many}:\n        total = total {op} {one}\n    return total\n"
    return Snippet(f"def {name}({many}):\n{body}", f"returns the {word} of all {many}")


def _condition(rng: random.Random) -> Snippet:
    arg, k, name = rng.choice(_NOUNS), rng.randint(1, 50), _name(rng)
    yes, no = rng.sample(("big", "small", "even", "odd", "good", "bad", "yes", "no", "hot", "cold"), 2)
    sign, word = rng.choice(((">", "bigger than"), ("<", "smaller than"), ("==", "equal to")))
    body = f'    if {arg} {sign} {k}:\n        return "{yes}"\n    return "{no}"\n'
    return Snippet(f"def {name}({arg}):\n{body}", f"tells whether the {arg} is {word} {k}")


def _list_filter(rng: random.Random) -> Snippet:
    many, k, name = rng.choice(_LISTS), rng.randint(1, 30), _name(rng)
    sign, word = rng.choice(((">", "above"), ("<", "below")))
    return Snippet(
        f"def {name}({many}):\n    return [x for x in {many} if x {sign} {k}]\n", f"keeps the {many} {word} {k}"
    )


def _text(rng: random.Random) -> Snippet:
    arg, name = rng.choice(("text", "word", "name", "line")), _name(rng)
    call, task = rng.choice(
        (
            ("upper()", f"writes the {arg} in capitals"),
            ("lower()", f"writes the {arg} in small letters"),
            ("strip()", f"removes spaces around the {arg}"),
            ("split()", f"splits the {arg} into words"),
        )
    )
    return Snippet(f"def {name}({arg}):\n    return {arg}.{call}\n", task)


def _count_up(rng: random.Random) -> Snippet:
    a, b, arg = rng.randint(0, 5), rng.randint(6, 30), rng.choice(("i", "n", "k"))
    return Snippet(f"for {arg} in range({a}, {b}):\n    print({arg})\n", f"prints the numbers from {a} to {b - 1}")


def _biggest(rng: random.Random) -> Snippet:
    many, name = rng.choice(_LISTS), _name(rng)
    sign, word = rng.choice(((">", "biggest"), ("<", "smallest")))
    body = f"    best = {many}[0]\n    for x in {many}:\n        if x {sign} best:\n            best = x\n"
    return Snippet(f"def {name}({many}):\n{body}    return best\n", f"finds the {word} of the {many}")


def _counter(rng: random.Random) -> Snippet:
    noun, verb, k = rng.choice(_NOUNS), rng.choice(_VERBS), rng.randint(1, 9)
    body = f"    {noun} = {k}\n\n    def {verb}(self, n):\n        self.{noun} += n\n        return self.{noun}\n"
    return Snippet(f"class {rng.choice(_NOUNS).title()}:\n{body}", f"adds numbers to a {noun}")


def _number_lines(rng: random.Random) -> Snippet:
    many, k, name = rng.choice(_LISTS), rng.randint(2, 9), _name(rng)
    body = f"    n = 0\n    while n < {k}:\n        print({many}[n])\n        n += 1\n"
    if rng.random() < 0.5:
        body = f"    for n, line in enumerate({many}):\n        if n < {k}:\n            print(line)\n"
    return Snippet(f"def {name}({many}):\n{body}", f"prints {k} of the {many}")


def _try_open(rng: random.Random) -> Snippet:
    arg, name = rng.choice(("text", "word", "line")), _name(rng)
    error = rng.choice(("KeyError", "ValueError", "IndexError"))
    body = f"    try:\n        print({arg}[0])\n    except {error}:\n        print(int(0))\n"
    return Snippet(f"def {name}({arg}):\n{body}", f"prints the start of the {arg}")


def _holder(rng: random.Random) -> Snippet:
    a, b = rng.sample(_NOUNS, 2)
    body = f"    def __init__(self, {a}, {b}):\n        self.{b} = {b}\n        self.{a} = {a} + {rng.randint(1, 9)}\n"
    return Snippet(f"class {rng.choice(_VERBS).title()}{a.title()}:\n{body}", f"keeps a {a} and a {b}")


def _repeat(rng: random.Random) -> Snippet:
    arg, many, k, name = rng.choice(_NOUNS), rng.choice(_LISTS), rng.randint(2, 99), _name(rng)
    body = f"    {many} = []\n    while len({many}) < {k}:\n        {many}.append({arg})\n        {arg} = {arg} - 1\n"
    return Snippet(f"def {name}({arg}):\n{body}    return {many}\n", f"counts down from the {arg}, {k} times")


def _parse(rng: random.Random) -> Snippet:
    many, name, k = rng.choice(_LISTS), _name(rng), rng.randint(0, 9)
    body = f"    for i, text in enumerate({many}):\n        try:\n            print(i, int(text))\n"
    body += f"        except ValueError:\n            print({k})\n"
    return Snippet(f"def {name}({many}):\n{body}", f"makes numbers of all {many}, or prints {k}")


def _while_loop(rng: random.Random) -> Snippet:
    arg, k, name = rng.choice(_NOUNS), rng.randint(2, 9), _name(rng)
    body = f"    count = 0\n    while {arg} > 0:\n        {arg} = {arg} - {k}\n        count = count + 1\n"
    return Snippet(f"def {name}({arg}):\n{body}    return count\n", f"counts how often {k} can be taken away")


def _class(rng: random.Random) -> Snippet:
    noun = rng.choice(_NOUNS)
    body = f"    def __init__(self, {noun}):\n        self.{noun} = {noun}\n"
    return Snippet(f"class {noun.title()}:\n{body}", f"keeps a {noun} in an object")


def _pairs(rng: random.Random) -> Snippet:
    many, name = rng.choice(_LISTS), _name(rng)
    body = f"    for i, x in enumerate({many}):\n        print(i, x)\n"
    return Snippet(f"def {name}({many}):\n{body}", f"prints all {many} with their number")


def _try_int(rng: random.Random) -> Snippet:
    arg, name, k = rng.choice(("text", "word", "line")), _name(rng), rng.randint(0, 9)
    body = f"    try:\n        return int({arg})\n    except ValueError:\n        return {k}\n"
    return Snippet(f"def {name}({arg}):\n{body}", f"makes a number of the {arg}")
