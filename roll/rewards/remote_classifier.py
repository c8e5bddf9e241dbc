"""A sequence classifier that vLLM or SGLang serves elsewhere, asked over HTTP with token ids."""

from __future__ import annotations

from typing import Any

import httpx

from roll.rewards.classifiers import Classifier, RemoteClassifierConfig
from roll.rewards.endpoint import Endpoint, TransientError, read_key

_PATH = "/classify"


class RemoteClassifier(Classifier):
    """Asks the server. Serves one event loop.

    Raises:
        ValueError: the key's environment variable is unset or no possible key.
    """

    def __init__(self, config: RemoteClassifierConfig, num_labels: int) -> None:
        url = httpx.URL(config.url)
        path = url.path.rstrip("/")
        url = url.copy_with(path=path if path.endswith(_PATH) else path + _PATH)
        key = read_key(config.api_key_env, "remote.api_key_env")
        self._config, self._num_labels = config, num_labels
        self._endpoint = Endpoint(url, "reward model", config, key)

    async def forward(self, rows: list[list[int]]) -> list[list[float]]:
        """Logits of every label for every row of token ids.

        Raises:
            RewardError: refused by the server, or no usable answer after ``max_attempts``.
        """
        name = {} if self._config.model_name is None else {"model": self._config.model_name}
        # Without activation vLLM gives logits, which it would else put through softmax or the logistic function.
        asked = {"input": rows, "use_activation": False} if self._config.server == "vllm" else {"input_ids": rows}
        logits, _ = await self._endpoint.ask(name | asked, lambda response: self._read(response, len(rows)))
        return logits

    async def close(self) -> None:
        """Closes the connections."""
        await self._endpoint.close()

    def _read(self, response: httpx.Response, count: int) -> list[list[float]]:
        try:
            answer: Any = response.json()
            if self._config.server == "vllm":
                found = [each["probs"] for each in sorted(answer["data"], key=lambda each: int(each["index"]))]
            else:
                found = [each["embedding"] for each in answer]
            logits = [[float(value) for value in row] for row in found]
        except (ValueError, LookupError, TypeError) as error:
            shown = self._endpoint.shorten(response.text)
            raise TransientError(f"expected outputs of {self._config.server} as JSON, got {shown}") from error
        if [len(row) for row in logits] != [self._num_labels] * count:
            seen = f"{len(logits)} × {sorted({len(row) for row in logits})}"
            raise TransientError(f"expected {count} × {self._num_labels} outputs, seen {seen}")
        return logits
