"""``roll explain``: every key by any of its names, without anything heavy."""

import pytest

from roll.__main__ import main
from roll.configs.explain import all_keys, engine_options, explain
from roll.configs.schema import leaf_paths
from roll.extras.importers import SYSTEMS
from roll.extras.importers.table import SECTION, meaning, rows
from roll.pipeline.programs import schemas


def told(capsys: pytest.CaptureFixture[str], word: str) -> str:
    assert main(["explain", word]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_key_is_told_with_its_type_range_default_places_other_names_and_readers(capsys):
    out = told(capsys, "training_args.learning_rate")
    assert "key <role>.training_args.learning_rate" in out
    assert "type float range more than 0 default 1e-06 meaning Peak learning rate" in out
    assert "pipelines all" in out and "verl: actor_rollout_ref.actor.optim.lr (renamed)" in out
    assert "MindSpeed RL: actor_config.lr (renamed)" in out and "warm_start" not in out
    assert "one of: kl, k1, abs" in told(capsys, "kl_penalty")
    assert "tag_included, verifiers" in told(capsys, "rewards")
    out = told(capsys, "tensor_parallel_size")
    assert "read by vllm" in out and "read by fsdp2" in out
    assert "passed on to vLLM" in told(capsys, "enable_chunked_prefill")
    assert "read by math" in told(capsys, "strict_boxed")


def test_a_key_of_another_system_leads_to_ours_or_to_the_reason(capsys):
    assert "pg_clip key pg_clip" in told(capsys, "clip_ratio")
    out = told(capsys, "data.tokenizer")
    assert out.startswith("tokenizer_path key tokenizer_path") and "vLLM" not in out
    assert "(derived); args.kwargs of the verifier custom with batch" in told(capsys, "reward_model.reward_kwargs.x")
    assert "(dropped); pictures are prepared once" in told(capsys, "data.return_multi_modal_inputs")
    # The same name for something else.
    assert "MindSpeed RL: rl_config.init_kl_coef (derived: kl_loss_coef)" in told(capsys, "init_kl_coef")
    assert "env_groups" in told(capsys, "num_env_groups")


def test_keys_inside_lists_are_found_by_a_path_and_a_misspelt_one_is_told_the_nearest(capsys):
    for word in (
        "rewards.math.verifiers.0.weight",
        "verifiers.0.weight=2",
        "rewards.<domain>.verifiers.<number>.weight",
    ):
        assert "key rewards.<domain>.verifiers.<number>.weight" in told(capsys, word)
    assert main(["explain", "max_stepss"]) == 2
    assert "did you mean max_steps" in capsys.readouterr().err
    assert main(["explain", "qqqqqqqq"]) == 2
    assert "docs/configuration.md" in capsys.readouterr().err


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_everything_that_the_documents_list_is_explained(every):
    places = {place for key in all_keys(schemas(), engine_options()) for place in key.places}
    assert {path for schema in schemas().values() for path, _ in leaf_paths(schema)} <= places
    others = sorted({row.key for system in SYSTEMS for row in rows(system) if row.how != SECTION})
    assert [key for key in others[::every] if not explain(key, schemas(), engine_options())] == []
    lost = {row.here for row in rows("verl") if row.verdict == "renamed" and not row.here.endswith("**")} - {
        each.row.here for key in all_keys(schemas(), engine_options()) for each in meaning(key.name, key.places)
    }
    assert all(name.startswith(("tracker_kwargs.", "pf_ppo.")) or "strategy_config." in name for name in lost), lost
