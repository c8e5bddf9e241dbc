"""What vLLM is started with."""

from dataclasses import replace

from roll.configs.engines.vllm import VllmConfig
from roll.configs.worker import StrategyArguments, WorkerConfig
from roll.distributed.strategy.base import EngineNodes, StrategyContext
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.vllm.arguments import engine_arguments
from roll.models.tiny import make_tiny_model


def test_replicas_draw_differently_and_the_parts_of_one_alike(tmp_path):
    make_tiny_model(tmp_path, seed=1)
    worker = WorkerConfig(strategy_args=StrategyArguments(strategy_name="vllm"))
    context = StrategyContext(worker, "actor_infer", str(tmp_path))
    outline = ModelOutline(context)

    def seed_of(rank: int, number: int = 0, role: str = "actor_infer") -> int:
        own = replace(context.at_rank(rank, 2), role=role, nodes=EngineNodes("10.0.0.1", 1, number, 2))
        return engine_arguments(own, VllmConfig(), outline, on_cpu=True)["seed"]

    assert len({seed_of(0), seed_of(1), seed_of(0, role="val_infer")}) == 3
    assert seed_of(1, number=1) == seed_of(1) and 0 <= seed_of(1) < 2**31
