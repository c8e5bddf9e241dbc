"""One whole GRPO step: ROLL, TRL's ``GRPOTrainer``, and a step written by hand in plain torch, in one run.

A step is rollout, rewards, advantages and one optimizer step (AdamW), then new weights where tokens are sampled. All
contestants take the same step: a Qwen2 model (6 layers, hidden 256, 4 heads, MLP 1024, vocabulary 2048, float32
weights), 16 prompts of 32 to 96 tokens × 8 samples of at most 128 tokens, temperature 1, the clipped surrogate on token
means, a rule as reward. They alternate; the median of their steps counts, after one that warms up. Twice:

* ``fixed``: the end of sequence is never sampled, every sample has 128 tokens;
* ``natural``: it has a probability of about 1/64 at each token, so lengths are geometric, 55 on average.

ROLL is the RLVR pipeline as ``examples/start_rlvr_pipeline.py`` runs it, on a real Ray cluster: prompts from a file, a
rollout worker, a reward worker with its rule in a process of its own, ``hf_infer`` and ``fsdp2_train`` workers, and
``RLVRPipeline.step`` around them, from before the weights are sent to after the optimizer step. Nothing is switched off
but evaluation, checkpoints and trackers, which the others do not have. TRL is told not to log or save; its clock stops
with the optimizer step. The hand-written step prefills each prompt once, keeps its cache in memory of the final size,
drops finished rows, and trains on similar lengths side by side. ROLL's first loss and gradient norm are compared with
those that the hand-written step finds for the same rollout.

Two cores are shared by two workers with a thread each (``--layout 2x1``); the hand-written step has two threads. TRL is
there as one process with two threads and as two with one each, in float32 and under bfloat16 autocast, and the fastest
of these four is what ROLL is compared with. ROLL trains in ``--precision``: in bf16 under the same autocast, with
weights, and all that is sampled, in float32. On a machine with other load, threads that wait for each other lose more
than processes that do not: only figures from a quiet machine compare anything.

    pip install trl accelerate datasets   (1.16.0, 1.15.0, 5.2.0 were measured; in an environment of their own that
                                           sees the same torch and Transformers, if they must not mix with the pins)
    python benchmarks/grpo_step.py --trl-python /path/to/that/python

Where TRL cannot be imported, that contestant is left out and the reason printed. The exit code is 0 in any case.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.configs.rlvr import RLVRConfig
    from roll.data.batch import Batch
    from roll.distributed.cluster.cluster import Cluster
    from roll.pipeline.rlvr import RLVRPipeline
    from roll.pipeline.session import RunSession
    from roll.utils.signals import SignalGuard

VOCABULARY, NUM_BYTES = 2048, 256
PAD, END = "<pad>", "<end>"
WORDS = VOCABULARY - NUM_BYTES - 2
LEARNING_RATE = 1e-6
EOS_ODDS = {"fixed": None, "natural": 1 / 64}
TARGETS = {"trl": 1.6, "hand": 1.3}
"""ROLL's speed as a multiple of TRL's fastest variant and of the hand-written step."""
AGREEMENT = {"fp32": 1e-4, "bf16": 1e-2}
"""Of losses and gradient norms, by the precision that ROLL trains in."""
RIVALS = Path(__file__).with_name("grpo_step_rivals.py")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """The reward: the share of even digits among a completion's characters."""
    return sum(solution_str.count(digit) for digit in "02468") / max(1, len(solution_str))


@dataclass(frozen=True)
class Size:
    """How much work a step is."""

    prompts: int = 16
    samples: int = 8
    new_tokens: int = 128
    prompt_tokens: tuple[int, int] = (32, 96)
    micro_batch: int = 16
    """Sequences per forward and backward pass, in ROLL and by hand."""


@dataclass
class Step:
    """What one contestant says of one step."""

    seconds: float
    tokens: int
    """Sampled tokens."""
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def make_model(path: Path, eos_probability: float | None, seed: int = 0) -> None:
    """Writes a model and its tokenizer: one token per word ``w17 ``, and the bytes.

    All embeddings have a 1 in their first place, which layers of small weights leave nearly as it is: through it the
    output layer gives the end of sequence the same probability everywhere (``None``: none).
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (PAD, END)])
    core.add_tokens([AddedToken(f"w{number} ", normalized=False) for number in range(WORDS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        embeddings, output = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings[:, 0], output[:, 0], output[tokenizer.eos_token_id] = 1.0, 0.0, 0.0
        constant = model.model(torch.randint(VOCABULARY, (8, 64))).last_hidden_state[..., 0].mean()
        odds = math.exp(-60) if eos_probability is None else eos_probability / (1 - eos_probability)
        output[tokenizer.eos_token_id, 0] = math.log(odds * VOCABULARY) / constant
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_prompts(steps: int, size: Size) -> list[list[str]]:
    """Random words for every step."""
    rng = random.Random(0)
    return [
        [
            "".join(f"w{rng.randrange(WORDS)} " for _ in range(rng.randint(*size.prompt_tokens)))
            for _ in range(size.prompts)
        ]
        for _ in range(steps)
    ]


class Rival:
    """A contestant in processes of its own (``grpo_step_rivals.py``); talks in lines of JSON.

    Args:
        python: the interpreter.
        kind: ``hand`` or ``trl``.
        work: file with the work and the contestant's settings; its name tells contestants of one kind apart.
        processes: data-parallel ranks.
        threads: torch threads of each.
        script: that they run.
    """

    def __init__(self, python: str, kind: str, work: Path, processes: int, threads: int, script: Path = RIVALS) -> None:
        common = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
        port = _free_port()
        self._processes = []
        for rank in range(processes):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **ranks}
            log = work.with_name(f"{work.stem}-{rank}.log")
            self._processes.append(
                subprocess.Popen(
                    [python, str(script), kind, str(work)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log.open("w"),
                    text=True,
                    env=common | ({name: str(value) for name, value in group.items()} if processes > 1 else {}),
                )
            )
        self._log = work.with_name(f"{work.stem}-0.log")
        self.ask(None)

    def ask(self, message: Any) -> Any:
        """Sends a line (``None``: only waits) and returns the answer."""
        first = self._processes[0]
        assert first.stdin and first.stdout
        if message is not None:
            first.stdin.write(json.dumps(message) + "\n")
            first.stdin.flush()
        for line in first.stdout:
            if line.startswith("{"):  # libraries print too
                return json.loads(line)
        raise RuntimeError(f"{first.args!r}: ended; the last lines of its output:\n{self._log.read_text()[-2000:]}")

    def step(self, number: int) -> Step:
        start = time.perf_counter()
        answer = self.ask({"step": number})
        return Step(time.perf_counter() - start, answer["tokens"], answer["phases"])

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Roll:
    """The RLVR pipeline, one step at a time."""

    def __init__(self, pipeline: RLVRPipeline) -> None:
        self.pipeline = pipeline
        self.batch: Batch | None = None
        """The last step's batch, as the trainers got it."""
        train = pipeline.train

        def observed(batch: Batch, *args: Any) -> Any:
            self.batch = batch
            return train(batch, *args)

        pipeline.train = observed  # type: ignore[method-assign,assignment]

    def step(self, number: int) -> Step:
        self.pipeline.session.timer.step_metrics()
        start = time.perf_counter()
        self.pipeline.step(number + 1)
        seconds = time.perf_counter() - start
        times = self.pipeline.session.timer.step_metrics()
        names = {"sync": "sync", "rollout": "generate", "logprobs": "score", "advantage": "score", "train": "train"}
        phases: dict[str, float] = {}
        for name, phase in names.items():
            phases[phase] = phases.get(phase, 0.0) + times.get(f"time/{name}", 0.0)
        assert self.batch is not None
        if self.metrics["actor/skipped_steps"]:
            raise RuntimeError(f"step {number}: not taken: {self.metrics}")
        return Step(seconds, int(self.batch.loss_mask_T.sum()), phases)

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.pipeline.unreported

    def rollout(self) -> dict[str, Any]:
        """The last step's rows, for the rival that computes the same loss."""
        batch = self.batch
        assert batch is not None and batch.advantages_T is not None
        rows = []
        for tokens, mask, gain in zip(
            *(
                column.split(batch.lengths_B.tolist())
                for column in (batch.tokens_T, batch.loss_mask_T, batch.advantages_T)
            ),
            strict=True,
        ):
            rows.append([tokens[~mask].tolist(), tokens[mask].tolist(), float(gain[-1])])
        return {"rows": rows}


def roll_config(
    model: Path, prompts: Path, output: Path, steps: int, layout: str, precision: str, size: Size
) -> RLVRConfig:
    """The run's configuration, checked as the command line checks one.

    Args:
        layout: ``2x1``: two generating and two training workers with a thread each, which share the two CPU slots;
            ``1x2``: one of each with two threads.
        precision: ``fp32`` or ``bf16``, in which the trainer computes.
    """
    from roll.configs.loader import validate
    from roll.configs.rlvr import RLVRConfig

    workers, threads = map(int, layout.split("x"))
    devices = {"device_mapping": list(range(workers)), "system_envs": {"OMP_NUM_THREADS": str(threads)}}
    model_args = {"dtype": "fp32", "attn_implementation": "sdpa", "disable_gradient_checkpointing": True}
    return validate(
        RLVRConfig,
        {
            "exp_name": "grpo_step",
            "output_dir": str(output),
            "track_with": [],
            "pretrain": str(model),
            "num_gpus_per_node": workers,
            "max_steps": steps,
            "save_steps": steps,
            "rollout_batch_size": size.prompts,
            "num_return_sequences_in_group": size.samples,
            "prompt_length": size.prompt_tokens[1],
            "response_length": size.new_tokens,
            "sequence_length": size.prompt_tokens[1] + size.new_tokens,
            "adv_estimator": "grpo",
            "loss_agg_mode": "token-mean",
            "rewards": {
                "rule": {
                    "tag_included": ["words"],
                    "verifiers": [{"name": "custom", "args": {"path": "grpo_step:compute_score"}}],
                }
            },
            "actor_train": {
                "model_args": model_args,
                "data_args": {
                    "file_name": str(prompts),
                    "prompt": "prompt",
                    "response": None,
                    "default_tag": "words",
                    "shuffle": False,
                },
                "training_args": {
                    "learning_rate": LEARNING_RATE,
                    "lr_scheduler_type": "constant",
                    "per_device_train_batch_size": size.micro_batch,
                    "gradient_accumulation_steps": size.prompts * size.samples // workers // size.micro_batch,
                },
                "strategy_args": {
                    "strategy_name": "fsdp2_train",
                    "strategy_config": {"fsdp_size": 1, "param_dtype": precision},
                },
                **devices,
            },
            "actor_infer": {
                "model_args": model_args,
                "generating_args": {"temperature": 1.0},
                "strategy_args": {"strategy_name": "hf_infer"},
                **devices,
            },
        },
    )


@contextmanager
def started(config: Any, workers: Mapping[str, Any]) -> Iterator[tuple[RunSession, SignalGuard, Mapping[str, Cluster]]]:
    """Starts Ray and a run's workers, as ``roll.pipeline.launch`` does, without its display."""
    from roll.distributed.cluster.ray_session import ray_session
    from roll.pipeline.launch import ray_options, start_clusters
    from roll.pipeline.session import RunSession
    from roll.utils.signals import SignalGuard

    with ExitStack() as stack:
        signals = stack.enter_context(SignalGuard())
        with redirect_stdout(stack.enter_context(open(os.devnull, "w"))):  # the display keeps the stream it finds
            session = RunSession(config, time.time())
        stack.enter_context(session)
        stack.enter_context(ray_session(ray_options(config), config.system_envs))
        yield session, signals, stack.enter_context(start_clusters(config, session, workers))


@contextmanager
def roll_pipeline(config: RLVRConfig) -> Iterator[Roll]:
    """Starts Ray, the workers and the pipeline, as ``roll.pipeline.rlvr`` does."""
    from roll.configs.prompts import REWARD_CLUSTER, ROLLOUT_CLUSTER
    from roll.pipeline.launch import MODEL_WORKERS
    from roll.pipeline.programs import RLVR
    from roll.pipeline.prompts import PromptRolloutWorkers, load_datasets
    from roll.pipeline.rl import set_losses
    from roll.pipeline.rlvr import RLVRPipeline
    from roll.pipeline.roles import Roles
    from roll.pipeline.start import RunContext, Start
    from roll.preflight.templates import policy_renderer
    from roll.rollout.prompt_worker import PromptWorker
    from roll.rollout.reward_worker import RewardWorker

    workers = {**MODEL_WORKERS, ROLLOUT_CLUSTER: PromptWorker, f"{REWARD_CLUSTER}rule": RewardWorker}
    datasets = load_datasets(config, policy_renderer(config))
    with started(config, workers) as (session, signals, clusters):
        roles = Roles(config, clusters)
        run = RunContext(RLVR, session, signals, clusters, roles, Start(config.pretrain))
        prompts = PromptRolloutWorkers(config, run, datasets.train, datasets.val)
        prompts.begin_setup()
        roles.setup(config.pretrain, config.total_optimizer_steps)
        set_losses(roles, config)
        prompts.wait_ready()
        yield Roll(RLVRPipeline(config, run, prompts))


def measure(mode: str, args: argparse.Namespace, folder: Path, pythons: Mapping[str, str]) -> dict[str, Any]:
    """All contestants, alternating; the figures of one mode."""
    steps = args.steps + 1
    size = Size(prompts=2, samples=4, new_tokens=16, micro_batch=4) if args.quick else Size()
    model, prompts = folder / mode, make_prompts(steps, size)
    make_model(model, EOS_ODDS[mode])
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for step in prompts for prompt in step))
    config = roll_config(model, file, folder / f"run-{mode}", steps, args.layout, args.precision, size)
    taken: dict[str, list[Step]] = {"roll": []}
    with ExitStack() as stack:
        roll = stack.enter_context(roll_pipeline(config))
        rivals = {}
        for variant in variants(pythons, args):
            processes, threads = map(int, variant.layout.split("x"))
            work = write_work(folder, variant, mode, prompts, threads, size, args)
            rivals[variant.name] = rival = Rival(pythons[variant.kind], variant.kind, work, processes, threads)
            stack.callback(rival.close)
            taken[variant.name] = []
        for number in range(steps):
            taken["roll"].append(roll.step(number))
            if number == 0:
                same = check_agreement(roll, rivals["hand"], AGREEMENT[args.precision])
            for kind, rival in rivals.items():
                taken[kind].append(rival.step(number))
            if args.verbose:
                for kind, done in taken.items():
                    print(
                        f"  step {number} {kind:12} {done[-1].seconds:6.2f} s  {done[-1].tokens:6,} tokens", flush=True
                    )
    return {"same_loss": same} | report(mode, {kind: done[1:] for kind, done in taken.items()})


@dataclass(frozen=True)
class Variant:
    """One way of running a rival."""

    kind: str
    layout: str
    """Processes x threads of each."""
    precision: str

    @property
    def name(self) -> str:
        return "hand" if self.kind == "hand" else f"trl {self.layout} {self.precision}"


def variants(pythons: Mapping[str, str], args: argparse.Namespace) -> list[Variant]:
    """The rivals to measure, as far as there is an interpreter for them."""
    trl = [Variant("trl", layout, precision) for layout in args.trl_layouts for precision in args.trl_precisions]
    return [variant for variant in (Variant("hand", "1x2", "fp32"), *trl) if variant.kind in pythons]


def write_work(
    folder: Path,
    variant: Variant,
    mode: str,
    prompts: Sequence[Sequence[str]],
    threads: int,
    size: Size,
    args: argparse.Namespace,
) -> Path:
    """A rival's instructions."""
    kind, name = variant.kind, f"{variant.name.replace(' ', '-')}-{mode}"
    work = {
        "model": str(folder / mode),
        "output": str(folder / f"output-{name}"),
        "bf16": variant.precision == "bf16",
        "prompts": prompts,
        "samples": size.samples,
        "new_tokens": size.new_tokens,
        "learning_rate": LEARNING_RATE,
        "threads": threads,
        "micro_batch": args.trl_micro_batch if kind == "trl" and not args.quick else size.micro_batch,
        "trl": json.loads(args.trl_options),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(work))
    return path


def check_agreement(roll: Roll, hand: Rival, bound: float) -> bool:
    """Whether ROLL's first rollout, which the untrained weights sampled, gives the hand-written step the same loss."""
    theirs = hand.ask(roll.rollout())
    ours = {name: roll.metrics[f"actor/{name}"] for name in ("loss", "grad_norm")}
    same = all(math.isclose(ours[n], theirs[n], rel_tol=bound, abs_tol=bound) for n in ours)
    print(
        f"  one rollout {'agrees' if same else 'DISAGREES'}: loss {ours['loss']:.6f} in ROLL, {theirs['loss']:.6f} by "
        f"hand; gradient norm {ours['grad_norm']:.6f}, {theirs['grad_norm']:.6f}",
        flush=True,
    )
    return same


def report(mode: str, taken: Mapping[str, Sequence[Step]]) -> dict[str, Any]:
    """Prints a table of medians and returns its figures."""
    figures: dict[str, Any] = {}
    for kind, steps in taken.items():
        phases = {name: statistics.median(step.phases.get(name, 0.0) for step in steps) for name in steps[0].phases}
        figures[kind] = {
            "tokens_per_s": statistics.median(step.tokens_per_s for step in steps),
            "seconds": statistics.median(step.seconds for step in steps),
            "tokens": statistics.median(step.tokens for step in steps),
            "phases": phases,
        }
        row = figures[kind]
        split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        speed = f"{row['tokens_per_s']:7,.0f} tokens/s  {row['seconds']:6.2f} s  {row['tokens']:7,.0f} tokens"
        print(f"  {kind:12} {speed}  ({split})")
    for kind, target in TARGETS.items():
        if speeds := {name: figures[name]["tokens_per_s"] for name in taken if name.split()[0] == kind}:
            best = max(speeds, key=lambda name: speeds[name])
            figures[f"roll/{kind}"] = ratio = figures["roll"]["tokens_per_s"] / speeds[best]
            print(f"  ROLL / {best}: {ratio:.2f} (target {target})")
    return figures


def find_trl(python: str) -> str | None:
    """What is in the way of running TRL with this interpreter; ``None``: nothing."""
    try:
        done = subprocess.run([python, "-c", "from trl import GRPOTrainer"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each contestant")
    parser.add_argument("--modes", nargs="+", choices=EOS_ODDS, default=list(EOS_ODDS))
    parser.add_argument("--layout", default="2x1", help="ROLL's workers of each kind x threads of each")
    parser.add_argument("--precision", choices=AGREEMENT, default="fp32", help="in which ROLL trains")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that can import trl")
    parser.add_argument("--trl-layouts", nargs="+", default=["1x2", "2x1"], help="TRL's processes x threads of each")
    parser.add_argument("--trl-precisions", nargs="+", choices=AGREEMENT, default=list(AGREEMENT))
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="per_device_train_batch_size of TRL")
    parser.add_argument("--trl-options", default="{}", help="further GRPOConfig arguments, as JSON")
    parser.add_argument("--quick", action="store_true", help="one timed step of little work: shows that all runs")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    if args.quick:
        args.steps = 1
    pythons = {"hand": sys.executable, "trl": args.trl_python}
    if problem := find_trl(args.trl_python):
        print(f"TRL is left out: {args.trl_python} cannot import it ({problem}); see --help")
        del pythons["trl"]
    figures: dict[str, Any] = {"load": os.getloadavg()[0], "layout": args.layout, "precision": args.precision}
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            print(f"{mode}:", flush=True)
            figures[mode] = measure(mode, args, Path(folder), pythons)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
