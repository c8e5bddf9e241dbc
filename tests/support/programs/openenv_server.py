"""A server of the package openenv on loopback, as its own documentation makes one: guess a number.

``python openenv_server.py`` prints its port and serves until its standard input is closed.
"""

import random
import socket
import sys
import threading
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    left: int
    solved: bool = False


class GuessNumber(Environment):
    """Four guesses at a number from 1 to 9; ``fault`` says what goes wrong."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, fault=None, **kwargs):
        self.number = random.Random(seed).randint(1, 9)
        self.fault = fault
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(hint="guess a number from 1 to 9", left=4)

    def step(self, action, timeout_s=None, **kwargs):
        if self.fault == "raises":
            raise OSError("the disk is full")
        if self.fault == "hangs":
            time.sleep(3)
        self._state.step_count += 1
        left = 4 - self._state.step_count
        solved = action.number == self.number
        hint = "right" if solved else "higher" if action.number < self.number else "lower"
        reward = None if self.fault == "pays nothing" else float(solved)
        return Hint(hint=hint, left=left, solved=solved, reward=reward, done=solved or not left)

    @property
    def state(self):
        return self._state


def main():
    app = create_fastapi_app(GuessNumber, Guess, Hint, max_concurrent_envs=64)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True)), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
