"""A verifier for child processes that does whatever a response says; it imports nothing heavy, as they would, too."""

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from roll.configs.base import Config
from roll.rewards.types import RewardResult, RuleVerifier, Sample


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


class EchoConfig(Config):
    fail: bool = False


class Echo(RuleVerifier):
    """Does what the response says."""

    config_class: ClassVar[type[Config]] = EchoConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.fail:
            raise ValueError("told to fail")

    def check(self, sample: Sample) -> RewardResult:
        word, _, rest = sample.response.partition(" ")
        match word:
            case "hang":
                re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
            case "sleep":
                time.sleep(float(rest))
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                os._exit(int(rest))
            case "sys.exit":
                sys.exit(3)
            case "raise":
                raise KeyError(rest)
            case "mute":
                raise MuteError
            case "print":
                os.write(1, b'{"verdict": {"score": 9}}\n')
                print("x" * 100_000)
                assert sys.stdin.read() == ""
            case "number":
                return 1.0
            case "parts":
                return RewardResult(1.0, True, parts={str(i): 1.0 for i in range(100_000)})
            case "notes":
                return RewardResult(1.0, True, notes={"why": rest * 2000}, seeks_answer=False)
            case "fork":
                process = subprocess.Popen(["sleep", "300"])
                Path(rest).write_text(str(process.pid))
                time.sleep(300)
            case "child":
                Path(rest).write_text(str(os.getpid()))
                re.match(r"(a+)+$", "a" * 60 + "b")
        return RewardResult(float(os.getpid()), sample.truncated, sample.response, {"tokens": sample.num_tokens})
