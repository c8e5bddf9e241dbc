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

`roll import` converts the configuration of a ROLL (Alibaba), verl, ChatLearn or MindSpeed RL run:

```bash
roll import verl <run_grpo.sh> -o mine.yaml
roll import roll <rlvr_config.yaml> max_steps=100 -o mine.yaml
roll import chatlearn <grpo_fsdp.yaml> -o mine.yaml
roll import mindspeed <grpo_qwen25_7b.yaml> -o mine.yaml
roll validate ./mine.yaml
```

A file is YAML, with the files of its defaults list if they are next to it, or a launch script. From a script the
importer reads the command that starts the training; nothing is executed. Variables, arrays, arithmetic, functions,
`eval`, `source`, loops, `case` and branches are evaluated as in bash; a variable that the script does not set becomes
`${oc.env:NAME}`. If only a shell can know which branch runs (`if [ "$DEVICE" = npu ]`, `$(nproc)`), no value is
guessed: the report names the variable that decides, and `--set DEVICE=gpu` sets it. `key=value` arguments change the
system's own keys. Several files are merged in their order.

The result contains what differs from the defaults here. If a key is not given and the other system's default differs,
that default is written out. Comments above the keys, `# lost:` and `# TODO:`, say what could not be converted and
what is left to do. The report begins with both; with `--all` it also lists keys that did not change:

| word | meaning |
|---|---|
| kept | the same key, the same value |
| renamed | another key, the same value |
| translated | another value with the same meaning |
| derived | follows from several keys |
| their default | was not given, and the default here is different |
| dropped | has no effect on results; the reason is given |
| left to you | something outside the configuration: a path, a secret, a model that must be served |
| impossible | results would change, and there is no equivalent here; the reason is given |
| unknown to the importer | no rule for the key; a value that only links read is not reported |

The exit code is 1 if a key is impossible or unknown or the result needs an edit, 2 if a file cannot be read, else 0.
Files of ROLL and verl that train on pictures are translated, for models of the families Qwen2.5-VL, Qwen3-VL, Qwen3.5
without experts, GLM-4.1V, Gemma 3, LLaVA 1.5 and Mistral Small 3.1; ROLL's `DetectionRewardWorker` becomes the
verifier `boxes`, and the rows of GEO3K in verl are scored as there (0.9 of `math`, 0.1 of the form). ROLL's keys
`video_…` and verl's `video_key` are translated for models of Qwen3-VL. Others with pictures or videos, and those with
sound, recognised by keys, models and data sets, are refused. A role whose engine takes no pictures or videos here is
named, with one that does. Secrets are not copied. `roll train` with such a file prints the command to run.
"""

FIGURES = """\
## In figures

Keys in the tables of each system, by the result of the import.

| system | same | renamed | translated | derived | dropped | impossible | keys |
|---|---|---|---|---|---|---|---|
"""

MEASURED = """
## On real files

Files from the systems' own repositories and from their users' forks. *Validates*: only paths and environment
variables are left to edit (and, for GEM's environments, a package to install). *Whole*: in addition, no key is
impossible. They were retyped from stored versions of the files and measured on 26 November 2026; some of them were used
while the importer was being fixed. Someone who had not written the importer compared some 290 values in 19 more files
by hand; 8 differed without a report at first, and these cases are fixed.

| files | number | validate | whole |
|---|---|---|---|
| ROLL's examples (RLVR, environments, SFT, DPO, distillation) and those of four forks | 21 | 18 (86 %) | 17 |
| subset: complete files with environments of ROLL or none | 18 | 18 (100 %) | 17 |
| verl up to 0.7 (`volcengine/verl`): scripts of examples, recipes and tests | 12 | 12 (100 %) | 10 |
| verl since 0.8 (`verl-project/verl`): scripts of examples and tests | 18 | 17 (94 %) | 10 |
| ChatLearn's scripts, 4 of them older, with `--set WORLD_SIZE=…` | 33 | 33 (100 %) | 16 of 24 without pictures |
| MindSpeed RL's configurations, in its checkout | 15 | 15 (100 %) | 15 |
| ROLL with pictures or videos, its own and those of two forks | 17 | 12 (71 %) | 12 |
| verl with pictures up to 0.7 | 12 | 8 (67 %) | 6 |
| verl since 0.8 with pictures or videos, with `--set DEVICE=gpu` | 9 | 6 (67 %) | 5 |
| ROLL's newest files with text, for Qwen3.5 and later models | 7 | 6 (86 %) | 3 |

At the first try, before their problems were fixed, 15 of the first 17 files of ROLL validated, 9 of 12 of verl up to
0.7 and 13 of 18 since.

The last four rows were measured on 28 November 2026, with the engines that the files name; the reports were read
beside the files, which were shortened where no key of training depends on it. What had been lost or changed without a
word, and is mended: the columns of ROLL's function for Video-R1, which its files name in `custom_data_kwargs_func`;
`reward_type`, which gives multiple choice other weights; a tower that ROLL's files freeze in runs on text, which
counted as pictures; verl's `freeze_vision_tower`; data named after videos, and Qwen3.5 with experts, which were called
valid though a run refuses them; `max_steps` of SFT with Megatron, which newer releases read; a model named by a link
to a variable, and a number behind one, which were refused. A script compared 614 values of 22 files of ROLL:
`max_steps` was the one that differed.

What remains, and why:

| file | what | why |
|---|---|---|
| ROLL `agentic … atropos`, a fork's WebShop | not valid | these environments exist only in those repositories |
| ROLL `qwen2.5-vl-7B`, verl `3b-megatron_cp`, `qwen3_vl-…-megatron` (three) | not valid | `context_parallel_size: 2` |
| ROLL `qwen3-vl-30BA3B…_sglang` | not valid | SGLang was not compared on Qwen3-VL with experts |
| ROLL `qwen3.5-35BA3`, two of verl for `qwen3_5_35b` | not valid | Qwen3.5 with experts was not compared |
| ROLL `video_r1` (two), verl `qwen3_5_2b_video` | not valid | videos of other models; ROLL's reward is not here |
| verl `qwen2_vl_2b` | not whole | no family of models here |
| ROLL `qwen38` for RLVR, SFT and distillation | not whole | options of its own model in `additional_configs` |
| ROLL `rock_swe_qwen35_2b` | not valid | its environments are only there |
| verl `qwen2_5_vl-3b-visualwebinstruct` | not whole | a reward model that writes, of its branch |
| verl `glm41v_9b` | not whole | `data.enable_thinking`, a key of its branch |
| verl `qwen3_5_2b_openr1`, `qwen3_5_2b_video` | rewards to add | verl does not score these data either |
| verl `qwen3_vl-30b-megatron`, `qwen3_vl-8b-fsdp2_npu` | cut short | a line ends the command there too; it is noted |
| ROLL, the fragment for TOPR in its documentation | not valid | `gae` without a critic: not a complete file |
| ROLL, a fork's adaptive `gae` | not whole | seven keys of that fork |
| verl `sft/…muon` under Megatron | not valid | Muon is an optimizer of `fsdp2_train` here |
| verl `cppo` | not whole | no such loss here |
| verl `multi_rs` | not whole | rejections together with `bypass_mode` |
| verl `opd_megatron` | not whole | a divergence over the vocabulary is not clamped |
| verl `separate_async` | not whole | old samples get importance weights here |
| verl `dapo_multiturn` | not whole | its dataset class and tools belong to its recipe |
| verl `dapo_fp16` | not whole | nothing trains in fp16 here |
| verl `grpo_32b`, `sft_fsdp`, `sft_peft` | needs `--set` | a branch, or an argument of the script |

Stored versions: ROLL `ed961163`, `0720e284`, `948c7b8d`, `4df34f17`, `45d3a306`, `9c2ae46d`, `5edcd1b0`, `1537854b`,
`f9b51931`, `044104da`, `c223013f`, `005acba9`, `f7865dcf`, `87740e9c`, its forks `pranay-fleet/roll-fleet` `72347eda`,
`lostgreen/ROLL_3D` `d257ba61`, `taoluo` `6ebd67bf`, `kelly159951` `7b97eef8` and `291b4cf7`, `xiyang-aads-lilly`
`59950735`, `breaddaerb` `cec5234a`; verl up to 0.7 `03aefba4`, `03150d4f`, `541ec96d`, `144f58a5`, `0061a224`,
`3a7b795e`, `83e82cdd`, `70a1859b`, `12095cde`, `a8a32e92`, `04977608`,
`87f508ea`, `0315b053`, `04ddc278`, `6e7fdc2e`, `b30a4922`, `3f388066`, `4f9c926d`, `33b50e7a`, `3beb6ec5`, `c692f8c4`,
`c19ca12b`, `e4d2344f`, `6ca65703`;
since 0.8 `08aef7ff`, `4eed7063`, `2741f279`, `7804ce3a`,
`50ef5e4f`, `3867dfdf`, `5cac7f89`, `860eebd2`, `d2c0bd69`, `712d9462`,
`1f4a45bc`, `1f4886af`, `835a33df`, `5cf0adb9`, `1b02e0ec`, `0730d6a2`, `b17f16de`.

For ten runs each of ROLL and verl, `tests/unit/extras/importers` compares the contents of a step (sequences and tokens
per optimizer step, learning rates at steps 0, 10, 100 and last, KL, bounds, averages, sampling, lengths, layout,
intervals) with figures derived from the systems' own sources. Options that no engine or environment here has
are omitted and reported as impossible.

## Keys that are not in a file

Their defaults are in `roll/extras/importers/tables/*_defaults.tsv`, for verl those of 0.6.1, 0.7.0, 0.8.0 and 0.9.1
(`scripts/generate_import_defaults.py` reads its releases), for ROLL those of 0.3.0. If such a default affects results
and differs from ours, it is written out. A key that a file sets to its default counts as not given, so a dump
of a whole configuration imports like the few keys that differ.
"""

DIFFERENCES: dict[str, tuple[str, ...]] = {
    "roll": (
        "`sequence_length` defaults to `prompt_length + response_length`, `num_gpus_per_worker` follows from a "
        "generator's tensor-parallel size, held-out data has the columns of the training data, and a null "
        "`num_nodes` follows from the devices. This holds for every configuration, not only imported ones.",
        "A prompt that is too long is dropped from the data (`prompt_overflow: drop`).",
        "The optimizer steps of a rollout have equal size here. If theirs do not, the nearest size is taken and "
        "reported.",
        "A reward worker class becomes a verifier with the same purpose. The verifier `math` scores 1 or 0 and has "
        "no penalty for repetition or length.",
        "`reward_type` of `CrossThinkQARuleRewardWorker` becomes weights of `multiple_choice` and `format`; there, "
        "rewards are 1 lower, and again by up to 0.5 for groups of three words that come again.",
        "A judge on the run's own devices stays there (`judge_model_type: inference`); the cluster `reward`, which "
        "environments call, becomes `judge`.",
        "With `async_generation_ratio` old samples get importance weights (`train_infer_correction.is_weight`).",
        "Constants of ROLL's losses are keys here, and written out: the dual clip `dual_clip_c` is 1 + 2 × "
        "`pg_clip`, the estimator of the KL loss is k3. A `max_grad_norm` of 0, the default of distillation there, "
        "clips nothing.",
        "A reward worker without a counterpart becomes the verifier `custom` with a file for you to write: until "
        "then the configuration is not valid.",
        "An RLVR response can use what `sequence_length` leaves after `prompt_length`, even if `response_length` "
        "or `max_new_tokens` is smaller; both are `prompt_length` and `response_length` here.",
        "A warm-up of W steps begins with a rate of 0 there: it is k / W in step k, and (k + 1) / (W + 1) here.",
        "Agentic batches are not filled up or cut at random (`batch_adjust_mode`).",
        "Files of the SFT, DPO and distillation pipelines become configurations of the same pipelines here; "
        "`num_train_epochs`, or `max_steps` of SFT with Megatron, then sets the length of the run, and held-out "
        "samples are read whole.",
    ),
    "verl": (
        "A mini-batch counts prompts there and samples here: `ppo_mini_batch_size × n = per device × accumulated × "
        "data-parallel`.",
        "Schedules of the learning rate count batches there and optimizer steps here: `lr_warmup_steps` and the "
        "like are multiplied by `train_batch_size / ppo_mini_batch_size × ppo_epochs`.",
        "`gae` always whitens there; `whiten_advantages` does so here.",
        "The dual clip is always on there, with a `clip_ratio_c` of 3.",
        "Releases up to 0.7, and those since 0.8, in which engines train, are recognised by the keys of a file; a "
        "file with keys of both is reported. Up to 0.7 `token-mean` is a mean over each micro-batch's tokens, "
        "averaged with weights by samples, and `seq-mean-token-sum-norm` the sum of a micro-batch; since 0.8, and "
        "here, both are means over an optimizer step.",
        "A critic has the epochs, mini-batches, gradient bound and averaging of the policy; other values are reported.",
        "Bounds of a rejection (`rollout_rs`) are on the ratio of training to generating engine here, on its "
        "inverse there.",
        "There is one `kl_penalty` for the loss and the reward.",
        "Held-out responses are sampled if `val_kwargs.temperature` is above 0, as since 0.7, which ignores "
        "`do_sample`; with `rollout.mode: sync` they are greedy unless it is true. Here a greedy pass over "
        "them always runs before the first step and after the last.",
        "After the last step a checkpoint is always written and an evaluation always runs.",
        "Reward domains are made for the public data sources; the score of a wrong answer is 0, not -1.",
        "In the fully asynchronous trainer (`fully_async_main`) a step is what is trained between two updates of "
        "the generator: `trigger_parameter_sync_step × require_batches × ppo_mini_batch_size` prompts; intervals "
        "and `total_rollout_steps` are counted that way. A step begins when all of its groups exist, not with the "
        "first fetch. `staleness_threshold` is `async_generation_ratio`: both limit the groups that are started "
        "ahead, as a share of a step. A started group has no age limit there; `rollout_window: 1` sets one here.",
        "In the mode `separate_async` of `trainer.v1`, `train_batch_size` is a whole step: `parameter_sync_step` "
        "(4 by default) × `ppo_mini_batch_size` prompts. Other values are reported.",
        "One step off policy is `async_generation_ratio: 1` with `partial_rollout: false`. Both trainers have "
        "separate devices for `actor_infer`, on the trainer's nodes if 8 devices hold both.",
        "With `async_generation_ratio` a loss has importance weights, or the sampler's probabilities "
        "(`train_infer_correction.bypass`, on by default in `verl.experimental`); scripts with neither are "
        "reported.",
        "`fsdp` keeps weights in fp32 and computes in bf16: `dtype: fp32` with `param_dtype: bf16`.",
    ),
    "verl_sft": (
        "For `fsdp_sft_trainer`, and for `sft_trainer` with an engine. A script or a file is recognised by its "
        "keys; keys that are not given have that trainer's defaults.",
        "Nested columns are dotted paths: `prompt_key=extra_info prompt_dict_keys=[question]` is `prompt: "
        "extra_info.question`.",
        "The loss of an optimizer step is the mean over all its tokens here, the mean of its micro-batches' means "
        "there.",
        "`micro_batch_size_per_gpu` divides a rank's share of `train_batch_size`; `nproc_per_node` of `torchrun` "
        "is `num_gpus_per_node`.",
    ),
    "chatlearn": (
        "`sample_per_episode` counts responses there; `rollout_batch_size` counts prompts here.",
        "`kl_coef` above 0 is `use_kl_loss` with `kl_penalty: k3`.",
        "`packing` is two keys here: micro-batches by tokens, and concatenated sequences.",
        "The reference is the policy's initial weights; it cannot be another model.",
        "Roles outside `colocation` get separate devices, after those of the others.",
        "`final_clip_ratio`, 3 by default, limits the loss of each token: `pg_loss_cap`.",
        "With `fsdp` the learning rate is constant, and `min_lr` has no effect. With `megatron` it falls linearly from "
        "`lr` to `min_lr` in `train_iters` optimizer steps, which is 1 in releases without that key; the loss has "
        "no KL and no entropy term, and their coefficients no effect.",
        "`seq_length` of `policy`, without `max_response_tokens_length`, limits prompt and response together. Here "
        "each has a limit, and the prompt gets a quarter.",
        "If the number of devices is known only at run time (`num_device` of `base_env.sh`), `--set WORLD_SIZE=1 --set "
        "GPUS_PER_NODE=8` sets it; otherwise the fewest nodes of 8 that hold the layout are used, and the report "
        "asks for it.",
    ),
    "mindspeed": (
        "`stage` selects the pipeline: `ray_grpo`, `ray_dapo` and `ray_ppo` are RLVR, `dpo` is preferences, `sft` "
        "supervised training and `orm` a reward model. The last three have as many devices as `torchrun` starts; "
        "here as many as hold the model.",
        "`init_kl_coef` is the coefficient of a KL loss with `ray_grpo`, and `kl_loss_coef` here; the same name "
        "here is the KL in the reward, which `ray_ppo` has with `use_kl_in_reward`. `ray_dapo` has no KL.",
        "A loss is the mean over the tokens of a micro-batch, then over micro-batches; here the mean over all "
        "tokens of an optimizer step. With `micro_batch_size: 1` theirs is `loss_agg_mode: seq-mean-token-mean`.",
        "`global_batch_size` counts prompts. So does `mini_batch_size` if it is not larger, as in newer releases; "
        "a larger one counts samples. `actor_update_dispatch_size` is the number of samples sent to a rank at a "
        "time: no optimizer step there has more.",
        "Keys of `actor_config` take precedence over those of `megatron_training`.",
        "A verifier scores 1 or 0 here; `acc` also has -0.5 and -1 there, and `base_acc` requires a format.",
        "Models with experts have a balancing loss, with `moe_aux_loss_coeff` 0.001 by default.",
        "Data and checkpoints in Megatron's formats are not read: give the rows and the folder in Hugging Face format.",
        "`min_lr` is absolute there; `min_lr_ratio` is a share of the peak.",
        "Rows are reshuffled for every optimizer step (`shuffle_mini_batch` is always true).",
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
    lines += [
        f"What `roll import` makes of each key of {SYSTEMS[system]}; *there* is that system, *here* this library. How "
        "to convert a file: [migrating](../migrating.md).",
        "",
        "## Differences in meaning",
        "",
    ]
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
