"""Text environments: made by name, or by ``package.module:Class`` for a user's own.

>>> import roll.agentic.env as envs
>>> envs.register("my-env", "my_package.my_module:MyEnv")
>>> env = envs.make("sokoban", num_boxes=1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from roll.agentic.env.base import TextEnv
from roll.configs.arguments import argument_problems
from roll.configs.base import Config
from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigProblem
from roll.utils.foreign import Fault, describe_error
from roll.utils.registry import Registry, UnknownNameError, importable_path

__all__ = [
    "TextEnv",
    "asks_judge",
    "check_env_config",
    "is_instant",
    "make",
    "names_actions",
    "path_of",
    "register",
    "registered",
    "wants_own_thread",
]

EnvFactory = Callable[..., TextEnv]

NO_KEYS: Mapping[str, Any] = MappingProxyType({})

_ENVS: Registry[EnvFactory] = Registry("environment")
_ENVS.register("sokoban", "roll.agentic.env.sokoban:SokobanEnv")
_ENVS.register("frozen_lake", "roll.agentic.env.frozen_lake:FrozenLakeEnv")
_ENVS.register("hidden_word", "roll.extras.worlds.hidden_word:HiddenWordEnv")
_ENVS.register("adventure", "roll.extras.worlds.adventure:AdventureEnv")
_ENVS.register("shop", "roll.extras.worlds.shop:ShopEnv")
_ENVS.register("single_turn", "roll.extras.worlds.single_turn:SingleTurnEnv")
_ENVS.register("gymnasium", "roll.extras.worlds.gym_adapter:GymnasiumEnv")
_ENVS.register("gem", "roll.extras.worlds.gem_adapter:GemEnv")
_ENVS.register("openenv", "roll.extras.worlds.openenv_adapter:OpenEnvEnv")
_ENVS.register("textarena", "roll.extras.worlds.textarena_adapter:TextArenaEnv")


def register(name: str, target: EnvFactory | str) -> None:
    """Makes ``target`` (a class, or ``package.module:Class``) available as ``env_type: name`` in this process.

    Raises:
        ValueError: the name stands for something else already.
    """
    _ENVS.register(name, target)


def registered() -> list[str]:
    """All names, sorted."""
    return _ENVS.names()


def make(env_type: str, /, **env_config: Any) -> TextEnv:
    """Builds an environment from its name or path.

    Raises:
        UnknownNameError: no such environment.
        ValueError: the configuration is wrong (all problems, one per line), or the class is no ``TextEnv``.
    """
    env = _ENVS.get(env_type)(**env_config)
    if not isinstance(env, TextEnv):
        raise ValueError(_not_text_env(env_type, type(env)))
    return env


def path_of(env_type: str) -> str:
    """Path by which a process without the registered names makes it: ``package.module:Class`` or ``file.py:Class``.

    Raises:
        UnknownNameError: no such environment.
        ValueError: it cannot be imported by path (defined in ``__main__`` or inside a function).
    """
    factory = _ENVS.get(env_type)
    path = importable_path(factory)
    if factory.__module__ == "__main__" or "." in factory.__qualname__:
        raise ValueError(f"env_type: {env_type!r} is {path}, expected a name at the top of an importable module")
    return path


def names_actions(env_type: str) -> bool:
    """Tells whether an environment that can be imported says ``action_names``, so that play can be scripted."""
    return bool(getattr(_ENVS.get(env_type), "action_names", ()))


def is_instant(env_type: str, env_config: Mapping[str, Any] = NO_KEYS) -> bool:
    """Tells whether the class itself, and not one that it inherits from, says ``instant`` (see ``TextEnv``)."""
    if asks_judge(env_type):
        return False
    instant = getattr(_ENVS.get(env_type), "__dict__", {}).get("instant", False)
    return bool(instant(env_config) if callable(instant) else instant)


def wants_own_thread(env_type: str) -> bool:
    """Tells whether all calls of an environment have to run in one thread (see ``TextEnv.own_thread``)."""
    return bool(getattr(_ENVS.get(env_type), "own_thread", False))


def asks_judge(env_type: str) -> bool:
    """Tells whether an environment asks the run's judge (see ``TextEnv.asks``)."""
    return bool(getattr(_ENVS.get(env_type), "asks", False))


def check_env_config(env_type: str, env_config: Mapping[str, Any]) -> list[ConfigProblem]:
    """Mistakes in ``env_type`` and ``env_config`` of a ``custom_envs`` entry; never raises.

    Args:
        env_type: name or path; it is imported, not built.
    """
    try:
        factory = _ENVS.get(env_type)
    except (UnknownNameError, TypeError) as error:  # TypeError: it is no text
        return [ConfigProblem("env_type", env_type, "a known environment, or one that can be imported", str(error))]
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, TextEnv)):
        return [ConfigProblem("env_type", env_type, "an environment", _not_text_env(env_type, factory))]
    config_class = getattr(factory, "config_class", None)
    with Fault() as fault:  # a user's validators may raise anything
        if isinstance(config_class, type) and issubclass(config_class, Config):
            fields = config_class.model_fields  # YAML has lists alone
            tuples = {name for name, field in fields.items() if "tuple[" in str(field.annotation).lower()}
            values = {key: tuple(v) if key in tuples and isinstance(v, list) else v for key, v in env_config.items()}
            problems = section_problems(config_class, values)
        else:
            problems = argument_problems(factory, env_config)
    if fault.error is not None:
        hint = f"checking it raised {describe_error(fault.error)}"
        return [ConfigProblem("env_config", env_config, "arguments of the environment", hint)]
    return [replace(problem.under("env_config"), involves=("env_config", "env_type")) for problem in problems]


def _not_text_env(env_type: str, seen: object) -> str:
    return (
        f"{env_type!r} is {seen!r}, expected a subclass of roll.agentic.env.TextEnv; "
        "for other gymnasium environments use env_type: gymnasium"
    )
