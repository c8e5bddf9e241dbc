"""Functions of the user's in the training step: they can be imported, and take what they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from roll.configs.problems import ConfigProblem
from roll.configs.rl import RLConfig
from roll.utils.registry import UnknownNameError, import_path

_ARGUMENTS = {"adv_estimator": ("batch", "config"), "pg_variant": ("tokens", "config"), "path": ("group",)}
"""What a function is given, in this order, by the last word of its key."""


def check_functions(config: RLConfig) -> Iterator[ConfigProblem]:
    """Imports every function given by path and compares its signature with the call."""
    for key, path in config.functions.items():
        names = _ARGUMENTS[key.rpartition(".")[2]]
        expected = f"a function of {', '.join(names)}"
        try:
            function = import_path(path, key)
            if not callable(function):
                yield ConfigProblem(key, path, expected, f"it is {type(function).__name__}")
            else:
                inspect.signature(function).bind(*names)
        except UnknownNameError as error:
            yield ConfigProblem(key, path, "package.module:name that can be imported", str(error))
        except TypeError as error:
            yield ConfigProblem(key, path, expected, str(error))
        except ValueError:  # built-in functions have no signature to look at
            yield ConfigProblem(key, path, expected, "it is built in and tells no arguments")
