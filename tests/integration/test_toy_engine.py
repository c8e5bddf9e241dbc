"""An engine of another package, known by its card alone, in a real run."""

import pytest

TERSE = "tests.support.terse.card:CARD"


@pytest.mark.slow  # unit/configs/engines/test_cards.py finds it and checks its options
def test_an_engine_by_path_generates_and_takes_weights(launch):
    strategy = f"{{strategy_name: '{TERSE}', strategy_config: {{max_answer_tokens: 2}}}}"
    run = launch("max_steps=2", "enable_old_logprobs_recompute=true", f"actor_infer.strategy_args={strategy}").ended()
    for step in (1, 2):
        assert 0 < run.metrics[step]["rollout/response_tokens"] <= 2
        assert run.metrics[step]["mismatch/logprob_diff_max"] < 1e-4
