"""Writes docs/migrating.md and docs/migrating/ from the importers' tables: ``make docs``, or with ``--check``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from generated import write_or_check

from roll.configs.problems import NOTHING
from roll.extras.importers import SYSTEMS
from roll.extras.importers.table import SECTION, Row, rows, yaml_text

DOCS = Path(__file__).resolve().parents[1] / "docs"

INTRODUCTION = """\
# From another system

<!-- Written by scripts/generate_migration_docs.py from roll/extras/importers/tables. Do not edit. -->

Start from the files that you have:

```bash
roll import verl <run_grpo.sh> -o mine.yaml
roll import roll <rlvr_config.yaml> max_steps=100 -o mine.yaml
roll import chatlearn <grpo_fsdp.yaml> -o mine.yaml
roll import mindspeed <grpo_qwen25_7b.yaml> -o mine.yaml
roll validate ./mine.yaml
```

A file is YAML, with the files of its defaults list where they are beside it, or a launch script. Of a script the
command is read that starts the training: nothing is run. Variables, arrays, arithmetic, functions, `eval`, `source`,
loops, `case` and branches are followed as bash would; a variable that the script does not set becomes `${oc.env:NAME}`.
Where only a shell can tell which branch runs (`if [ "$DEVICE" = npu ]`, `$(nproc)`), no value is guessed: the report
names the variable that decides, `--set DEVICE=gpu` gives it, and `key=value` words change the system's own keys.
Several files are laid over each other in their order.

The result holds what differs from the defaults here. Where a key is not given and its default there is another than
here, theirs is written out. Above the keys that it concerns, `# lost:` and `# TODO:` say what could not be carried
over and what is left to do. The report begins with both; keys that are kept as they are it names with `--all`:

| word | meaning |
|---|---|
| kept | the same key, the same value |
| renamed | another key, the same value |
| translated | another value that says the same |
| derived | it follows from several keys |
| their default | it was not given, and the default here is another |
| dropped | nothing changes without it; the reason is given |
| left to you | something outside of the configuration: a path, a secret, a model that must be served |
| impossible | results would change, and there is no way to say it here; the reason is given |
| unknown to the importer | no rule knows the key; a value that links read elsewhere is not reported so |

The exit code is 1 when a key is impossible or unknown or the result needs an edit, 2 when a file cannot be read, else
0. Files that train on pictures, video or sound are refused by the keys, models and data sets that say so.
Secrets are not copied. `roll train` given such a file answers with the command to run.
"""

FIGURES = """\
## In figures

Keys in the tables below, by what becomes of them.

| system | same | renamed | translated | derived | dropped | impossible | keys |
|---|---|---|---|---|---|---|---|
"""

MEASURED = """
## On real files

Files of the systems' own repositories and of their users' forks. *Validates*: nothing is left to edit but paths and
variables of the environment (and, for GEM's environments, a package to install). *Whole*: besides, no key is
impossible. They were retyped from stored versions of the files and measured on 26 November 2026; some were read while
the importer was mended. Of some 290 values in 19 more files, compared by hand by someone who had not written the
importer, 8 differed without a word at first sight; those kinds are mended.

| files | number | validate | whole |
|---|---|---|---|
| ROLL's examples (RLVR, environments, SFT, DPO, distillation) and those of four forks | 21 | 18 (86 %) | 17 |
| of these, the files that name environments of ROLL or none, and are whole files | 18 | 18 (100 %) | 17 |
| verl up to 0.7 (`volcengine/verl`): scripts of examples, recipes and tests | 12 | 12 (100 %) | 10 |
| verl since 0.8 (`verl-project/verl`): scripts of examples and tests | 18 | 17 (94 %) | 10 |
| ChatLearn's scripts, 4 of them older, with `--set WORLD_SIZE=…` | 33 | 33 (100 %) | 16 of 24 without pictures |
| MindSpeed RL's configurations, in its checkout | 15 | 15 (100 %) | 15 |

At first sight, before what they showed was mended, 15 of the first 17 of ROLL validated, 9 of 12 of verl up to 0.7 and
13 of 18 since.

What remains, and why:

| file | what | why |
|---|---|---|
| ROLL `agentic … atropos`, a fork's WebShop | not valid | these environments are only in their own repositories |
| ROLL, the fragment for TOPR in its documentation | not valid | `gae` without a critic: it is no whole file |
| ROLL, a fork's adaptive `gae` | not whole | seven keys of that fork |
| verl `sft/…muon` under Megatron | not valid | Muon is an optimizer of `fsdp2_train` here |
| verl `cppo` | not whole | no such loss here |
| verl `multi_rs` | not whole | rejections beside `bypass_mode` |
| verl `opd_megatron` | not whole | a divergence over the vocabulary is not clamped |
| verl `separate_async` | not whole | old samples get importance weights here |
| verl `dapo_multiturn` | not whole | its data set class and its tools are of its recipe |
| verl `dapo_fp16` | not whole | nothing trains in fp16 here |
| verl `grpo_32b`, `sft_fsdp`, `sft_peft` | until answered | a branch, or an argument of the script, is asked |

Stored versions: ROLL `ed961163`, `0720e284`, `948c7b8d`, `4df34f17`, `45d3a306`, `9c2ae46d`, `5edcd1b0`, `1537854b`,
its forks `pranay-fleet/roll-fleet` `72347eda`, `kelly159951` `7b97eef8` and `291b4cf7`, `xiyang-aads-lilly`
`59950735`, `breaddaerb` `cec5234a`; verl up to 0.7 `03aefba4`, `03150d4f`, `541ec96d`, `144f58a5`, `0061a224`,
`3a7b795e`, `83e82cdd`, `70a1859b`, `12095cde`, `a8a32e92`; since 0.8 `08aef7ff`, `4eed7063`, `2741f279`, `7804ce3a`,
`50ef5e4f`, `3867dfdf`, `5cac7f89`, `860eebd2`, `d2c0bd69`, `712d9462`.

Of ten runs of each of the two, what a step is (sequences and tokens per optimizer step, rates at steps 0, 10, 100 and
last, the KL, bounds, averages, sampling, lengths, layout, periods) is compared in `tests/unit/extras/importers` with
figures that were worked out from the systems' own sources. Options that no engine or environment here has are left out,
and told as impossible.

## Keys that a file does not give

Their defaults are in `roll/extras/importers/tables/*_defaults.tsv`, for verl those of 0.6.1, 0.7.0, 0.8.0 and 0.9.1
(`scripts/generate_import_defaults.py` reads its releases), for ROLL those of 0.3.0. Where a default of theirs changes
results and ours is another, it is written out. A key that is written out with its default counts as not given: a file
in which a whole configuration was dumped imports as the few keys do that differ.
"""

DIFFERENCES: dict[str, tuple[str, ...]] = {
    "roll": (
        "`sequence_length` is `prompt_length + response_length` where it is not given, `num_gpus_per_worker` "
        "follows from a generator's tensor-parallel size, and held-out data has the columns of the training data. That "
        "holds for every configuration, not for imported ones alone; `num_nodes` follows from the devices where it is "
        "null.",
        "A prompt that is too long is left out of the data (`prompt_overflow: drop`).",
        "An optimizer step is a whole share of a rollout. Where theirs is not, the nearest is taken, and the report "
        "says so.",
        "A reward worker class becomes a verifier of the same purpose. The verifier `math` scores 1 or 0 and knows no "
        "penalty for repetition or length.",
        "A judge that runs on the run's own devices stays there (`judge_model_type: inference`); the cluster `reward`, "
        "which environments ask, becomes `judge`.",
        "With `async_generation_ratio` old samples get importance weights (`train_infer_correction.is_weight`).",
        "Constants of ROLL's losses are keys here, and written out: the dual clip `dual_clip_c` is 1 + 2 × `pg_clip`, "
        "the estimator of the KL loss is k3. A `max_grad_norm` of 0, the default of distillation there, clips nothing.",
        "A reward worker that has no counterpart becomes the verifier `custom` with a file that is yours to write: "
        "until then the configuration is not valid.",
        "An answer of RLVR has what `sequence_length` leaves of `prompt_length`, also where `response_length` or "
        "`max_new_tokens` is less; both are `prompt_length` and `response_length` here.",
        "A warm-up of W steps begins with a rate of 0 there, which is k / W in step k, and is (k + 1) / (W + 1) here.",
        "Agentic batches are not filled up or cut by chance (`batch_adjust_mode`).",
        "Files of the SFT, DPO and distillation pipelines become configurations of those here; `num_train_epochs` is "
        "then how long the run is, and held-out samples are read whole.",
    ),
    "verl": (
        "A mini-batch counts prompts there and samples here: `ppo_mini_batch_size × n = per device × accumulated × "
        "data-parallel`.",
        "Schedules of the learning rate count batches there and optimizer steps here: `lr_warmup_steps` and the like "
        "are multiplied by `train_batch_size / ppo_mini_batch_size × ppo_epochs`.",
        "`gae` always whitens there; `whiten_advantages` says so here.",
        "The dual clip is always on there, with `clip_ratio_c` 3.",
        "Releases up to 0.7, and those since 0.8, in which engines train, are told apart by the keys that a file uses; "
        "a file that has keys of both is told so. Up to 0.7 `token-mean` is a mean over each micro-batch's tokens, "
        "these means weighted by samples, and `seq-mean-token-sum-norm` the sum of a micro-batch; since 0.8, and here, "
        "both are means over an optimizer step.",
        "A critic has the epochs, mini-batches, bound on gradients and averaging of the policy; other ones are told.",
        "Bounds of a rejection (`rollout_rs`) are on the ratio of training to generating engine here, on its inverse "
        "there.",
        "There is one `kl_penalty` for the loss and the reward.",
        "Held-out answers are sampled where `val_kwargs.temperature` is above 0, as since 0.7, which passes over "
        "`do_sample`; with `rollout.mode: sync` they are greedy unless it is true. A greedy pass over them is made "
        "here in any case before the first step and after the last.",
        "Checkpoints are written and evaluations made after the last step, whatever the periods are.",
        "Reward domains are made for the public data sources; the score of a wrong answer is 0, not -1.",
        "Of the fully asynchronous trainer (`fully_async_main`) a step is what is trained between two updates of the "
        "generator: `trigger_parameter_sync_step × require_batches × ppo_mini_batch_size` prompts; periods and "
        "`total_rollout_steps` are counted so. It begins when all of its groups are there, and not with the first "
        "fetch. `staleness_threshold` is `async_generation_ratio`: both bound the groups that are begun ahead, in "
        "shares of a step. What is begun may grow as old as it takes there; `rollout_window: 1` bounds that.",
        "In the mode `separate_async` of `trainer.v1`, `train_batch_size` is a whole step: "
        "`parameter_sync_step` (4 by default) × `ppo_mini_batch_size` prompts. A file in which it is not is told.",
        "One step off policy is `async_generation_ratio: 1` with `partial_rollout: false`. Both trainers have devices "
        "of their own for `actor_infer`, on the trainer's nodes where 8 devices hold both.",
        "With `async_generation_ratio` a loss has importance weights, or the sampler's probabilities "
        "(`train_infer_correction.bypass`, on by default in `verl.experimental`); scripts that have neither are told.",
        "`fsdp` keeps weights in fp32 and computes in bf16: `dtype: fp32` with `param_dtype: bf16`.",
    ),
    "verl_sft": (
        "Of `fsdp_sft_trainer`, and of `sft_trainer` with an engine. A script or a file of them is known by its keys; "
        "what is not given has the default of the one that is meant.",
        "Columns inside a column are dotted paths: `prompt_key=extra_info prompt_dict_keys=[question]` is "
        "`prompt: extra_info.question`.",
        "The loss of an optimizer step is the mean over all its tokens here, the mean of its micro-batches' means "
        "there.",
        "`micro_batch_size_per_gpu` divides a rank's share of `train_batch_size`; `nproc_per_node` of `torchrun` is "
        "`num_gpus_per_node`.",
    ),
    "chatlearn": (
        "`sample_per_episode` counts answers there; `rollout_batch_size` counts prompts here.",
        "`kl_coef` above 0 is `use_kl_loss` with `kl_penalty: k3`.",
        "`packing` is two keys here: micro-batches by tokens, and sequences laid end to end.",
        "The reference is the policy's starting weights; another model cannot be one.",
        "Roles out of `colocation` get devices of their own, behind those of the others.",
        "`final_clip_ratio`, 3 where it is not given, bounds the loss of each token: `pg_loss_cap`.",
        "With `fsdp` the learning rate is level, whatever `min_lr` says. With `megatron` it falls in a line from "
        "`lr` to `min_lr` in `train_iters` optimizer steps, which is 1 where a release has no such key; the loss has "
        "no KL and no entropy term, whatever their coefficients.",
        "`seq_length` of `policy`, without `max_response_tokens_length`, bounds prompt and answer together. Here each "
        "has a bound, and the prompt gets a quarter.",
        "Where only a shell knows the number of devices (`num_device` of `base_env.sh`), `--set WORLD_SIZE=1 --set "
        "GPUS_PER_NODE=8` give it; without these, the fewest nodes of 8 that hold the layout are taken, and it "
        "is asked for.",
    ),
    "mindspeed": (
        "`stage` says which pipeline a file is for: `ray_grpo`, `ray_dapo` and `ray_ppo` are RLVR, `dpo` is "
        "preferences, `sft` supervised training and `orm` a reward model. The last three have as many devices as "
        "`torchrun` starts; here as many as hold the model.",
        "`init_kl_coef` is the coefficient of a KL loss with `ray_grpo`, and `kl_loss_coef` here; the same name here "
        "is the KL in the reward, which `ray_ppo` has with `use_kl_in_reward`. `ray_dapo` has no KL.",
        "A loss is the mean over the tokens of a micro-batch, then over micro-batches; here the mean over all tokens "
        "of an optimizer step. With `micro_batch_size: 1` theirs is `loss_agg_mode: seq-mean-token-mean`.",
        "`global_batch_size` counts prompts. So does `mini_batch_size` where it is not larger, as in newer releases; a "
        "larger one counts samples. `actor_update_dispatch_size` is how many samples a rank is given at a time: no "
        "optimizer step there has more.",
        "Keys of `actor_config` go before those of `megatron_training`.",
        "A verifier scores 1 or 0 here; `acc` has -0.5 and -1 too there, and `base_acc` asks for a form.",
        "Models with experts have a loss that balances them, of 0.001 where `moe_aux_loss_coeff` is not given.",
        "Data and checkpoints in Megatron's formats are not read: name the rows and the folder in Hugging Face format.",
        "`min_lr` is absolute there; `min_lr_ratio` is a share of the peak.",
        "Rows are drawn anew for every optimizer step (`shuffle_mini_batch` is always true).",
    ),
}
"""What a reader should know beyond single keys."""


def render() -> dict[Path, str]:
    """Every page by its path."""
    counts = {system: Counter(row.verdict for row in rows(system)) for system in SYSTEMS}
    words = ("same", "renamed", "translated", "derived", "dropped", "impossible")
    figures = [
        f"| [{SYSTEMS[system]}](migrating/{system}.md) | {' | '.join(str(found[word]) for word in words)} | "
        f"{sum(found[word] for word in words)} |"
        for system, found in counts.items()
    ]
    overview = "\n".join([INTRODUCTION, FIGURES + "\n".join(figures) + "\n" + MEASURED])
    return {
        DOCS / "migrating.md": overview,
        **{DOCS / "migrating" / f"{system}.md": _page(system) for system in SYSTEMS},
    }


def _page(system: str) -> str:
    lines = [
        f"# From {SYSTEMS[system]}",
        "",
        "<!-- Written by scripts/generate_migration_docs.py. Do not edit. -->",
        "",
    ]
    lines += ["How to convert a file: [migrating](../migrating.md).", "", "## Differences in meaning", ""]
    lines += [f"- {text}" for text in DIFFERENCES[system]]
    lines += ["", "## Keys", "", "| key | here | what becomes of it | note |", "|---|---|---|---|"]
    lines += [_line(row) for row in rows(system) if row.how != SECTION or row.note]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    here = ", ".join(
        [f"`{row.here}`" if row.here else "", *(f"`{each.key}: {yaml_text(each.value)}`" for each in row.beside)]
    )
    notes = [row.note] if row.note else []
    if row.default is not NOTHING:
        notes.append(f"there {_code(row.default)} by default")
    if row.harmless:
        notes.append(f"nothing is lost with {', '.join(map(_code, row.harmless))}")
    text = "; ".join(notes).replace("|", "\\|").replace("<", "&lt;")
    return f"| `{row.key}` | {here} | {row.verdict} | {text} |"


def _code(value: object) -> str:
    return f"`{yaml_text(value)}`"


if __name__ == "__main__":
    sys.exit(write_or_check(render, __doc__))
