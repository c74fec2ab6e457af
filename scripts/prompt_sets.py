"""Write the prompt sets of `sglang-bw ab`: every word was written for this project, the long texts are generated.

`python -m scripts.prompt_sets` writes sglang_bw/experiment/prompt_sets/*.jsonl; a test keeps them so.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "sglang_bw" / "experiment" / "prompt_sets"
Row = dict[str, Any]

CHAT = [
    "Explain to a friend who never cooks how to make a vegetable soup from what is usually left in a fridge.",
    "My neighbour plays the drums every evening. Write a polite note that asks for two quiet evenings a week.",
    "What should I look at before I buy a used bicycle? Give me a list in order of importance.",
    "Write a short story about a lighthouse keeper who finds a letter that is addressed to nobody.",
    "I have to give a five-minute talk about bees to ten-year-olds. Draft it, and keep it lively.",
    "Compare trains and night buses for a trip of 600 kilometres: price, comfort, sleep, luggage.",
    "Summarise the advantages and disadvantages of working from home for somebody who lives alone.",
    "Describe the taste of a ripe pear to someone who has only ever eaten apples.",
    "Plan three days in a small town by the sea, in November, without a car, for two people who like to read.",
    "Why do some people enjoy being frightened by films? Answer in three paragraphs.",
    "Write an e-mail to a supplier: the delivery came ten days late and two boxes were wet.",
    "Give me ten names for a bakery that opens at four in the morning, each with one sentence of explanation.",
    "What is the difference between weather and climate? Use an example from everyday life.",
    "My plant has yellow leaves, and I water it every day. What could be wrong, and what do I do first?",
    "Write a dialogue between a clock that runs late and the person who has to wind it.",
    "Explain how a letter travelled from one city to another two hundred years ago, step by step.",
]
CODE = [
    "Write a Python function that merges overlapping intervals. Explain its complexity and add three tests.",
    "Write a Python class for a least-recently-used cache without using functools or OrderedDict.",
    (
        "This function is slow for long lists. Rewrite it:\n\ndef unique(items):\n    out = []\n"
        "    for item in items:\n        if item not in out:\n            out.append(item)\n    return out"
    ),
    "Write a bash script that renames every .jpeg below a folder to .jpg and prints what it did. Spaces may occur.",
    "Write an SQL query: for each customer, the date of the last order and the sum of the last three orders.",
    "Write a C function that reverses the words of a sentence in place. Say what it does with several blanks.",
    (
        "Find the mistake and correct it:\n\ndef average(values):\n    total = 0\n"
        "    for index in range(1, len(values)):\n        total += values[index]\n    return total / len(values)"
    ),
    "Write a TypeScript function that groups objects by a key, with types that keep the element type.",
    "Implement Dijkstra's shortest path in Python with heapq, and return the path as well as its length.",
    "Write a regular expression for dates such as 2026-03-09 and explain every part. Should it accept 2026-02-31?",
    "Write a Rust function that counts words in a file and prints the ten most frequent ones.",
    "Write a Python generator that reads a large CSV in chunks and yields the mean of a column for each chunk.",
]
MATHS = [
    "A train leaves at 9:40 and arrives at 12:05, with a stop of 12 minutes. How long does it move? Show the steps.",
    "Prove that the sum of two odd numbers is even, and that the product of two odd numbers is odd.",
    "Solve x^2 - 7x + 12 = 0 in two different ways and check both solutions.",
    "A tank holds 240 litres. One pump fills it in 6 hours, another empties it in 10. Both run: when is it full?",
    "How many different five-letter words can be made from the letters of LEVEL? Explain the count.",
    "Derive the formula for the sum of the first n squares by induction.",
    "Two dice are thrown. What is the probability that the sum is a prime number? List the cases.",
    "A shop takes 20 percent off, and then 15 percent off the lower price. What is the total discount, and why not 35?",
    "Find all integers n for which n^2 + n + 41 is divisible by n + 1.",
    "The corners of a triangle are (0, 0), (6, 0) and (2, 5). Compute its area, perimeter and centroid.",
    "Explain why the decimal expansion of 1/7 repeats after six digits.",
    "Differentiate f(x) = x^2 * exp(-x), find its extreme points, and sketch the curve in words.",
]
TASKS = [
    ("Find out whether the meeting room Oak is free on Thursday at 14:00, and book it for one hour.", "rooms"),
    (
        "The build of branch release-4 fails. Look at the log, tell the cause, and open a ticket if it is a test.",
        "build",
    ),
    ("How warm will it be in Bergen and in Porto tomorrow? Which of them is better for a walk?", "weather"),
    ("Read config.yaml, set the timeout to 30 seconds, and run the tests afterwards.", "files"),
    ("Customer 4711 says that an invoice was paid twice. Check the payments and prepare a refund.", "payments"),
    ("Move all notes about the garden into one document and write a summary at its top.", "files"),
    ("Order 40 chairs from the cheapest supplier who delivers before the 20th.", "orders"),
    ("Compare the last two releases: which files were changed most, and by how many lines?", "build"),
]
TOOLS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "rooms": [
        ("list_bookings", "Bookings of a room on a day.", {"room": "string", "day": "string"}),
        ("book_room", "Book a room.", {"room": "string", "day": "string", "start": "string", "minutes": "integer"}),
    ],
    "build": [
        ("read_log", "Log of the last build of a branch.", {"branch": "string", "lines": "integer"}),
        ("diff_stat", "Changed lines of each file between two tags.", {"old": "string", "new": "string"}),
        ("open_ticket", "Open a ticket.", {"title": "string", "text": "string"}),
    ],
    "weather": [("forecast", "Weather of a town on a day.", {"town": "string", "day": "string"})],
    "files": [
        ("read_file", "Read a file.", {"path": "string"}),
        ("write_file", "Write a file.", {"path": "string", "text": "string"}),
        ("run", "Run a command.", {"command": "string"}),
    ],
    "payments": [
        ("list_payments", "Payments of a customer.", {"customer": "integer"}),
        ("refund", "Prepare a refund.", {"payment": "string", "cents": "integer"}),
    ],
    "orders": [
        ("list_offers", "Offers for an article.", {"article": "string", "count": "integer"}),
        ("place_order", "Order from a supplier.", {"supplier": "string", "article": "string", "count": "integer"}),
    ],
}
PLACES = ["the mill", "the north store", "the harbour", "the old school", "the ferry", "the quarry", "the market"]
THINGS = ["sacks of flour", "crates of apples", "barrels of oil", "planks", "bricks", "bales of wool", "window panes"]
NAMES = ["Adam", "Berta", "Cyril", "Dora", "Emil", "Frida", "Gustav", "Hanna", "Ivo", "Jana"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, rows in sets().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


def sets() -> dict[str, list[Row]]:
    """Return every set: name -> rows in the OpenAI form."""
    return {
        "chat": [_row("chat", n, text) for n, text in enumerate(CHAT)],
        "code": [_row("code", n, text) for n, text in enumerate(CODE)],
        "maths": [_row("maths", n, text) for n, text in enumerate(MATHS)],
        "long": [_row("long", n, _ledger(n)) for n in range(4)],
        "agent": [_task(n, text, kit) for n, (text, kit) in enumerate(TASKS)],
    }


def _row(kind: str, number: int, text: str) -> Row:
    return {"id": f"{kind}-{number:02}", "messages": [{"role": "user", "content": text}]}


def _task(number: int, text: str, kit: str) -> Row:
    system = "You work with tools. Call one when you need it, one at a time, and say briefly what you do."
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": what,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in fields.items()},
                    "required": list(fields),
                },
            },
        }
        for name, what, fields in TOOLS[kit]
    ]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"id": f"agent-{number:02}", "messages": messages, "tools": tools}


def _ledger(number: int) -> str:
    """Return 350 entries of a delivery book, about 8000 tokens, and a question that needs several of them."""
    dice = random.Random(number)
    lines = [
        f"{n + 1}. {dice.choice(DAYS)}: {dice.choice(NAMES)} took {dice.randint(2, 60)} {dice.choice(THINGS)} from "
        f"{dice.choice(PLACES)} to {dice.choice(PLACES)}."
        for n in range(350)
    ]
    who, what = dice.choice(NAMES), dice.choice(THINGS)
    question = (
        f"Using the book above: list the first five entries in which {who} carried {what}, add up their numbers, and "
        "describe in a few sentences what kind of work the book is about."
    )
    return "\n".join(["This is a delivery book.", *lines, "", question])


if __name__ == "__main__":
    write()
