"""The toy engine itself: ``hf_infer`` that is cut short."""

from dataclasses import replace

from roll.configs.worker import StrategyArguments
from roll.data.requests import Completion, GenerateRequest
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.hf_infer.strategy import HfInfer
from tests.support.terse.card import CARD, TerseConfig


class Terse(HfInfer):
    """A ``GenerateStrategy`` by inheritance."""

    card = CARD

    def __init__(self, context: StrategyContext) -> None:
        options = context.worker.strategy_args.typed()
        assert isinstance(options, TerseConfig)
        self._most = options.max_answer_tokens
        inner = context.worker.model_copy(update={"strategy_args": StrategyArguments(strategy_name="hf_infer")})
        super().__init__(replace(context, worker=inner))

    async def generate(self, request: GenerateRequest) -> Completion:
        short = replace(request.params, max_new_tokens=min(self._most, request.params.max_new_tokens))
        return await super().generate(replace(request, params=short))
