"""Models that workers hold beside the run's roles: reward models and judges of domains, the judge of environments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from roll.configs.agentic import JUDGE_CLUSTER, AgenticConfig
from roll.configs.judge import AskedModelConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.prompts import REWARD_CLUSTER, PromptsConfig
from roll.configs.strategy import StrategyArguments
from roll.configs.worker import WorkerConfig
from roll.extras.plan.memory import PHASES, RoleMemory
from roll.extras.plan.work import Role
from roll.models.shapes import ModelShape
from roll.rewards.classifiers import Adapter
from roll.rewards.judge import JudgeConfig
from roll.rewards.reward_model import RewardModelConfig


@dataclass(frozen=True)
class Hosted:
    """A model that each worker of a cluster has."""

    cluster: str
    key: str
    """Unique in the run, and the configuration key that names the model."""
    model: str
    worker: WorkerConfig
    """Section with those of the role keys that it has."""
    num_workers: int
    trust_remote_code: bool = False
    judge: JudgeConfig | AskedModelConfig | None = None
    """Settings for asking it, if it generates."""
    longest: int | None = None
    """Tokens that it reads at most, if its configuration says so."""
    ranks: int = 1
    """Processes that a reward model is divided over, each with a device."""

    def role(self, shape: ModelShape) -> Role:
        head = "lm" if self.judge else "score"
        return Role(self.cluster, self.worker, shape, head, trained=False, ranks=self.ranks)  # type: ignore[arg-type]


def hosted_models(config: PipelineConfig) -> Iterator[Hosted]:
    """The models in the workers of all domains, or the one that environments ask; not those that others serve."""
    if isinstance(config, AgenticConfig) and config.judge is not None:
        yield _asked("judge.model", config.judge.model, config.judge, JUDGE_CLUSTER, config.judge.worker_config())
    if not isinstance(config, PromptsConfig):
        return
    for name, domain in config.rewards.items():
        cluster, workers = f"{REWARD_CLUSTER}{name}", domain.worker_config()
        for number, verifier in enumerate(domain.verifiers):
            key = f"rewards.{name}.verifiers.{number}.args"
            try:
                if verifier.name == "reward_model":
                    found = _reward_model(RewardModelConfig.model_validate(verifier.args), cluster, key, workers)
                elif verifier.name == "judge":
                    args = JudgeConfig.model_validate(verifier.args)
                    model_key, hosted = f"{key}.judge_model_name", args.judge_model_type == "inference"
                    found = _asked(model_key, args.judge_model_name, args, cluster, workers) if hosted else None
                else:
                    continue
            except ValidationError:
                continue  # told of elsewhere
            if found is not None:
                yield found


def _reward_model(args: RewardModelConfig, cluster: str, key: str, workers: WorkerConfig) -> Hosted | None:
    """``None``: others serve it."""
    if args.remote is not None:
        return None
    model = args.model_path
    worker = WorkerConfig.model_validate({"model_args": {"dtype": args.dtype}, "infer_batch_size": args.batch_size})
    worker = worker.model_copy(update={"strategy_args": StrategyArguments(strategy_name="hf_infer")})
    return Hosted(
        cluster,
        f"{key}.model_path",
        model if (adapter := Adapter.of(Path(model).expanduser())) is None else adapter.base,
        worker,
        workers.num_workers,
        args.trust_remote_code,
        longest=args.max_length,
        ranks=args.tensor_parallel_size,
    )


def _asked(key: str, model: str, args: JudgeConfig | AskedModelConfig, cluster: str, workers: WorkerConfig) -> Hosted:
    worker = args.engine.worker(workers.num_gpus_per_worker)
    return Hosted(
        cluster,
        key,
        model,
        worker,
        workers.num_workers,
        worker.model_args.trust_remote_code,
        judge=args,
        longest=args.engine.max_length,
    )


def together(one: RoleMemory, other: RoleMemory) -> RoleMemory:
    """Two models of one worker: the process counts once."""

    def added(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
        parts = {part: left.get(part, 0) + right.get(part, 0) for part in {**left, **right}}
        return parts | {"process": left.get("process", 0)}

    phases = [phase for phase in PHASES if phase in one.phases or phase in other.phases]
    return replace(
        one,
        resident=added(one.resident, other.resident),
        phases={
            phase: added(one.phases.get(phase, one.resident), other.phases.get(phase, other.resident))
            for phase in phases
        },
    )
