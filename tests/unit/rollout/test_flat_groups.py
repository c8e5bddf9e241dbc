"""Groups between processes: equal in every field, with the arrays of all turns as four, three of them in a block."""

import pickle
from dataclasses import replace

import numpy as np

from roll.data.columns import Item, expand
from roll.rollout.types import RolloutGroup, Trajectory
from roll.rollout.workers import FlatGroups
from tests.unit.rollout.test_saved_groups import assert_equal
from tests.unit.rollout.test_trajectory import conversation, make_trajectory, make_turn


def talk(member: int) -> Trajectory:
    parts = [([1, 2], [3, 4], 0.5), ([5], [], 0.0), ([6, 7, 8], [9], 1.0 + member)]
    return make_trajectory(conversation(parts), history=True, member=member)


def there_and_back(*groups: RolloutGroup) -> tuple[list[RolloutGroup], int]:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(FlatGroups.of(groups), protocol=5, buffer_callback=buffers.append)
    return list(pickle.loads(data, buffers=buffers)), len(buffers)


def test_groups_arrive_as_they_were_in_four_arrays():
    steps = make_trajectory([make_turn([1, 2], [3, 4], 0.5), make_turn([1, 2], [], 0.0, -0.1)], history=False)
    steps = replace(steps, info={"prompt_id": "p", "count": 3}, frames=(b"png", "text"))
    groups = [
        RolloutGroup(7, "A", (talk(0), steps, talk(1)), dropped=2, errors=("fell",), baseline=talk(-1)),
        RolloutGroup(8, "A", (steps,)),
        RolloutGroup(9, "A", (), dropped=4, errors=("lost",)),
        RolloutGroup(10, "A", (talk(0), make_trajectory([], history=True))),
    ]
    got, num_arrays = there_and_back(*groups)
    assert_equal(got, groups)
    assert num_arrays == 4
    assert there_and_back() == ([], 4)


def test_a_conversation_is_there_once_and_does_not_keep_other_groups():
    long = make_trajectory(conversation([([1] * 100, [2] * 100, 0.0)] * 20), history=True)
    (group, _), _ = there_and_back(RolloutGroup(0, "A", (long,)), RolloutGroup(1, "A", (long,)))
    assert len(expand(FlatGroups.of([group]).block.arrays["tokens_T"])) == 20 * 200  # type: ignore[attr-defined]
    assert group.trajectories[0].turns[0].prompt_ids.base is None


def test_what_is_no_conversation_though_it_should_be_one_arrives_too():
    turns = [make_turn([1, 2], [3]), make_turn([1, 2, 4, 5], [6]), make_turn([1], [2]), make_turn([1, 2, 3], [4])]
    group = RolloutGroup(0, "A", (make_trajectory(turns, history=True),))
    assert_equal(there_and_back(group)[0], [group])


def test_pictures_lie_in_a_block_of_their_own_which_is_not_kept_for_those_that_are_known():
    cat, dog = (Item(np.full((4, 4, 3), shade, dtype=np.uint8)) for shade in (1, 2))
    turns = [replace(make_turn([1], [2]), items=items) for items in ((cat,), (dog, cat), ())]
    group = RolloutGroup(0, "A", (make_trajectory(turns, history=False),))
    known: dict[str, Item] = {}
    (first,) = FlatGroups.of([group]).read(known)
    assert_equal([first], [group])
    flat = FlatGroups.of([group])
    (again,) = flat.read(known)
    assert [*again.items] == [cat, dog, cat] and all(item is known[item.hash] for item in again.items)
    assert len(again.blocks) == 2 and flat.pictures not in again.blocks
