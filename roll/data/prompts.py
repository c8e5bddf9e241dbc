"""Datasets of prompts: files to ``Prompt``s, and the order in which a run draws them.

The order is a pure function of the seed, so that a position in it is one integer.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from roll.configs.data import DataArguments, probability_problems
from roll.configs.problems import ConfigErrors
from roll.configs.resuming import Rows
from roll.data.columns import IntArray
from roll.data.files import DataError, Row
from roll.data.pictures import PictureError
from roll.data.prompt_rows import (
    RowError,
    other_columns,
    row_id,
    row_messages,
    row_response,
    row_tag,
    row_tools,
    used_columns,
)
from roll.data.reading import Reading
from roll.data.row_pictures import sources_in, with_items
from roll.data.template_check import LeftOut
from roll.data.tool_messages import Message, Tool
from roll.utils.hashing import derive_seed

if TYPE_CHECKING:
    from roll.data.renderer import ChatRenderer

logger = logging.getLogger(__name__)


__all__ = ["DataError", "LoadReport", "Prompt", "PromptDataset", "check_prompts", "load_prompts"]

_Asked: TypeAlias = tuple[Sequence[Message], Sequence[Tool] | None]
"""A prompt's messages and the tools that it tells of."""

RowCheck: TypeAlias = Callable[[Iterable[tuple[str, "Prompt"]]], Iterable[tuple[str, str]]]
"""Prompts with their places to the places of those that are wrong, with the reason."""


_CHUNK = 1000
"""Prompts that are tokenised together."""

_CHUNK_PER_PROCESS = 20_000
"""Prompts that are worth a process: it takes seconds to start."""
_PICTURED = 100
"""Prompts that take as long as one with pictures, which are decoded."""


@dataclass(frozen=True)
class Prompt:
    """One question of a dataset. Plain data: it crosses processes."""

    id: str
    """The row's ``id`` column, else ``file:row``."""
    tag: str
    """Domain: chooses the rewards."""
    messages: tuple[Message, ...]
    """The conversation that the policy answers, OpenAI's messages; the last is the user's."""
    ground_truth: Any = None
    """The reference answer (the column ``data_args.response``), any JSON value."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, JSON values."""
    tools: tuple[Tool, ...] | None = None
    """Functions that the row tells the policy of, OpenAI's dicts."""
    prompt_ids: IntArray | None = None
    """Token ids where the prompt was truncated to ``prompt_length``, or its tag has a chat template of its own;
    ``None``: render the messages."""

    @property
    def has_pictures(self) -> bool:
        """Tells whether the policy gets pictures: ``Source``s, items where it answers."""
        return any(isinstance(message["content"], list) for message in self.messages)


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows by outcome. ``str`` of it is one line for the log."""

    rows: int
    """Rows read."""
    filtered: int
    """Rows that ``dataset_filter`` left out."""
    overlong: int
    """Prompts of more than ``prompt_length`` tokens."""
    overflow: str
    """Treatment of those: ``data_args.prompt_overflow``."""
    longest: int | None
    """Tokens of the longest prompt as it was read; ``None`` where nothing was rendered."""
    prompt_length: int | None
    tags: Mapping[str, int]
    """Prompts by tag."""
    identity: Rows | None = None
    """Tells the dataset from others."""
    notes: tuple[str, ...] = ()
    """What the chat template leaves out, by file; a line each."""

    @property
    def prompts(self) -> int:
        return sum(self.tags.values())

    def __str__(self) -> str:
        tags = ", ".join(f"{tag} {count:,}" for tag, count in sorted(self.tags.items()))
        words = [f"{self.rows:,} rows read", f"{self.filtered:,} removed by the filter"]
        if self.longest is not None:
            words.append(f"longest {self.longest:,} tokens")
        if self.prompt_length is not None:
            done = "dropped" if self.overflow == "drop" else f"truncated on the {self.overflow}"
            words.append(f"{self.overlong:,} over {self.prompt_length:,} tokens" + f" {done}" * bool(self.overlong))
        return f"{self.prompts:,} prompts ({tags}): {', '.join(words)}"


class PromptDataset(list[Prompt]):
    """Prompts in the order of the files."""

    def __init__(self, prompts: Iterable[Prompt], report: LoadReport) -> None:
        super().__init__(prompts)
        self.report = report

    @property
    def has_pictures(self) -> bool:
        return any(prompt.has_pictures for prompt in self)


def load_prompts(
    args: DataArguments,
    *,
    renderer: ChatRenderer | None,
    prompt_length: int | None,
    allowed_tags: Collection[str] | None,
    seed: int,
    tools: Mapping[str, Sequence[Tool]] | None = None,
    tag_renderers: Mapping[str, ChatRenderer] | None = None,
    check: RowCheck | None = None,
    refused: Mapping[str, str] | None = None,
) -> PromptDataset:
    """Reads, filters and checks the dataset, and fits its prompts to ``prompt_length``.

    Args:
        renderer: counts tokens; ``None`` leaves lengths unchecked.
        prompt_length: most tokens of a rendered prompt; ``None`` for any. Needs a renderer.
        allowed_tags: the domains that have rewards; ``None`` for any.
        tag_renderers: of tags whose prompts ``renderer`` does not render; these keep their ``prompt_ids``.
        check: finds what else is wrong with the rows.
        refused: see ``Reading``.

    Raises:
        DataError: everything that is wrong with the dataset, by file and line.
        ValueError: ``args`` names no dataset, or ``dataset_cls`` cannot be imported.
    """
    assert prompt_length is None or renderer is not None, "prompt_length is counted by a renderer"
    wrong = list(args.problems())
    if wrong or not args.has_dataset:
        wrong = wrong or [args.problem("file_name", "files")]
        raise ConfigErrors([problem.under("data_args") for problem in wrong])
    reading = Reading(args, seed, refused=refused or {})
    renderers = _Renderers(renderer, tag_renderers or {}, prompt_length)
    placed = _placed(reading, allowed_tags, check, renderers)
    reading.require(placed)
    placed = reading.drawn(placed)
    renderers.note(placed, reading)
    fitted, overlong, longest = _fit(placed, renderers, tools or {}, reading)
    reading.problems.raise_any()
    if not fitted:
        raise DataError([_none_fits(overlong, prompt_length, longest)])
    report = LoadReport(
        rows=reading.counts["rows"],
        filtered=reading.counts["filtered"],
        overlong=overlong,
        overflow=args.prompt_overflow,
        longest=longest,
        prompt_length=prompt_length,
        tags=Counter(prompt.tag for prompt in fitted),
        identity=reading.identity(len(fitted)),
        notes=reading.noted(),
    )
    logger.info("%s", report)
    return PromptDataset(fitted, report)


def check_prompts(
    reading: Reading,
    allowed_tags: Collection[str] | None,
    renderer: ChatRenderer | None = None,
    tag_renderers: Mapping[str, ChatRenderer] | None = None,
    check: RowCheck | None = None,
    prompt_length: int | None = None,
) -> tuple[Counter[str], bool]:
    """``Reading.checked`` of what ``load_prompts`` would read; lengths are without the run's own tools.

    Prompts are rendered, and their pictures decoded, where there is a renderer.
    """
    renderers = _Renderers(renderer, tag_renderers or {}, prompt_length)
    placed = _placed(reading, allowed_tags, check, renderers)
    renderers.note(placed, reading)
    fitted, overlong, longest = _fit(placed, renderers, {}, reading)
    tags, whole = reading.checked(item.prompt.tag for item in placed)
    if whole and not fitted:
        raise DataError([_none_fits(overlong, prompt_length, longest)])
    return tags, whole


def _none_fits(overlong: int, prompt_length: int | None, longest: int | None) -> str:
    return (
        f"no prompts: all {overlong:,} have more than prompt_length = {prompt_length} tokens, the longest {longest:,}"
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A prompt and where it was read."""

    prompt: Prompt
    place: str
    file: str


def _placed(
    reading: Reading, allowed_tags: Collection[str] | None, check: RowCheck | None, renderers: _Renderers
) -> list[_Placed]:
    """The rows that the filter keeps, as prompts, each with an id of its own."""
    args, used = reading.args, used_columns(reading.args)

    def read(row: Row) -> tuple[_Placed, str]:
        prompt = Prompt(
            id=row_id(row.values, args, row.name),
            tag=row_tag(row.values, args, allowed_tags),
            messages=row_messages(row.values, args, reading.reach(row)),
            ground_truth=row_response(row.values, args),
            extra_info=other_columns(row.values, used),
            tools=row_tools(row.values, args),
        )
        reading.allow(prompt.messages)
        if prompt.tag in renderers.by_tag and prompt.has_pictures:
            raise RowError(
                f"pictures in a prompt of the tag {prompt.tag!r}, expected none with data_args.tag_templates"
            )
        return _Placed(prompt, row.place, row.file), row.name

    placed, taken = list[_Placed](), set[str]()
    for item, name in reading.each(read):
        if item.prompt.id in taken:  # told apart by its place
            reading.note(item.file, "ids that others have too, so they are followed by file:row", item.place)
            item = replace(item, prompt=replace(item.prompt, id=f"{item.prompt.id} {name}"))
        taken.add(item.prompt.id)
        truth = item.prompt.ground_truth
        if args.response is not None and (truth.strip() if isinstance(truth, str) else truth) in (None, "", [], {}):
            reading.note(item.file, f"empty reference answers (column {args.response!r})", item.place)
        placed.append(item)
    if check is not None:
        for place, reason in check((item.place, item.prompt) for item in placed):
            reading.problems.add(place, reason)
    return placed


@dataclass(frozen=True)
class _Renderers:
    """Renderers of prompts, by tag, and the length that prompts may have."""

    general: ChatRenderer | None
    by_tag: Mapping[str, ChatRenderer]
    prompt_length: int | None

    def note(self, placed: Sequence[_Placed], reading: Reading) -> None:
        """Notes what templates leave out of prompts."""
        if self.general is None:
            return
        general = LeftOut(self.general, "prompt")
        left_out = {tag: LeftOut(renderer, "prompt") for tag, renderer in self.by_tag.items()}
        for item in placed:
            prompt = item.prompt
            for what in left_out.get(prompt.tag, general).of(prompt.messages, (), prompt.tools):
                reading.note(item.file, what, item.place)

    def encode(
        self, placed: Sequence[_Placed], tools: Mapping[str, Sequence[Tool]], num_workers: int
    ) -> list[_Measured]:
        """In the order of ``placed``."""
        shares = defaultdict[str, list[int]](list)
        for index, item in enumerate(placed):
            shares[item.prompt.tag if item.prompt.tag in self.by_tag else ""].append(index)
        found: dict[int, _Measured] = {}
        for tag, indices in shares.items():
            renderer = self.by_tag.get(tag, self.general)
            assert renderer is not None
            keep_over = -1 if tag in self.by_tag else np.inf if self.prompt_length is None else self.prompt_length
            share = [placed[index] for index in indices]
            found |= zip(indices, _encode(renderer, share, keep_over, tools, num_workers), strict=True)
        return [found[index] for index in range(len(placed))]


def _fit(
    placed: Sequence[_Placed], renderers: _Renderers, tools: Mapping[str, Sequence[Tool]], reading: Reading
) -> tuple[list[Prompt], int, int | None]:
    """Prompts of at most ``prompt_length`` tokens, how many had more, and the length of the longest."""
    args, problems = reading.args, reading.problems
    if renderers.general is None:
        return [item.prompt for item in placed], 0, None
    fitted, overlong, longest = [], 0, 0
    prompt_length = renderers.prompt_length
    encoded = renderers.encode(placed, tools, args.preprocessing_num_workers or 1)
    for item, measured in zip(placed, encoded, strict=True):
        if measured.error is not None:
            problems.add(item.place, measured.error)
            continue
        longest = max(longest, measured.length)
        if measured.ids is None and (prompt_length is None or measured.length <= prompt_length):
            fitted.append(item.prompt)
            continue
        if prompt_length is None or measured.length <= prompt_length:
            fitted.append(replace(item.prompt, prompt_ids=measured.ids))
            continue
        overlong += 1
        if args.prompt_overflow == "error" or (item.prompt.has_pictures and args.prompt_overflow != "drop"):
            expected = f"expected at most prompt_length = {prompt_length} (see data_args.prompt_overflow)"
            uncut = ", as a prompt with pictures is not cut" if args.prompt_overflow != "error" else ""
            problems.add(item.place, f"{measured.length:,} tokens, {expected}{uncut}")
            continue
        done = "dropped" if args.prompt_overflow == "drop" else f"truncated on the {args.prompt_overflow}"
        reading.note(item.file, f"prompts of more than prompt_length = {prompt_length} tokens are {done}", item.place)
        if args.prompt_overflow != "drop":
            assert measured.ids is not None, "those without pictures keep them"
            ids = measured.ids[-prompt_length:] if args.prompt_overflow == "left" else measured.ids[:prompt_length]
            fitted.append(replace(item.prompt, prompt_ids=ids))
    return fitted, overlong, longest


@dataclass(frozen=True, slots=True)
class _Measured:
    """A rendered prompt: ``ids`` only where they are needed, ``error`` where the template refused it."""

    length: int = 0
    ids: IntArray | None = None
    error: str | None = None


def _encode(
    renderer: ChatRenderer,
    placed: Sequence[_Placed],
    keep_over: float,
    tools: Mapping[str, Sequence[Tool]],
    num_workers: int,
) -> Iterator[_Measured]:
    """Prompts of one renderer; those of more than ``keep_over`` tokens keep their ids."""
    asked = [(item.prompt.messages, tools.get(item.prompt.tag) or item.prompt.tools) for item in placed]
    pictured = sum(item.prompt.has_pictures for item in placed)
    num_workers = min(num_workers, (len(placed) + pictured * _PICTURED) // _CHUNK_PER_PROCESS)
    if num_workers < 2:
        for part in _cut(asked, _CHUNK):
            yield from _measure(renderer, part, keep_over)
        return
    parts = _cut(asked, -(-len(placed) // num_workers))
    # Not forked: this process may have threads, of the tokenizer's own for one.
    with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
        running = [pool.submit(_measure, renderer, part, keep_over) for part in parts]
        for future in running:
            yield from future.result()


def _cut(asked: Sequence[_Asked], size: int) -> list[Sequence[_Asked]]:
    return [asked[start : start + size] for start in range(0, len(asked), size)]


def _measure(renderer: ChatRenderer, asked: Sequence[_Asked], keep_over: float) -> list[_Measured]:
    """Renders prompts, those that follow one another with the same tools together.

    Those with pictures are rendered one by one, with blank ones, so that no more than one is held.
    """
    found: list[_Measured] = []
    for (_, shows), part in itertools.groupby(asked, key=lambda one: (id(one[1]), bool(sources_in(one[0])))):
        if shows:
            found += [_measure_shown(renderer, *one) for one in part]
            continue
        found += [
            _Measured(len(ids), ids if len(ids) > keep_over else None)
            if isinstance(ids, np.ndarray)
            else _Measured(error=f"{_REFUSED}: {ids}")
            for ids in _render(renderer, list(part))
        ]
    return found


def _measure_shown(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Tool] | None) -> _Measured:
    from jinja2 import TemplateError

    try:
        return _Measured(len(renderer.prompt(with_items(messages, renderer.pictures, blank=True), tools)))
    except PictureError as error:
        return _Measured(error=str(error))
    except TemplateError as error:
        return _Measured(error=f"{_REFUSED}: {error}")


_REFUSED = "the chat template cannot render the messages"


def _render(renderer: ChatRenderer, asked: Sequence[_Asked]) -> list[IntArray | str]:
    """The ids of prompts with equal tools, or why the template refuses them."""
    from jinja2 import TemplateError

    try:
        return [*renderer.prompts([messages for messages, _ in asked], asked[0][1])]
    except TemplateError as error:
        if len(asked) == 1:
            return [str(error)]
        return [rendered for one in asked for rendered in _render(renderer, [one])]


_BLOCK = 1024
"""Draws whose domains are chosen together. Part of the order: another number, another order."""

_CACHED = 16


class PromptSampler:
    """``sampler[n]`` is the prompt of the n-th draw of a run, n = 0, 1, 2 …, in any order of access.

    Each domain is met in epochs: every prompt of it once, then every prompt again in a new order. Without
    ``interleave_probs`` the whole dataset is one domain. With them each draw's domain is random by its share, and
    small domains repeat sooner than large ones.

    Args:
        shuffle: a new order in every epoch; otherwise that of the dataset.
        interleave_probs: share of each domain, all positive, sum 1; every prompt belongs to one of them.
        domain_of_tag: the domains of the tags, where domains are not the tags themselves.

    Raises:
        ValueError: no prompts, shares that are no distribution, a domain without prompts, or a tag without a share.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        interleave_probs: Mapping[str, float] | None = None,
        domain_of_tag: Mapping[str, str] | None = None,
    ) -> None:
        if not dataset:
            raise ValueError("the dataset has no prompts, expected at least one")
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        if interleave_probs is None:
            self._names = [""]
            self._members = [np.arange(len(dataset), dtype=np.int64)]
            self._mixer = None
        else:
            if wrong := list(probability_problems(dict(interleave_probs))):
                raise ConfigErrors(wrong)
            # Sorted, so that the order of the keys in a file does not matter.
            self._names = sorted(interleave_probs)
            self._members = _members(dataset, self._names, domain_of_tag or {})
            self._mixer = _Mixer([interleave_probs[name] for name in self._names], seed)
        self._order = lru_cache(maxsize=_CACHED * len(self._names))(self._make_order)

    def __getitem__(self, n: int) -> Prompt:
        domain, turn = self._locate(n)
        members = self._members[domain]
        epoch, position = divmod(turn, len(members))
        return self._dataset[int(members[self._order(domain, epoch)[position]])]

    def epoch_of(self, n: int) -> int:
        """Number of times that the prompt of the n-th draw was drawn before."""
        domain, turn = self._locate(n)
        return turn // len(self._members[domain])

    def _locate(self, n: int) -> tuple[int, int]:
        """The domain of draw ``n``, and how many earlier draws were of that domain."""
        if n < 0:
            raise IndexError(f"draw {n}, expected at least 0")
        return (0, n) if self._mixer is None else self._mixer.locate(n)

    def _make_order(self, domain: int, epoch: int) -> IntArray:
        size = len(self._members[domain])
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        seed = derive_seed(self._seed, "prompts", "order", self._names[domain], epoch)
        return np.random.Generator(np.random.PCG64(seed)).permutation(size)


class _Mixer:
    """Domain of each draw. Blocks of draws are seeded by their number; their counts are summed as needed."""

    def __init__(self, probs: Sequence[float], seed: int) -> None:
        # The last bound is left out: whatever rounding leaves above the others is the last domain's.
        self._bounds = np.cumsum(probs)[:-1]
        self._num_domains = len(probs)
        self._seed = seed
        self._before = [np.zeros(self._num_domains, dtype=np.int64)]  # draws of each domain before each block
        self._domains = lru_cache(maxsize=_CACHED)(self._make_domains)

    def locate(self, n: int) -> tuple[int, int]:
        block, position = divmod(n, _BLOCK)
        while len(self._before) <= block:
            counts = np.bincount(self._domains(len(self._before) - 1), minlength=self._num_domains)
            self._before.append(self._before[-1] + counts)
        domains = self._domains(block)
        domain = int(domains[position])
        return domain, int(self._before[block][domain] + np.count_nonzero(domains[:position] == domain))

    def _make_domains(self, block: int) -> IntArray:
        generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "prompts", "domains", block)))
        return np.searchsorted(self._bounds, generator.random(_BLOCK), side="right").astype(np.int64)


def _members(dataset: Sequence[Prompt], domains: Sequence[str], domain_of_tag: Mapping[str, str]) -> list[IntArray]:
    """Indices of each domain's prompts, in the order of the dataset."""
    members: dict[str, list[int]] = {domain: [] for domain in domains}
    unknown: dict[str, int] = {}
    for index, prompt in enumerate(dataset):
        domain = domain_of_tag.get(prompt.tag, prompt.tag)
        if domain in members:
            members[domain].append(index)
        else:
            unknown[domain] = unknown.get(domain, 0) + 1
    if unknown:
        seen = ", ".join(f"{domain!r} ({count:,} prompts)" for domain, count in sorted(unknown.items()))
        raise ValueError(
            f"domain_interleave_probs: got no share for {seen}, expected one for every domain of the dataset; "
            f"it names {', '.join(domains) or 'none'}"
        )
    empty = [domain for domain in domains if not members[domain]]
    if empty:
        raise ValueError(
            f"domain_interleave_probs: got {', '.join(empty)}, for which the dataset has no prompts; expected domains "
            "of the dataset"
        )
    return [np.array(members[domain], dtype=np.int64) for domain in domains]
