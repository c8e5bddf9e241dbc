"""A reward model that a server holds: the scores of the same folder here, over both servers' own protocols."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roll.rewards.classifiers import Padding, RewardModelConfig, load_classifier, logits_of
from roll.rewards.types import RewardError
from tests.unit.rewards.test_reward_model import SAMPLES, close_to, llama, qwen, score_all

__all__ = ["llama", "qwen"]  # fixtures

KEY = "sk-4f1c-very-secret"


class Handler(BaseHTTPRequestHandler):
    """Speaks vLLM's ``/classify`` where ``input`` is given, SGLang's where ``input_ids`` is; a model here computes."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, self.headers.get("Authorization"), body))
        rows = body.get("input") or body["input_ids"]
        with self.server.lock:
            logits = logits_of(self.server.model, rows, Padding(self.server.model.config).of(rows), "cpu")
        if "input" in body:
            assert body["use_activation"] is False
            data = [{"index": i, "probs": row, "label": None, "num_classes": len(row)} for i, row in enumerate(logits)]
            answer: Any = {"object": "list", "data": data[::-1]}
        else:
            answer = [{"embedding": row, "meta_info": {}} for row in logits]
        if self.server.breaks:
            answer = self.server.breaks.pop()
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def served(folder: Path, *breaks: Any) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.model = load_classifier(RewardModelConfig(model_path=str(folder)))
    server.lock, server.bodies, server.breaks = threading.Lock(), [], list(breaks)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_scores_are_those_of_the_same_model_here(kind: str, qwen: Path, llama: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("REWARD_KEY", KEY)
    for folder, args in ((qwen, {"sigmoid": True}), (llama, {"label": "good", "probability": True, "scale": 2.0})):
        expected = score_all(folder, **args)
        with served(folder) as server:
            url = f"http://127.0.0.1:{server.server_port}"
            remote = {"url": url, "server": kind, "model_name": "rm", "api_key_env": "REWARD_KEY"}
            found = score_all(folder, remote=remote, device="auto", batch_size=4, **args)
            assert [verdict.score for verdict in found] == close_to([verdict.score for verdict in expected])
            assert [verdict.correct for verdict in found] == [verdict.correct for verdict in expected]
            assert max(len(body.get("input") or body["input_ids"]) for _, _, body in server.bodies) == 4
            assert {(path, key, body["model"]) for path, key, body in server.bodies} == {
                ("/classify", f"Bearer {KEY}", "rm")
            }


def test_answers_that_cannot_be_used_are_errors_and_what_the_server_decides_is_no_key(qwen: Path) -> None:
    wrong = {"data": [{"index": 0, "probs": [0.5, 0.5]}]}
    with served(qwen, {"detail": "starting"}, wrong) as server:
        remote = {"url": f"http://127.0.0.1:{server.server_port}/classify", "retry_wait": 0.0, "max_attempts": 2}
        with pytest.raises(RewardError, match=r"expected outputs of vllm.*attempt 2 of 2"):
            score_all(qwen, SAMPLES[:1], remote=remote, device="auto")
        (verdict,) = score_all(qwen, SAMPLES[:1], remote=remote, device="auto")
        assert [verdict.score] == close_to([score_all(qwen, SAMPLES[:1])[0].score])
    config = RewardModelConfig(model_path=str(qwen), remote={"url": "http://h:1"}, device="cpu", dtype="bf16")
    assert [problem.path for problem in config.problems()] == ["dtype", "device"]
