"""A shop: find what somebody wants in a catalogue, and buy it."""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np
from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.base import Split, in_split, stable_hash
from roll.agentic.env.game import ActionEnvConfig, ActionParser, Game, Played
from roll.agentic.tools.dialects import BaseDialect, dialect
from roll.agentic.tools.tool import AssistantTurn, ToolSchema
from roll.configs.problems import ConfigProblem
from roll.utils.registry import UnknownNameError


def _schema(name: str, description: str, argument: str, kind: str) -> ToolSchema:
    parameters = {"type": "object", "properties": {argument: {"type": kind}}, "required": [argument]}
    return ToolSchema(name, description, parameters)


SCHEMAS = (
    _schema("search", "Lists the products that fit some words best.", "query", "string"),
    _schema("view", "Tells the details of a product in the list.", "number", "integer"),
    _schema("buy", "Buys a product of the list, which ends the visit.", "number", "integer"),
)
TOLD = [schema.as_openai() for schema in SCHEMAS]
"""The tools as they are described to the chat template."""
ARGUMENTS = {schema.name: next(iter(schema.parameters["properties"])) for schema in SCHEMAS}


@dataclass(frozen=True)
class ShopTurn:
    """Turn of the policy, read as a command."""

    turn: AssistantTurn
    speaks: BaseDialect

    @classmethod
    def read(cls, text: str, speaks: BaseDialect) -> ShopTurn | None:
        """The turn; ``None`` if nothing in it is a call."""
        turn = speaks.parse(text, SCHEMAS)
        return cls(turn, speaks) if turn.calls or turn.errors else None

    @property
    def command(self) -> str:
        """The first call as one of the shop's text commands; empty if it is none."""
        if not self.turn.calls:
            return ""
        call = self.turn.calls[0]
        return f"{call.name} {call.arguments.get(ARGUMENTS.get(call.name, ''), '')}"

    def answers(self, observation: str) -> list[dict[str, Any]]:
        """Tool messages, one for each call."""
        contents = [observation] + ["error: not run, one call at a time"] * (len(self.turn.calls) - 1)
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            for call, content in zip(self.turn.calls, contents, strict=False)
        ]
        return messages + [{"role": "tool", "content": self.speaks.error_text(error)} for error in self.turn.errors]


KINDS = ("basket", "blanket", "bowl", "chair", "clock", "hat", "knife", "lamp", "mirror", "mug", "scarf", "shelf")
ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "colour": ("black", "blue", "green", "red", "white", "yellow"),
    "material": ("glass", "leather", "oak", "steel", "tin", "wool"),
    "size": ("large", "medium", "small"),
}


@dataclass(frozen=True)
class Shelves:
    """Recipe of a catalogue: the words and numbers that it is drawn from."""

    kinds: tuple[str, ...]
    attributes: tuple[tuple[str, ...], ...]
    """Values of each attribute."""
    num_shown: int
    """Attributes that a title says; the others are details."""
    num_products: int
    max_price: int
    num_results: int
    """Products on a page of results."""
    seed: int


@dataclass(frozen=True)
class Product:
    """A thing to buy."""

    kind: str
    values: tuple[str, ...]
    """One of each attribute, in their order."""
    price: int
    """In francs."""

    def title(self, num_shown: int) -> str:
        """As the results list it and the search knows it."""
        return " ".join((*self.values[:num_shown], self.kind))


@dataclass(frozen=True)
class Goal:
    """Demands of a customer."""

    kind: str
    values: tuple[str, ...]
    limit: int
    """Most francs."""

    def score(self, product: Product) -> float:
        """Share of the demands that the product meets: its attributes, the price, the kind; 0 for another kind."""
        if product.kind != self.kind:
            return 0.0
        met = sum(wanted == value for wanted, value in zip(self.values, product.values, strict=True))
        return (1 + met + (product.price <= self.limit)) / (2 + len(self.values))


class Catalogue:
    """Products and the search over them.

    Raises:
        ModuleNotFoundError: bm25s is not installed.
    """

    def __init__(self, shelves: Shelves, products: Sequence[Product] | None = None) -> None:
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("shop searches with the package bm25s: pip install 'roll-rl[tools]'") from error
        self.shelves = shelves
        self.products = list(_drawn(shelves) if products is None else products)
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(self._words([self.title(place) for place in range(len(self.products))]), show_progress=False)
        self.search = lru_cache(maxsize=4096)(self._search)

    def title(self, place: int) -> str:
        """Of the product at this place of the catalogue."""
        return self.products[place].title(self.shelves.num_shown)

    @cached_property
    def goals(self) -> list[Goal]:
        """Goals at the price of a product, for all of which the search of the whole title lists one that meets them."""
        wanted = dict.fromkeys(Goal(product.kind, product.values, product.price) for product in self.products)
        return [
            goal for goal in wanted if any(goal.score(self.products[n]) == 1 for n in self.search(self.query(goal)))
        ]

    def query(self, goal: Goal) -> str:
        """The title of what is wanted."""
        return Product(goal.kind, goal.values, goal.limit).title(self.shelves.num_shown)

    def _search(self, query: str) -> tuple[int, ...]:
        """The places of the products that fit best, the best one first; equal ones as in the catalogue."""
        words = self._words([query])[0]
        if not words:
            return ()
        scores = np.round(self._index.get_scores(words), 4)  # what fits equally well may differ in the last bit
        best = np.argsort(-scores, kind="stable")[: self.shelves.num_results]
        return tuple(int(place) for place in best if scores[place] > 0)

    def _words(self, texts: list[str]) -> list[list[str]]:
        return list(self._tokenize(texts, return_ids=False, show_progress=False))


@lru_cache(maxsize=16)
def catalogue(shelves: Shelves) -> Catalogue:
    """The catalogue of these shelves, made once in a process."""
    return Catalogue(shelves)


def _drawn(shelves: Shelves) -> Iterator[Product]:
    rng = random.Random(shelves.seed)
    for _ in range(shelves.num_products):
        kind, values = rng.choice(shelves.kinds), tuple(map(rng.choice, shelves.attributes))
        yield Product(kind, values, rng.randint(1, shelves.max_price))


def titles(kinds: Sequence[str], shown: Sequence[Sequence[str]]) -> list[str]:
    """Every title that a product may have."""
    return [" ".join(words) for words in itertools.product(*shown, kinds)]


Words = Annotated[list[str], Field(min_length=2)]

_COMMAND = re.compile(r"(search) (.+)|(view|buy) ([1-9][0-9]?)")
_MAX_QUERY = 100


class ShopConfig(ActionEnvConfig):
    """Keys of ``env_config`` for ``env_type: shop``."""

    max_steps: int = Field(8, ge=1, description="Steps after which the episode is truncated.")
    kinds: Words = Field(list(KINDS), description="Kinds of products, a word each.")
    attributes: dict[str, Words] = Field(
        {name: list(values) for name, values in ATTRIBUTES.items()},
        min_length=1,
        description="Attributes of products and their values, a word each.",
    )
    num_shown: int = Field(
        2, ge=0, description="The first attributes, which titles contain and the search indexes; view shows the others."
    )
    num_products: int = Field(800, ge=2, le=20_000, description="Products of the catalogue.")
    num_results: int = Field(5, ge=1, le=20, description="Products on a page of results.")
    max_price: int = Field(60, ge=2, description="Highest price, in francs.")
    catalogue_seed: int = Field(0, ge=0, description="Draws the catalogue, which is the same in all episodes.")
    split: Split = Field("all", description="Which goals are drawn: train and eval share no product.")
    holdout_fraction: float = Field(0.2, gt=0, lt=1, description="Share of the goals that belongs to the eval split.")
    step_penalty: float = Field(0.0, le=0, description="Task reward of every step.")
    goal_reward: float = Field(1.0, ge=0, description="Task reward of the right product; others earn a part of it.")
    dialect: str | None = Field(
        None, description="Tool dialect: commands are tool calls, which the chat template describes; null: text."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Rules that pydantic cannot state."""
        yield from super().problems()
        try:
            if self.dialect is not None:
                dialect(self.dialect)
        except UnknownNameError as error:
            yield self.problem("dialect", "a tool dialect", hint=str(error))
        words = [*self.kinds, *(value for values in self.attributes.values() for value in values)]
        odd = [word for word in words if not re.fullmatch("[a-z]{2,}", word)]
        twice = [word for word in dict.fromkeys(words) if words.count(word) > 1]
        if odd or twice:
            seen = (odd or twice)[0]
            expected = "words of at least two letters a to z" if odd else "every word once, in kinds and attributes"
            yield self.problem("attributes", expected, "kinds", got=seen)
        if self.num_shown > len(self.attributes):
            yield self.problem("num_shown", f"at most {len(self.attributes)}, the attributes", "attributes")

    def shelves(self) -> Shelves:
        """Returns the recipe of the catalogue."""
        return Shelves(
            tuple(self.kinds),
            tuple(map(tuple, self.attributes.values())),
            self.num_shown,
            self.num_products,
            self.max_price,
            self.num_results,
            self.catalogue_seed,
        )

    def in_split(self, goal: Goal) -> bool:
        """True for a goal of the asked split, which the wanted product decides."""
        wanted = stable_hash(" ".join((goal.kind, *goal.values)).encode())
        return in_split(wanted, self.split, self.holdout_fraction)


class ShopEnv(Game):
    """One wish per seed. Three commands: ``search <words>``, ``view <number>`` of a result, ``buy <number>``.

    What is bought ends the episode and is paid by the share of the demands that it meets.

    Raises:
        ValueError: the catalogue has nothing to wish for in this split.
    """

    config: ShopConfig
    config_class = ShopConfig
    action_names: Sequence[str] = ("view 1", "buy 1", *(f"search {kind}" for kind in KINDS))
    instant = True

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        self.catalogue: Catalogue = catalogue(config.shelves())
        self._goals = [goal for goal in self.catalogue.goals if config.in_split(goal)]
        if not self._goals:
            raise ValueError(f"num_products: got {config.num_products}, too few for a goal of the split {config.split}")
        if config.env_instruction is None:
            self.env_instruction = _INSTRUCTION if config.dialect is None else _TOOLS_INSTRUCTION
        numbers = [f"{verb} {number}" for verb in ("buy", "view") for number in range(1, config.num_results + 1)]
        shown = list(config.attributes.values())[: config.num_shown]
        self.action_names = [*numbers, *(f"search {title}" for title in titles(config.kinds, shown))]
        self._parser = ActionParser((), config.action_pattern)
        self._speaks = None if config.dialect is None else dialect(config.dialect)
        self._goal = self._goals[0]
        self._results: tuple[int, ...] = ()
        self._viewed: set[int] = set()
        self._news = ""
        self._turn: ShopTurn | None = None
        self.observation_space = Text(max_length=4096, charset=string.printable)

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts with the seed's wish."""
        rng = random.Random(seed)
        wish = rng.choice(self._goals)
        self._goal = Goal(wish.kind, wish.values, wish.limit + rng.randint(0, self.config.max_price // 4))
        self._results, self._viewed, self._news, self._turn = (), set(), "", None

    def play(self, text: str) -> Played:
        """Does what the text says; what cannot be done, or is no command, changes nothing."""
        before = self.state_key()
        turn = self._turn = None if self._speaks is None else ShopTurn.read(text, self._speaks)
        said = self._parser.answer(text) if turn is None else turn.command
        command = _command(said or "")
        bought = self._do(*command) if command else None
        score = 0.0 if bought is None else self._goal.score(self.catalogue.products[bought])
        reward = self.config.reward_scale * (self.config.step_penalty + self.config.goal_reward * score)
        effective = bought is not None or self.state_key() != before
        return Played(" ".join(command) if command else None, reward, effective, bought is not None, score == 1)

    def expert_actions(self) -> list[str]:
        """Buying what is known to be right; else looking at what may be; else searching for the title."""
        products, shown = self.catalogue.products, self.config.num_shown
        right, open_ones = [], []
        for number, place in enumerate(self._results, 1):
            product = products[place]
            known = place in self._viewed or shown == len(self._goal.values)
            if known and self._goal.score(product) == 1:
                right.append(f"buy {number}")
            in_title = product.kind == self._goal.kind and product.values[:shown] == self._goal.values[:shown]
            if not known and in_title and product.price <= self._goal.limit:
                open_ones.append(f"view {number}")
        return right or open_ones or [f"search {self.catalogue.query(self._goal)}"]

    def _do(self, verb: str, argument: str) -> int | None:
        """Carries a command out; returns what was bought."""
        self._news = ""
        if verb == "search":
            self._results = self.catalogue.search(argument)
            self._news = "" if self._results else "Nothing found."
            return None
        if int(argument) > len(self._results):
            self._news = f"There is no result {argument}."
            return None
        place = self._results[int(argument) - 1]
        if verb == "view":
            self._viewed.add(place)
            return None
        self._news = f"You bought: {self._line(place)}."
        self._results = ()
        return place

    def observation(self) -> str:
        shown = self.config.num_shown
        goal = self._goal
        hidden = "".join(f", {value}" for value in goal.values[shown:])
        lines = [f"Wanted: {self.catalogue.query(goal)}{hidden}, at most {goal.limit} francs."]
        lines += [f"{number}. {self._line(place)}" for number, place in enumerate(self._results, 1)]
        return "\n".join([*lines, *([self._news] if self._news else [])])

    def _line(self, place: int) -> str:
        product = self.catalogue.products[place]
        details = product.values[self.config.num_shown :] if place in self._viewed else ()
        return ", ".join((self.catalogue.title(place), f"{product.price} francs", *details))

    def more_info(self) -> dict[str, Any]:
        """The tools, and what they have answered."""
        if self._speaks is None:
            return {}
        answers = {} if self._turn is None else {"messages": self._turn.answers(self.observation())}
        return {"tools": TOLD, **answers}

    def state_key(self) -> str:
        return stable_hash(repr((self._goal, self._results, sorted(self._viewed))).encode())


def _command(said: str) -> tuple[str, str] | None:
    """Verb and argument, in small letters and with single spaces; ``None`` if there is none."""
    match = _COMMAND.fullmatch(" ".join(said.lower().split()))
    if match is None:
        return None
    return match[1] or match[3], (match[2] or match[4])[:_MAX_QUERY]


_COMMANDS = "search <words> lists products, view <number> tells the details of one, buy <number> buys it and ends."
_INSTRUCTION = (
    "You buy in a shop for somebody. Find a product that has everything that is wanted and costs no more than it may. "
    f"{_COMMANDS} Answer with one command, like this: <answer>search red wool scarf</answer>"
)
_TOOLS_INSTRUCTION = (
    "You buy in a shop for somebody, with one call of a tool at a time. Find a product that has everything that is "
    "wanted and costs no more than it may, and buy it."
)
