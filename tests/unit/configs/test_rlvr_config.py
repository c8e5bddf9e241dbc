"""The configuration of an RLVR run: its rules, each with the key that is wrong, and its arithmetic in words."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from roll.__main__ import main
from roll.configs import SHIPPED
from roll.configs.agent import AgentConfig, AgentSandboxConfig
from roll.configs.agentic import AgenticConfig
from roll.configs.batches import describe_batches
from roll.configs.distill import DistillConfig
from roll.configs.loader import load_config, validate
from roll.configs.pipeline import ProfilerConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import WorkerConfig
from roll.models.tiny import make_tokenizer
from roll.models.tokenizer import check_same_ids
from roll.preflight.choices import CHECKS, check_engine_options, check_strategies, role_requests
from tests.support.configs import words_of

MINIMAL = """
pretrain: org/model
adv_estimator: grpo
rollout_batch_size: 16
num_return_sequences_in_group: 4
val_batch_size: 8
prompt_length: 100
response_length: 50
sequence_length: 150
max_steps: 10
rewards:
  maths:
    tag_included: [gsm8k, aime]
    verifiers: [{name: gsm8k}, {name: format, weight: 0.1}]
  choice:
    tag_included: [mmlu]
    verifiers: [{name: multiple_choice}]
    world_size: 3
validation:
  data_args: {file_name: val.jsonl, prompt: question}
actor_train:
  training_args: {learning_rate: 1e-3, per_device_train_batch_size: 4, gradient_accumulation_steps: 4}
  data_args: {file_name: [a.jsonl, b.jsonl], prompt: question}
  device_mapping: [0, 1]
actor_infer:
  strategy_args: {strategy_name: hf_infer}
  device_mapping: [2]
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RLVRConfig]:
    """Loads MINIMAL with overrides."""
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    return lambda *overrides: load_config(RLVRConfig, "mine", tmp_path, overrides, CHECKS[RLVRConfig])


@pytest.fixture
def problems(load: Callable[..., RLVRConfig]) -> Callable[..., dict[str, str]]:
    """What MINIMAL with overrides has wrong, as texts by key."""
    return partial(words_of, load)


TRAIN, VAL = "actor_train.data_args", "validation.data_args"
VERIFIER, FILTER = "rewards.maths.verifiers", "rewards.maths.query_filter_config"
ARGS, SAMPLING = "actor_train.training_args", "actor_infer.generating_args"
AGENTS = [
    # the section; the key that is told of; words of the message
    ("{}", "command", "a value, since type is process"),
    ("{command: [echo], url: 'http://x'}", "url", "no such key with type process"),
    ("{type: url, url: 'localhost:1'}", "url", "begins with http:// or https://"),
    ("{type: python, path: 'json:loads', cwd: /tmp}", "cwd", "which starts no command"),
    ("{type: python, path: 'nowhere.at_all:f'}", "path", "there is no nowhere.at_all"),
    ("{type: python, path: 'no/such.py:f'}", "path", "there is no no/such.py"),
    ("{type: python, path: 'no path'}", "path", "package.module:attribute"),
    ("{command: [echo], dialect: hermez}", "dialect", "a tool dialect"),
    ("{type: url, url: 'http://x', sandbox: {}}", "sandbox", "which starts no command"),
    ("{command: [echo], reward: verify}", "verify", "a command that writes the reward"),
    ("{command: [echo], verify: [judge]}", "verify", "no such key with reward task"),
    ("{type: url, url: 'http://x', reward: verify}", "reward", "verify judges the folder"),
    ("{command: [echo], cwd: /tmp, sandbox: {}}", "cwd", "null with sandbox"),
    ("{command: [echo], cwd: /no/where}", "cwd", "an existing folder"),
    ("{command: [echo], template: /no/where}", "template", "an existing folder"),
    ("{command: [echo], sandbox: {readable: [/no/where]}}", "sandbox.readable.0", "an existing file or folder"),
    ("{command: [echo], sandbox: {memory_mb: 1}}", "sandbox.memory_mb", "64"),
]
WRONG = [
    # overrides; the key that is told of; words of the message
    (["~rewards"], "rewards", "at least one reward domain"),
    (["rewards.choice.tag_included=[mmlu,aime]"], "rewards.choice.tag_included", "aime is in maths already"),
    (["rewards.maths.verifiers=[{name:math,wieght:1}]"], f"{VERIFIER}.0.wieght", "did you mean weight?"),
    (["rewards.maths.verifiers=[{name:math,weight:heavy}]"], f"{VERIFIER}.0.weight", "expected float"),
    (["rewards.maths.verifiers=[{weight:1.0}]"], f"{VERIFIER}.0.name", "got nothing, expected str"),
    (["rewards.maths.verifiers=[math]"], f"{VERIFIER}.0", "expected section"),
    (["~rewards.maths.verifiers"], f"{VERIFIER}", "got nothing, expected list of section"),
    ([f"{VERIFIER}=[{{name:math,weight:-1}}]"], f"{VERIFIER}.0.weight", "at least 0: this verifier decides"),
    (["num_renders=9"], "num_renders", "no such key in RLVR"),
    ([f"{TRAIN}.dataset_cls=nope"], f"{TRAIN}.dataset_cls", "expected package.module:attribute"),
    (["rewards.maths.tag_included=[a,a]"], "rewards.maths.tag_included", "every tag once"),
    (["rewards.maths.tag_included=[]"], "rewards.maths.tag_included", "at least 1"),
    ([f"{VERIFIER}=[]"], VERIFIER, "at least 1"),
    ([f"{VERIFIER}=[{{name: gms8k}}]"], f"{VERIFIER}.0.name", "did you mean gsm8k"),
    ([f"{VERIFIER}=[{{name: gsm8k, args: {{metod: x}}}}]"], f"{VERIFIER}.0.args.metod", "method"),
    (["rewards.maths.max_error_rate=1.5"], "rewards.maths.max_error_rate", "1"),
    (["rewards.maths.timeout=0"], "rewards.maths.timeout", "0"),
    ([f"{FILTER}={{type: mean_filter, low: 0.5, high: 0.5}}"], f"{FILTER}.high", "more than low = 0.5"),
    ([f"{FILTER}.type=std_filter", "num_return_sequences_in_group=1", f"{ARGS}.gradient_accumulation_steps=1"],
     f"{FILTER}.type", "one answer has no spread"),
    (["rewards.maths.worker_cls=nowhere:Worker"], "rewards.maths.worker_cls", "there is no nowhere"),
    (["rewards.maths.device_mapping=[70]", "num_nodes=1"], "rewards.maths.device_mapping", "ids from 0 to 7"),
    (["rewards.maths.device_mapping=[1]", "async_generation_ratio=1", "train_infer_correction.is_weight.enabled=true"],
     "rewards.maths.device_mapping", "devices of no role that trains or computes log-probs"),
    (["tis_upper_bound=2"], "tis_upper_bound", "no such key with pg_variant ppo: read with tis"),
    (["lambd=0.9"], "lambd", "no such key with adv_estimator grpo: read with gae"),
    (["kl_penalty=k1"], "kl_penalty", "no such key without add_token_level_kl or use_kl_loss: nothing reads it"),
    (["kl_horizon=5"], "kl_horizon", "no such key without target_kl or kl_loss_target"),
    (["max_additional_running_prompts=3"], "max_additional_running_prompts", "without is_use_additional_prompts"),
    (["rollout_workers.worker_cls=nowhere:Worker"], "rollout_workers.worker_cls", "there is no nowhere"),
    ([f"{TRAIN}.file_name=null"], f"{TRAIN}.file_name", "a file, several, a glob, or dataset_cls"),
    ([f"{VAL}.file_name=null"], f"{VAL}.file_name", "a file, several, a glob, or dataset_cls"),
    ([f"{TRAIN}.messages=chat"], f"{TRAIN}.messages", "one of the two"),
    ([f"{TRAIN}.prompt=null"], f"{TRAIN}.prompt", "since file_name is set"),
    ([f"{TRAIN}.dataset_cls=nowhere:Data"], f"{TRAIN}.dataset_cls", "there is no nowhere"),
    ([f"{TRAIN}.dataset_cls=nowhere.py:Data"], f"{TRAIN}.dataset_cls", "there is no nowhere.py"),
    (["plugins=[nowhere_at_all]"], "plugins.0", "No module named 'nowhere_at_all'"),
    ([f"{VAL}.dataset_cls=nowhere:Data"], f"{VAL}.dataset_cls", "there is no nowhere"),
    ([f"{VAL}.template=chatml"], f"{VAL}.template", "the same as actor_train.data_args.template"),
    ([f"{TRAIN}.domain_interleave_probs={{maths: 0.5, chess: 0.5}}"], f"{TRAIN}.domain_interleave_probs", "maths"),
    ([f"{TRAIN}.domain_interleave_probs={{maths: 0.5}}"], f"{TRAIN}.domain_interleave_probs", "a sum of 1, not 0.5"),
    ([f"{VAL}.domain_interleave_probs={{maths: 1}}"], f"{VAL}.domain_interleave_probs", "all held-out prompts"),
    (["data_generator={path: 'nowhere:make', folder: x}"], "data_generator.path", "there is no nowhere"),
    (["pretrain=tiny"], "warm_start.file_name", "demonstrations to warm-start the tiny model with"),
    (["eval_only=true", "validation=null"], "eval_only", "or a validation section"),
    (["adv_estimator=step_reinforce"], "adv_estimator", "an estimator of one-turn episodes"),
    (["adv_estimator=gigpo"], "adv_estimator", "an estimator of one-turn episodes"),
    (["adv_estimator=gae"], "critic", "needs values"),
    (["use_kl_loss=true", "kl_loss_coef=0.1"], "reference", "a KL term is switched on"),
    ([f"{SAMPLING}.num_return_sequences=3"], f"{SAMPLING}.num_return_sequences", "1 or num_return_sequences_in_group"),
    ([f"{SAMPLING}.temperature=0"], f"{SAMPLING}.temperature", "nothing to compare"),
    ([f"{SAMPLING}.do_sample=false"], f"{SAMPLING}.do_sample", "nothing to compare"),
    ([f"{SAMPLING}.max_new_tokens=51"], f"{SAMPLING}.max_new_tokens", "at most response_length = 50"),
    (["validation.generating_args.max_new_tokens=51"], "validation.generating_args.max_new_tokens",
     "at most response_length = 50"),
    ([f"{ARGS}.per_device_train_batch_size=5"], f"{ARGS}.gradient_accumulation_steps",
     "the global batch (5 per device × 4 accumulated × 2 data-parallel = 40) to divide rollout_batch_size = 16 × "
     "num_return_sequences_in_group = 4 = 64 samples"),
    (["num_return_sequences_in_groups=2"], "num_return_sequences_in_groups", "num_return_sequences_in_group"),
    (["sequence_length=149"], "sequence_length", "expected at least 150"),
    (["warm_start.tools=[calculatr]"], "warm_start.tools.0", "calculator"),
    (["agent={command: [echo]}", "tools={use: {calculator: {tool: calculator}}}"], "tools", "null with agent"),
    *(([f"agent={section}"], f"agent.{key}", message) for section, key, message in AGENTS),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "message"), WRONG, ids=[" ".join(entry[0])[:60] for entry in WRONG])
def test_what_is_wrong_is_told_with_its_key(problems, overrides, key, message):
    found = problems(*overrides)
    assert list(found) == [key] and message in found[key]


def test_all_mistakes_are_told_at_once_and_none_hides_another(problems):
    scorer = (f"{VERIFIER}=[{{name: nope}}]", "rewards.choice.timeout=-1")
    found = problems(*scorer, f"{TRAIN}.file_name=null", "adv_estimator=gigpo")
    assert set(found) == {f"{VERIFIER}.0.name", f"{TRAIN}.file_name", "adv_estimator", "rewards.choice.timeout"}
    found = problems(f"{SAMPLING}.temperature=0", f"{SAMPLING}.top_p=2")
    assert found.keys() == {f"{SAMPLING}.temperature", f"{SAMPLING}.top_p"}
    single = (f"{ARGS}.{key}=1" for key in ("gradient_accumulation_steps", "per_device_train_batch_size"))
    wrong = (f"~{VERIFIER}", f"{FILTER}={{type:std_filter}}", "rewards.choice.verifiers=[{name:mth}]")
    found = problems(*wrong, "num_return_sequences_in_group=1", *single)
    assert set(found) == {VERIFIER, f"{FILTER}.type", "rewards.choice.verifiers.0.name"}


def test_domains_clusters_and_sampling_follow_from_the_sections(load):
    sampling = "validation.generating_args={num_return_sequences: 3, temperature: 0.2}"
    config = load(sampling, "rollout_workers.world_size=2")
    assert config.domains == {"gsm8k": "maths", "aime": "maths", "mmlu": "choice"}
    assert config.samples_per_step == 64 and config.optimizer_steps_per_epoch == 2
    assert config.total_optimizer_steps == 20
    sampling = [(each.max_new_tokens, each.temperature) for each in (config.train_sampling, config.val_sampling)]
    assert sampling == [(50, 1.0), (50, 0.2)] and config.num_val_samples == 3
    assert isinstance(config.clusters["rollout"], WorkerConfig)
    sizes = {request.name: request.world_size for request in role_requests(config)}
    assert sizes == {"actor_train": 2, "actor_infer": 1, "rollout": 2, "reward_maths": 1, "reward_choice": 3}
    keys = ["actor_train", "actor_infer", "rollout_workers", "rewards.maths", "rewards.choice"]
    assert [config.key_of(name) for name in sizes] == keys


def test_held_out_data_has_the_columns_and_the_sampling_of_training_with_one_answer(load):
    config = load("actor_infer.generating_args={temperature: 0.6, num_return_sequences: 4, max_new_tokens: 20}")
    assert (config.val_sampling.temperature, config.val_sampling.max_new_tokens) == (0.6, 20)
    assert config.num_val_samples == 1
    data = load("~validation.data_args.prompt", "actor_train.data_args.response=answer").validation.data_args
    assert (data.prompt, data.response) == ("question", "answer")


def test_the_arithmetic_is_told_in_words_also_of_an_evaluation_alone(load):
    config = load("eval_only=true", f"{TRAIN}.file_name=null", "actor_infer.generating_args.temperature=0")
    assert describe_batches(config) == ["each evaluation: at most 8 prompts × 1 answer = 8 samples"]
    config = load("validation.generating_args.num_return_sequences=2", "ppo_epochs=3")
    assert describe_batches(config) == [
        "each step: 16 prompts × 4 answers = 64 samples of at most 100 prompt + 50 answer tokens: at most 9,600 tokens",
        "each evaluation: at most 8 prompts × 2 answers = 16 samples",
        "actor_train: global batch 32 samples = 4 per device × 4 accumulated × 2 data-parallel; 64 samples make "
        "2 optimizer steps × 3 epochs = 6 per step, 60 in all; 4 micro-batches per device and optimizer step, "
        "16 samples",
    ]


def test_an_agent_program_is_accepted_and_what_is_wrong_with_one_is_told_at_once(load, problems):
    agent = load("agent={command: [python, agent.py], env: {COLOUR: blue}, max_calls: 3}").agent
    assert (agent.command, agent.reward) == (["python", "agent.py"], "task")
    found = problems("agent={timeout: 0, cwd: /no/where, verify: [judge], dialect: hermez, sandbox: {processes: 0}}")
    wrong = {"timeout", "sandbox.processes", "command", "cwd", "verify", "dialect"}
    assert found.keys() == {f"agent.{key}" for key in wrong}


def test_files_of_an_agent_program_are_found_wherever_a_worker_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("agent.py", "python", "tests/judge.py"):
        (tmp_path / name).touch()

    def agent(program: str, judge: str, folder: str) -> AgentConfig:
        verified = {"reward": "verify", "verify": [judge, "tests"], "template": folder}
        sandbox = AgentSandboxConfig(readable=[folder])
        return AgentConfig(command=["python", program, "other.py", "--fast"], sandbox=sandbox, **verified)

    placed = agent(*(str(tmp_path / name) for name in ("agent.py", "tests/judge.py", "tests")))
    assert agent("agent.py", "tests/judge.py", "tests").placed() == placed


def test_a_length_in_epochs_becomes_steps_when_the_data_is_known(load):
    config = load("total_epochs=3")
    assert any("until total_epochs 3 end" in line for line in describe_batches(config))
    known = config.with_length(10 * config.rollout_batch_size + 1)
    assert (known.max_steps, known.total_epochs) == (30, None)
    assert config.with_length(1).max_steps == 1
    assert load("max_steps=7").with_length(1000).max_steps == 7


PLACED = "reference={strategy_args: {strategy_name: hf_infer}, device_mapping: [0]}"
ONLINE = ("online_dpo={beta: 0.2}", "~adv_estimator", PLACED, f"{ARGS}.gradient_accumulation_steps=1")


def test_pairs_of_a_rollout_are_counted_as_pairs(load):
    config = load(*ONLINE)
    assert (config.optimizer_steps_per_epoch, config.total_optimizer_steps) == (2, 20)
    assert not config.uses_critic and {"actor_train", "actor_infer", "reference"} == set(config.roles)
    line = next(line for line in describe_batches(config) if line.startswith("actor_train"))
    assert "8 pairs = 4 per device" in line and "16 pairs make 2 optimizer steps" in line
    assert "reference" not in load(*ONLINE, "online_dpo={preference_loss: simpo, beta: 2}", "reference=null").roles
    load(*ONLINE, "async_generation_ratio=1")  # pairs of any policy's answers: nothing to weigh


def test_what_pairs_cannot_do_is_told_at_once(problems):
    kl, tools = ("use_kl_loss=true", "kl_loss_coef=0.1"), "tools={use: {calculator: {tool: calculator}}}"
    found = problems("online_dpo={}", "num_return_sequences_in_group=1", ONLINE[-1], *kl, tools)
    assert problems(*ONLINE, "online_dpo={preference_loss: kto}").keys() == {"online_dpo.preference_loss"}
    wrong = {"num_return_sequences_in_group", "use_kl_loss", "kl_loss_coef", "tools"}
    assert wrong | {"adv_estimator", "reference"} <= found.keys()
    assert "no policy gradient" in found["adv_estimator"]
    assert "online_dpo is switched on" in problems(*ONLINE, "reference=null")["reference"]
    uneven = problems(*ONLINE, "actor_train.training_args.per_device_train_batch_size=5")
    assert "rollout_batch_size = 16 pairs" in str(uneven)
    replayed = problems(*ONLINE, "actor_train.router_replay.mode=R2")
    assert "R3 or disable if the trainer computes no log-probs" in replayed["actor_train.router_replay.mode"]


def test_kept_sets_are_for_those_who_tell_and_take_them(load, problems):
    key = "train_infer_correction.replay_kept_sets"
    kept, truncated = f"{key}=64", f"{SAMPLING}.top_p=0.9"
    load(kept, truncated)
    assert "0 without top_p, top_k and min_p" in problems(kept)[key]
    changed = ("repetition_penalty=1.1", "presence_penalty=1", "frequency_penalty=1", "first_token_temperature=9")
    found = problems(kept, truncated, *(f"{SAMPLING}.{each}" for each in changed))
    assert found.keys() == {f"{SAMPLING}.{each.partition('=')[0]}" for each in changed}
    assert f"null with {key}" in found[f"{SAMPLING}.first_token_temperature"]
    for generator in ("vllm", "sglang"):
        told = problems(kept, truncated, f"actor_infer.strategy_args.strategy_name={generator}")
        assert f"0 with {generator}, which does not tell the sets" in told[key]
    scored = "reference={strategy_args: {strategy_name: vllm}, device_mapping: [0]}"
    assert "0 with reference's vllm" in problems(kept, truncated, "use_kl_loss=true", "kl_loss_coef=0.1", scored)[key]
    assert "0 with online_dpo" in problems(kept, truncated, *ONLINE)[key]


def problems_of(name: str, *overrides: str) -> dict[str, str]:
    kind = AgenticConfig if name.startswith("agentic") else RLVRConfig
    return words_of(load_config, kind, name, SHIPPED, overrides, CHECKS[kind])


def test_what_the_document_shows_is_valid_in_an_empty_folder(tmp_path, monkeypatch):
    document = (SHIPPED.parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
    agent, program, _, tools, functions = re.findall(r"```(?:yaml|python)\n(.*?)```", document, re.DOTALL)
    (tmp_path / "agent.yaml").write_text(f"defaults: [rlvr_math, _self_]\n{agent}")
    (tmp_path / "my_agent.py").write_text(program)
    (tmp_path / "mine.yaml").write_text(tools)
    (tmp_path / "my_tools.py").write_text(functions)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [main(["validate", name]) for name in ("./agent.yaml", "./mine.yaml")] == [0, 0]


def test_wrong_tools_are_told_at_once():
    wrong = ("calculator.tool=calculater", "calculator.tags=[prodcts]", "two.words={tool: calculator}")
    words = (f"+tools.use.{word}" for word in (*wrong, "find.tool=search"))
    found = problems_of("rlvr_tools", "tools.dialect=hermess", *words)
    assert "Did you mean 'hermes'?" in found["tools.dialect"]
    assert "Did you mean 'calculator'?" in found["tools.use.calculator.tool"]
    assert "did you mean products?" in found["tools.use.calculator.tags"]
    assert "missing a required argument: 'corpus'" in found["tools.use.find.args"]


def test_a_tool_has_a_name_that_dialects_can_write_and_its_environment_keeps_the_conversation():
    assert "letters, digits" in problems_of("rlvr_tools", "+tools.use={two words: {tool: calculator}}")["tools.use"]
    found = problems_of("agentic_sokoban", "+tools.use.calculator.tool=calculator")
    assert "traj with tools" in found["custom_envs.SimpleSokoban.env_manager_cls"]
    found = problems_of("agentic_sokoban", "+tools.use={calculator: {tool: calculator, tags: [Sokoban]}}")
    assert list(found) == ["tools.use.calculator.tags"]


def test_what_is_not_there_cannot_be_recorded(problems, monkeypatch, capsys, tmp_path):
    wrong = {
        "roles=[actor_train,nobody]": "actor_train", "ranks=[0,64]": "ranks below", "steps=[1,100000]": "at most",
        "steps=[0]": "at least 1", "steps=[2,2]": "each once", "nsight={output: here}": "without o",
        "peak_tflops=0": "more than 0",
    }  # fmt: skip
    for change, expected in wrong.items():
        ((path, said),) = problems(f"profiler.{change}").items()
        assert path.partition(".")[2].startswith(change.partition("=")[0]) and expected in said
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["train", "rlvr_math", "profiler.nsight={}"]) == 2, "before anything starts"
    assert "nsys (Nsight Systems)" in capsys.readouterr().err


def test_ranks_by_role():
    config = ProfilerConfig(roles=["critic"], ranks=[0, 2])
    assert config.profiled("critic", 2) == [0] and config.profiled("actor_train", 2) == []
    assert ProfilerConfig(ranks=None).profiled("actor_train", 3) == [0, 1, 2]


def strategy(name: str, **options: object) -> dict:
    return {"strategy_args": {"strategy_name": name} | ({"strategy_config": options} if options else {})}


ROLE, VLLM, SGLANG = map(strategy, ("hf_infer", "vllm", "sglang"))
TRAINED = {"training_args": {"learning_rate": 1}, "model_update_frequency": 2}
CALCULATOR = {"use": {"calculator": {"tool": "calculator"}}}
DATA = {"file_name": "train.jsonl", "prompt": "q", "response": "a"}
BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
DISTILL = {"pretrain": "org/student", "actor_train": {"data_args": DATA} | strategy("fsdp2_train")}
RLVR = {
    "pretrain": "org/student", "adv_estimator": "grpo", "rollout_batch_size": 8,
    "rewards": {"maths": {"tag_included": ["maths"], "verifiers": [{"name": "gsm8k"}]}},
    "actor_train": DISTILL["actor_train"] | {"training_args": BATCH},
}  # fmt: skip
TAUGHT = {"teacher": ROLE, "teacher_pretrain": "org/teacher"}
MATHS, CODE = (ROLE | {"pretrain": f"org/{tag}", "tag_included": [tag]} for tag in ("maths", "code"))
TWO_TAGS = {"rewards": {"both": {"tag_included": ["maths", "code"], "verifiers": [{"name": "gsm8k"}]}}}


def wrong(schema: type, values: dict) -> set[str]:
    return {*words_of(validate, schema, values, (check_strategies, check_engine_options))}


@pytest.mark.parametrize(
    ("schema", "values", "keys"),
    [
        # one teacher of an RL run
        *((RLVRConfig, RLVR | given, keys) for given, keys in (
            (TAUGHT, set()),
            (TAUGHT | {"is_pure_opd": True, "adv_estimator": "gae"}, set()),  # no critic is needed
            (TAUGHT | {"opd_form": "loss", "kd_objective": "js_divergence", "jsd_beta": 0.2, "logits_topk": 8}, set()),
            (TAUGHT | {"opd_form": "loss", "kd_temperature": 2.0, "logits_topk": 8}, set()),
            (TAUGHT | {"kd_temperature": 2.0}, {"kd_temperature"}),
            ({"teacher": ROLE}, {"teacher_pretrain"}),
            ({"teacher_pretrain": "org/teacher"}, {"teacher"}),
            (TAUGHT | {"distill_on_prompt": True}, {"distill_on_prompt"}),
            ({"is_pure_opd": True, "opd_kl_coef": 0.5}, {"is_pure_opd", "opd_kl_coef"}),
            (TAUGHT | {"kd_objective": "reverse_kl", "logits_topk": 8}, {"kd_objective", "logits_topk"}),
            (TAUGHT | {"opd_form": "reward", "is_pure_opd": True, "adv_estimator": "gae"}, {"critic"}),
            (TAUGHT | {"teacher_pretrain": "tiny"}, {"teacher_warm_start.file_name"}),
            (TAUGHT | {"teacher": ROLE | TRAINED}, {f"teacher.{key}" for key in TRAINED}),
            (TAUGHT | {"teacher_prompt": "{prompt} ({solution})", "opd_form": "loss", "logits_topk": 8}, set()),
            ({"teacher_prompt": "{prompt}"}, {"teacher_prompt"}),
            (TAUGHT | {"teacher_prompt": "{prompt}", "tools": CALCULATOR}, {"teacher_prompt"}),
            (TAUGHT | {"teacher_prompt": "{prompt}", "rollout_replay_dir": "dumped"}, {"teacher_prompt"}),
            (TAUGHT | {"teacher_prompt": "{prompt}", "user": {"path": "mine:User"}}, {"teacher_prompt"}),
            (TAUGHT | {"align_tokenizers": "text", "opd_form": "reward"}, set()),
            (TAUGHT | {"teacher_column_length": 9}, {"teacher_column_length"}),
            (TAUGHT | {"opd_token_kld_clip": 0.5, "opd_form": "loss"}, {"opd_token_kld_clip"}),
            ({"opd_token_kld_clip": 0.5, "opd_logprob_min": -10}, {"opd_token_kld_clip", "opd_logprob_min"}),
            (TAUGHT | {"align_tokenizers": "text", "opd_form": "loss"}, {"align_tokenizers"}),
            ({"align_tokenizers": "text"}, {"align_tokenizers"}),
            (TAUGHT | {"teacher": VLLM}, set()),  # log-probabilities of the sampled tokens are all that is asked
            (TAUGHT | {"teacher": SGLANG, "opd_form": "loss", "logits_topk": 8}, set()),
            (TAUGHT | {"teacher": SGLANG, "opd_form": "loss"}, {"logits_topk"}),
            ({"reference": VLLM, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_penalty": "full"}, {"kl_penalty"}),
            (TAUGHT | {"teacher": VLLM | {"infer_batch_size": 2}}, {"teacher.infer_batch_size"}),
        )),
        # several, with tags of their own
        *((RLVRConfig, RLVR | TWO_TAGS | {"teachers": given}, keys) for given, keys in (
            ({"m": MATHS, "c": CODE}, set()),
            ({"m": MATHS}, {"teachers"}),
            ({"m": MATHS, "c": CODE, "n": MATHS | {"opd_kl_coef": 0.3}}, set()),
            ({"m": MATHS, "c": CODE | {"opd_kl_coef": 0}}, {"teachers.c.opd_kl_coef"}),
            ({"m": MATHS | {"tag_included": ["maths", "maths"]}, "c": CODE}, {"teachers.m.tag_included"}),
            ({"m": MATHS | {"tag_included": ["maths", "mathz"]}, "c": CODE}, {"teachers.m.tag_included"}),
            ({"m": MATHS | {"tag_included": []}}, set()),
            ({"m": MATHS | {"pretrain": "tiny"}, "c": CODE}, {"teachers.m.pretrain"}),
            ({"m": MATHS | strategy("fsdp2_infr"), "c": CODE}, {"teachers.m.strategy_args.strategy_name"}),
            ({"m": MATHS | TRAINED, "c": CODE}, {f"teachers.m.{key}" for key in TRAINED}),
            ({"m": MATHS, "c": CODE | VLLM | {"infer_batch_size": 2}}, {"teachers.c.infer_batch_size"}),
            ({"m": MATHS, "c": CODE | {"pretrane": "org/x"}}, {"teachers.c.pretrane"}),
        )),
        # a teacher of a distillation
        *((DistillConfig, DISTILL | given, keys) for given, keys in (
            (TAUGHT, set()),
            ({"teacher_logprobs": "kept", "logits_topk": 8}, set()),
            ({}, {"teacher"}),
            ({"teacher_logprobs": "kept"}, {"logits_topk"}),
            (TAUGHT | {"precompute_only": True}, {"teacher_logprobs"}),
            ({"teacher_logprobs": "kept", "logits_topk": 8, "precompute_only": True}, {"precompute_only"}),
            (TAUGHT | {"skew_lambda": 0.3}, {"skew_lambda"}),
            (TAUGHT | {"jsd_beta": 0.2, "distill_loss_weight": 2}, {"jsd_beta", "distill_loss_weight"}),
            (TAUGHT | {"distill_on_prompt": True}, set()),
            (TAUGHT | {"distill_on_prompt": True, "train_on": "last"}, {"train_on"}),
            (TAUGHT | {"warm_start": {"file_name": "x.jsonl"}}, {"warm_start.file_name"}),
            (TAUGHT | {"align_tokenizers": "text"}, {"align_tokenizers"}),  # an unknown key
            (TAUGHT | {"teacher": VLLM}, {"logits_topk"}),
            (TAUGHT | {"teacher": VLLM, "logits_topk": 8}, set()),
            (TAUGHT | {"teacher": strategy("sglang", tp=2)},
             {"logits_topk", "teacher.strategy_args.strategy_config.tp"}),
        )),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_teacher_is_told_with_its_keys(schema, values, keys):
    assert wrong(schema, values) == keys


def test_several_teachers_take_the_place_of_one():
    several = RLVR | TWO_TAGS | {"teachers": {"m": MATHS, "c": CODE}}
    assert wrong(RLVRConfig, several | TAUGHT) == {"teachers"}
    assert wrong(RLVRConfig, several | {"teacher_prompt": "{prompt}"}) == {"teacher_prompt"}
    assert wrong(RLVRConfig, several | {"opd_form": "loss"}) == {"opd_form"}
    shared = several["teachers"] | {"g": CODE | {"tag_included": [], "opd_kl_coef": 0.3}}
    assert wrong(RLVRConfig, several | {"teachers": shared, "align_tokenizers": "text"}) == {"align_tokenizers"}
    config = validate(RLVRConfig, several | {"teachers": shared, "opd_kl_coef": 0.5})
    assert dict(zip(config.tags, config.teacher_coefficients, strict=True)) == {"maths": 0.8, "code": 0.8}
    assert wrong(RLVRConfig, several | {"opd_form": "reward", "align_tokenizers": "text", "opd_kl_coef": 0.5}) == set()
    placed = {"m": MATHS | {"device_mapping": [9]}, "c": CODE}
    config = validate(RLVRConfig, several | {"num_nodes": None, "teachers": placed})
    assert list(config.roles) == ["actor_train", "actor_infer", "teachers.m", "teachers.c"] and config.num_nodes == 2
    assert [config.model_of(f"teachers.{name}") for name in "mc"] == ["org/maths", "org/code"]


def test_keys_of_runs_on_preferences_and_scores():
    asked = DISTILL | {"actor_train": strategy("fsdp2_train") | {"data_args": {"file_name": "t.jsonl", "prompt": "q"}}}
    pairs = {"precompute_reference": False, "label_smoothing": 0.9, "preferences": {"rejected": "chosen"}}
    assert wrong(DPOConfig, asked | pairs) == {"reference", "label_smoothing", "preferences.rejected"}
    steps = {"reward_loss": "process", "sample_overflow": "truncate", "answers": {"score": "x"}, "center_coef": 0.1}
    assert wrong(RewardTrainingConfig, asked | steps) == {"sample_overflow", "answers.score", "center_coef"}


def test_an_id_stands_for_one_token(tmp_path):
    tokenizer = make_tokenizer()
    for added in ([], ["another"]):
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
        check_same_ids("tiny", str(tmp_path))
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"2 of \d+ ids differ, the first is \d+"):
        check_same_ids("tiny", str(tmp_path))
