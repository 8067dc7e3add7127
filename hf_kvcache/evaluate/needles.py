"""Recall of planted facts: which five-digit codes a cache still finds in a long prompt.

Each prompt is text with one sentence in it, "The secret pass code of Oslo is 48213.", and ends with "The secret pass
code of Oslo is". The greedy continuation must contain the five digits. Completion style, without a chat template, so
that base models can be asked too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CITIES = (
    "Oslo Lima Cairo Paris Quito Tokyo Delhi Dublin Vienna Madrid Havana Nairobi Athens Lisbon Prague Seoul Accra "
    "Berlin Warsaw Rome"
).split()
ANSWER_TOKENS = 8
# A code for each of so many prompts, all different.
MOST = 1000

# Where the prompts of one text start: from character FIRST on, evenly up to TAIL before the end.
FIRST, TAIL = 5_000, 20_000
# More than any tokenizer spends on a token of prose.
CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True)
class Needle:
    """A prompt with a code planted in it.

    Attributes:
        ids: `[1, tokens]`.
        code: the five digits.
        depth: where it was planted, as a share of the text.
        distance: tokens from the first of the planted sentence to the end of the prompt.
    """

    ids: torch.Tensor
    code: str
    depth: float
    distance: int


def code_of(index: int) -> str:
    """Five digits for prompt `index`, unlike those of its neighbours."""
    return str(10007 + (index * 37813 + 38206) % 89989)


def make_needle(tokenizer: Any, text: str, index: int, count: int, tokens: int) -> Needle:
    """Prompt `index` of `count`: equally many at each of five depths, each with text of its own.

    Raises `ValueError` for a text that is too short.
    """
    reach = CHARACTERS_PER_TOKEN * tokens
    if len(text) < TAIL + reach:
        raise ValueError(
            f"needles in prompts of {tokens:,} tokens need a text of {TAIL + reach:,} characters, this one has "
            f"{len(text):,}"
        )
    city, code, depth = CITIES[index % len(CITIES)], code_of(index), DEPTHS[index * len(DEPTHS) // count]
    start = FIRST + index * (len(text) - TAIL - reach) // count
    fact = encode(tokenizer, f" The secret pass code of {city} is {code}.")
    question = encode(tokenizer, f"\n\nThe secret pass code of {city} is")
    opening = opening_ids(tokenizer)
    room = tokens - len(opening) - len(fact) - len(question)
    body = encode(tokenizer, text[start : start + reach])[: max(0, room)]
    if len(body) < max(room, 1):
        raise ValueError(
            f"a prompt of {tokens:,} tokens with {len(fact) + len(question)} for the planted sentence and the question "
            f"needs {room} tokens of text from character {start:,} on, there are {len(body)}"
        )
    place = int(depth * len(body))
    while place > 1 and not tokenizer.decode(body[place - 1 : place]).rstrip(" ").endswith((".", "\n")):
        place -= 1  # between two sentences
    ids = opening + body[:place] + fact + body[place:] + question
    return Needle(torch.tensor([ids]), code, depth, len(ids) - len(opening) - place)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of the text alone."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def opening_ids(tokenizer: Any) -> list[int]:
    """What this tokenizer puts before a text: the begin-of-sequence token, or nothing."""
    begin = getattr(tokenizer, "bos_token_id", None)
    first = list(tokenizer("a").input_ids)[:1]
    return first if begin is not None and first == [begin] else []
