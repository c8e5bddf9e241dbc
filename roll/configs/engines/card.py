"""An engine's card: everything that the rest of the library knows about an engine, without importing it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from roll.configs.base import Config
from roll.configs.engines.arguments import EngineSource, Signature, option_problems
from roll.configs.problems import ConfigProblem

Dtype = Literal["fp32", "bf16", "fp16"]


class EngineOptions(Config):
    """Options of an engine, the keys of ``strategy_config``. An engine without any takes this class."""

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Devices that share a sequence, by key: their product holds one copy of the model."""
        return {}

    @property
    def model_parallel_size(self) -> int:
        """Devices that work on the same sequences."""
        return math.prod(self.parallel_sizes.values())

    @property
    def own_dtype(self) -> tuple[str, Dtype] | None:
        """The key and value of a number format for computation that goes before ``model_args.dtype``, if given."""
        return None


class PassedOnOptions(EngineOptions):
    """Options passed to an external engine's constructor: keys with a field are checked here, others pass through."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class EnginePackage:
    """The Python package of an engine."""

    module: str
    """To import, e.g. ``vllm``."""
    extra: str
    """Of this package, which installs it."""

    @property
    def installed(self) -> bool:
        return self._spec is not None

    @property
    def folder(self) -> Path | None:
        """Folder in which it is installed."""
        folders = (self._spec.submodule_search_locations if self._spec else None) or []
        return next(map(Path, folders), None)

    @property
    def _spec(self) -> ModuleSpec | None:
        try:
            return importlib.util.find_spec(self.module)
        except ModuleNotFoundError:  # of the package that it is a part of
            return None


@dataclass(frozen=True)
class Strategy:
    """One value of ``strategy_name``."""

    path: str
    """``package.module:Class``."""
    trains: bool = False
    scores: bool = False
    generates: bool = False

    def plays(self, role: str) -> bool:
        """Tells whether it does what a role needs."""
        return {"trains": self.trains, "scores": self.scores, "generates": self.generates}[task_of(role)]


VERBS = {"trains": "trains", "scores": "computes log-probs", "generates": "generates"}
"""What a strategy does, as messages and the documentation say it."""


def task_of(role: str) -> Literal["trains", "scores", "generates"]:
    """The verb of a role."""
    if role in ("actor_train", "critic"):
        return "trains"
    return "generates" if role in ("actor_infer", "val_infer") else "scores"


def kind_of(role: str) -> str:
    """The role that another is one of several of: ``teacher`` for ``teachers.maths``; else itself."""
    return "teacher" if role.startswith("teachers.") else role


class EngineCard:
    """Names, abilities and options of an engine. Each engine has a subclass.

    Problems carry keys relative to the role's section, rules across sections whole keys.
    """

    name: ClassVar[str]
    """Folder below ``roll/distributed/strategy``, heading in the documentation."""
    strategies: ClassVar[Mapping[str, Strategy]]
    """By ``strategy_name``."""
    options: ClassVar[type[EngineOptions]] = EngineOptions
    package: ClassVar[EnginePackage | None] = None
    """``None``: PyTorch and Transformers are enough."""
    source: ClassVar[EngineSource | None] = None
    """Source in which the engine names the arguments that options are passed on to."""
    arguments: ClassVar[str] = ""
    """Name of those arguments in messages, e.g. ``vLLM's AsyncEngineArgs``; empty: the card compares options itself."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Those of them that other keys set, and which; also what other engines call an option."""
    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    """Values of ``training_args.optimizer`` that it can train with."""
    trains_modules: ClassVar[bool] = False
    """Trains the modules of Transformers: has Ulysses, Liger kernels, and the attention that Transformers has."""
    rates_parts: ClassVar[bool] = False
    """Trains parts of a model at learning rates of their own (``learning_rate_of``)."""
    packs_modules: ClassVar[bool] = False
    """Lays several sequences in one row of a Transformers module: only in families that keep them apart."""
    ulysses_instead: ClassVar[str] = ""
    """Key of the option that shares sequences in place of ``ulysses_size``."""
    own_attention: ClassVar[bool] = False
    """Chooses among attention kernels of its own, by ``attention_backend``."""
    size_key: ClassVar[str | None] = None
    """Option that says the same as ``num_gpus_per_worker``, of an engine whose workers may hold several devices."""
    spans_nodes: ClassVar[bool] = False
    """One of its workers that generate may have devices on several nodes."""
    scores_prompts: ClassVar[bool] = False
    """Scores given tokens as prompts, which it batches itself: log-probabilities and top tokens, no hidden states."""
    replays: ClassVar[bool] = False
    """Holds requests until the weights are there that sampled their next token in a recorded run."""
    replays_experts: ClassVar[bool] = False
    """Trains with experts that were chosen before (``router_replay``)."""
    tells_experts: ClassVar[bool] = False
    """Tells the experts that sampled and read tokens went through."""
    tells_kept_sets: ClassVar[bool] = False
    """Tells what truncated sampling has left for each sampled token (``replay_kept_sets``)."""
    scores_kept_sets: ClassVar[bool] = False
    """Computes log-probs among kept sets."""
    scores_pictures: ClassVar[bool] = True
    """It was compared on reward models that see, if it trains."""
    pictured: ClassVar[tuple[str, ...] | None] = None
    """Values of ``model_type`` on whose pictures it was compared; ``None``: all that ``roll.models.pictures`` has."""
    keeps_kv: ClassVar[bool] = True
    """Can go on with the keys and values of requests in flight when weights come."""
    splits_heads: ClassVar[bool] = True
    """Devices that share a sequence share its attention heads, whose number they must divide."""
    fit: ClassVar[str | None] = None
    """``module:function`` (role, worker, model's text configuration, whole configuration) that yields what else of a
    model does not fit. Imported where the model is on this machine."""
    frozen_fit: ClassVar[str | None] = None
    """``module:function`` (worker, model's text configuration, names of the frozen parameters, rates of parameters by
    name) that yields which of them cannot be frozen, or have a rate, apart. ``None``: any can."""
    adapter_fit: ClassVar[str | None] = None
    """``module:function`` (worker, model's text configuration, names of the adapted layers) that yields what of an
    adapter does not fit. ``None``: all does."""

    def strategy(self, name: str) -> Strategy:
        """The strategy that a name means: one of the card's, or a path of its class, or of a card with one."""
        by_path = {strategy.path: strategy for strategy in self.strategies.values()}
        return self.strategies.get(name) or by_path.get(name) or next(iter(self.strategies.values()))

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
        """Keys and values that are passed on and that the engine would refuse, keys relative to ``strategy_config``."""
        if not self.arguments:
            return iter(())
        own, known = self.options.model_fields, self.signature(options)
        return option_problems(options, own, known, self.elsewhere, self.arguments)

    def passed_on(self, options: Mapping[str, Any]) -> list[str]:
        """Keys that no field of the options is for."""
        return [key for key in options if key not in self.options.model_fields]

    def installed_at(self, options: Mapping[str, Any]) -> Path | None:
        """The folder of the package in the environment that the engine runs in."""
        return self.package.folder if self.package else None

    def signature(self, options: Mapping[str, Any]) -> Signature:
        """Arguments of the engine that is installed, else of the version that is pinned; none without a source."""
        return self.source.signature(self.installed_at(options)) if self.source else Signature({})

    def rules(self, role: str, worker: Any, config: Any) -> Iterator[ConfigProblem]:
        """Rules between the engine's options and other keys, whole keys.

        Args:
            worker: the role's ``WorkerConfig``, which imports the cards.
            config: the run's ``PipelineConfig``.
        """
        return iter(())

    def no_states(self, options: Any) -> str:
        """The option with which layers that carry a state cannot run on one sequence of a packed row after another."""
        return ""

    def package_problem(self, worker: Any) -> ConfigProblem | None:
        """The reason why the engine cannot be imported on this machine."""
        if self.package is None or self.package.installed:
            return None
        name = worker.strategy_args.strategy_name
        return missing_package("strategy_args.strategy_name", name, self.package.module, self.package.extra)

    def gpu_only(self, worker: Any) -> Iterator[ConfigProblem]:
        """Options whose kernels need a GPU."""
        return iter(())

    def no_pictures(self, worker: Any) -> str:
        """Why a role's model is not given pictures, in words that follow the strategy's name; empty: it is."""
        return "has not been compared with plain Transformers on pictures"

    def no_videos(self, worker: Any) -> str:
        """Likewise no videos."""
        return "has not been compared with plain Transformers on videos"

    def blind_to(self, family: str, worker: Any) -> str:
        """The same of one family, by its ``model_type``, of those that ``roll.models.pictures`` has."""
        known = self.pictured
        return "" if known is None or family in known else f"was not compared on {family}, but on {', '.join(known)}"

    def untested(self, options: Any) -> Iterator[tuple[str, str]]:
        """Options in use, relative to ``strategy_config``, that no test shows to be right, and what is known of each.

        A run with one starts with a warning.
        """
        return iter(())

    def environment(self, options: Any) -> Mapping[str, str]:
        """Environment variables that the engine's library counts on in a worker's process; the user's go first.

        Libraries read them when they first use a GPU or NCCL. `docs/running_on_gpus.md` has a table.
        """
        return {}


def missing_package(key: str, seen: object, module: str, extra: str) -> ConfigProblem:
    """A package that a choice needs."""
    hint = f"pip install 'roll-rl[{extra}]'; --validate-only checks a configuration without it"
    return ConfigProblem(key, seen, f"the package {module} to be installed", hint)
