"""Two prompts in the same words that show different pictures are two prompts, wherever that is asked."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from roll.data.batch import Batch
from roll.data.columns import IntArray, Item
from roll.data.identity import content_ids, conversation_digest, identity, items_along, vocabulary_ids
from roll.data.packing import SharedPrompts, make_shared_batches, rectangle
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy.hf_infer.continuous_batching import ContinuousBatching, RunningSequence, StopStrings
from roll.models.tiny import make_tiny_model, make_tokenizer
from roll.pipeline.column_cache import digest_of
from roll.pipeline.offline.dpo import cross
from roll.rollout.endpoint.session import Wanted
from roll.rollout.env_manager import Recorder
from roll.rollout.types import RolloutGroup
from roll.rollout.workers import FlatGroups
from tests.support.batches import batch_of
from tests.support.rollouts import Engine, make_trajectory, make_turn
from tests.support.said_engine import new_session

PAD = 9
CAT, DOG = (Item(np.frombuffer(name * 100, dtype=np.uint8)) for name in (b"cat", b"dog"))


def prompt(item: Item) -> list[int]:
    """Words around a picture of two tokens."""
    return [1, 2, *content_ids(item, [PAD, PAD]).tolist(), 3, 4]


WORDS = [1, 2, PAD, PAD, 3, 4]


def batch(*rows: list[int]) -> Batch:
    """Rows of a prompt and the answer [5, 6]."""
    return batch_of([[*row, 5, 6] for row in rows], [*map(len, rows)])


@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=4), st.binary(max_size=9))
def test_ids_of_content_are_outside_the_vocabulary_and_stand_for_its_tokens(tokens, data):
    ids = content_ids(Item(np.frombuffer(data, dtype=np.uint8)), tokens)
    assert (ids < 0).all() and ids.dtype == np.int64 and vocabulary_ids(ids).tolist() == tokens
    assert vocabulary_ids(torch.from_numpy(ids)).tolist() == tokens
    same = Item(np.frombuffer(data, dtype=np.uint8))
    assert identity(content_ids(same, tokens)) == identity(ids) != identity(content_ids(CAT, tokens))


def test_the_two_prompts_have_equal_ids_for_a_model():
    assert vocabulary_ids(np.array(prompt(CAT))).tolist() == vocabulary_ids(np.array(prompt(DOG))).tolist() == WORDS
    assert rectangle(batch(prompt(CAT), prompt(DOG))).input_ids_RC.tolist() == [[*WORDS, 5, 6]] * 2


def test_pictures_are_found_where_they_are():
    row = [*prompt(CAT), *prompt(DOG), *prompt(CAT)]
    assert items_along(row, [DOG, CAT]) == [(2, CAT), (8, DOG), (14, CAT)]
    assert items_along(WORDS, [CAT]) == []
    with pytest.raises(ValueError, match="place 2: content of none of the row's 1 items"):
        items_along(row, [DOG])
    wide, tall = (Item(CAT.data.reshape(shape)) for shape in ((10, 10, 3), (5, 20, 3)))
    assert wide.hash != tall.hash


def test_a_turn_continues_no_row_with_another_picture():
    recorder = Recorder()
    assert recorder.add(make_turn(prompt(CAT), [5])).row == 0
    assert recorder.add(make_turn([*prompt(DOG), 5, 7], [8])).row == 1
    assert recorder.add(make_turn([*prompt(CAT), 5, 7], [8])).row == 0


def test_groups_arrive_with_each_their_picture():
    def group(second: Item) -> RolloutGroup:
        turns = [make_turn(prompt(CAT), [5]), make_turn([*prompt(second), 5, 7], [8])]
        return RolloutGroup(0, "A", (make_trajectory(turns, history=True),))

    for item, num_tokens in ((CAT, 9), (DOG, 7 + 9)):
        sent = FlatGroups.of([group(item)])
        assert len(sent.block.arrays["tokens_T"]) == num_tokens
        (found,) = pickle.loads(pickle.dumps(sent))
        assert found.trajectories[0].turns[1].prompt_ids.tolist() == [*prompt(item), 5, 7]


def test_rows_share_no_prompt_with_another_picture():
    mixed = batch(prompt(CAT), prompt(DOG), prompt(CAT))
    assert SharedPrompts.find(mixed).prompt_B.tolist() == [0, 1, 0]
    assert [rows.tolist() for rows in make_shared_batches(mixed, max_sequences=2)] == [[0, 2], [1]]
    pairs = replace(batch(prompt(CAT), prompt(DOG)), pair_B=torch.zeros(2, dtype=torch.int64))
    assert SharedPrompts.find(pairs).lengths_G.tolist() == [2], "a pair shares what is in front of its pictures"


def test_hf_infer_computes_both_prompts(tmp_path):
    folder = tmp_path / "tiny"
    make_tiny_model(folder, seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stops = {"stop_ids": [], "stop_strings": StopStrings(make_tokenizer())}
    engine = ContinuousBatching(model, **stops, max_running=4, max_prefill_tokens=100)
    for name, ids in enumerate((prompt(CAT), prompt(DOG), prompt(CAT))):
        request = GenerateRequest(str(name), np.array(ids), SamplingParams(max_new_tokens=2, repetition_penalty=1.1))
        engine.add(RunningSequence(request, seed=1, limit=2))
    finished = [*engine.step(), *engine.step()]
    assert len(finished) == 3
    assert (engine.counters.prefill_tokens, engine.counters.shared_tokens) == (2 * 5, 5)


def test_other_answers_of_ktos_comparison_are_to_another_picture_too():
    crossed = cross(batch(prompt(CAT), prompt(DOG)), max_tokens=8)
    assert crossed.tokens_T.view(2, -1)[:, :6].tolist() == [prompt(CAT), prompt(DOG)]
    asked = batch(prompt(CAT), prompt(CAT), prompt(DOG))
    asked.tokens_T.view(3, -1)[:, 6] = torch.arange(3) + 50
    assert cross(asked, max_tokens=8).tokens_T.view(3, -1)[:, 6].tolist() == [52, 52, 50]


def test_kept_columns_are_of_one_picture():
    assert digest_of(batch(prompt(CAT))) == digest_of(batch(prompt(CAT))) != digest_of(batch(prompt(DOG)))


def test_an_endpoints_session_counts_and_samples_them_apart():
    def ids(item: Item) -> IntArray:
        return np.array(prompt(item))

    async def ask() -> list[GenerateRequest]:
        engine = Engine("-")
        session = new_session(engine)
        for item in (CAT, DOG, CAT):
            await session.complete(ids(item), Wanted())
        assert len({turn.state_key for turn in session.turns}) == 2
        again = Engine("-")
        await new_session(again).complete(ids(DOG), Wanted())
        return [*engine.requests, *again.requests]

    cat, dog, second_cat, lone_dog = (request.params.seed for request in asyncio.run(ask()))
    assert len({cat, dog, second_cat}) == 3 and lone_dog == dog, "the dog is asked for the first time in either"


def test_questions_of_a_dataset_are_told_apart_by_their_items():
    messages = [{"role": "user", "content": "What is it?"}]
    assert conversation_digest(messages, [CAT]) == conversation_digest(messages, [CAT])
    assert len({conversation_digest(messages, items) for items in ([], [CAT], [DOG], [CAT, DOG])}) == 4
