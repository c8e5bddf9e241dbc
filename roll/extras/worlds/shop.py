"""A shop: find what somebody wants in a catalogue, and buy it."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.actions import ActionParser
from roll.agentic.env.base import Split, in_split, stable_hash
from roll.agentic.env.config import ActionEnvConfig
from roll.agentic.env.game import Game, Played
from roll.agentic.tools.dialects import dialect
from roll.configs.problems import ConfigProblem
from roll.extras.worlds.catalogue import ATTRIBUTES, KINDS, Catalogue, Goal, Shelves, catalogue, titles
from roll.extras.worlds.shop_tools import TOLD, ShopTurn
from roll.utils.registry import UnknownNameError

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
            yield self.problem("attributes", expected, "kinds", seen=seen)
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
