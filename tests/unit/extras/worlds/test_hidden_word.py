"""The word game: marks, what may be hidden, rewards, the expert."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.extras.worlds.hidden_word import WORDS, HiddenWordEnv, marks
from tests.support.tags import answer

LETTERS = st.text("abc", min_size=5, max_size=5)


@given(LETTERS, LETTERS)
def test_a_letter_is_marked_as_often_as_both_words_have_it(guess, word):
    marked = marks(guess, word)
    for letter in set(guess):
        told = [mark for mark, tried in zip(marked, guess, strict=True) if tried == letter]
        assert sum(mark != "." for mark in told) == min(guess.count(letter), word.count(letter))
        assert "o" not in told[told.index(".") :] if "." in told else True  # the first ones are marked
    assert [mark == "+" for mark in marked] == [left == right for left, right in zip(guess, word, strict=True)]
    assert marks("erase", "creek") == "o+..o"


@pytest.mark.parametrize("history", [True, False])
def test_the_observation_tells_the_guesses(history):
    env = HiddenWordEnv(words=["crane", "creek", "erase"], show_history=history)
    seed = next(seed for seed in range(100) if env.reset(seed=seed) and env.expert_actions() and env._word == "creek")
    assert env.reset(seed=seed)[0] == "No guess yet."
    assert env.step(answer("Erase"))[0] == "erase o+..o"
    text, reward, terminated, truncated, info = env.step(answer("creek"))
    assert text == ("erase o+..o\ncreek +++++" if history else "creek +++++")
    assert (reward, terminated, truncated, info["success"], info["action"]) == (1.0, True, False, True, "creek")


def test_what_is_no_listed_word_tells_nothing_and_costs_a_guess():
    env = HiddenWordEnv(max_steps=3, format_penalty=-0.25, reward_scale=2.0)
    text, start = env.reset(seed=0)
    for said, last in ((answer("zzzzz"), False), ("crane", False), (answer("crane crane"), True)):
        after, reward, terminated, truncated, info = env.step(said)
        assert (after, info["state_key"], info["action"]) == (text, start["state_key"], None)
        assert (reward, terminated, truncated) == (-0.5, False, last)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(answer("crane"))


def test_each_place_is_paid_once_and_a_repeated_guess_tells_nothing_new():
    env = HiddenWordEnv(words=["abcd", "abxx", "xbcx"], letter_reward=0.1, step_penalty=-0.01, solved_reward=1.0)
    seed = next(seed for seed in range(100) if env.reset(seed=seed) and env._word == "abcd")
    env.reset(seed=seed)
    steps = [env.step(answer(word)) for word in ("abxx", "abxx", "xbcx", "abcd")]
    assert [step[1] for step in steps] == pytest.approx([0.19, -0.01, 0.09, 1.09])
    assert [step[4]["action_is_effective"] for step in steps] == [True, False, True, True]


def test_the_splits_share_no_hidden_word_and_all_words_may_be_guessed():
    hidden = {}
    for split in ("train", "eval", "all"):
        env = HiddenWordEnv(split=split)
        assert env.action_names == WORDS
        hidden[split] = set()
        for seed in range(2000):
            env.reset(seed=seed)
            hidden[split].add(env._word)
    assert not hidden["train"] & hidden["eval"]
    assert hidden["all"] & hidden["train"] and hidden["all"] & hidden["eval"]
    assert 0.1 < len(hidden["eval"]) / len(WORDS) < 0.3


def test_the_expert_names_what_fits_and_wins_nearly_always():
    env, rng, wins = HiddenWordEnv(), random.Random(0), 0
    for seed in range(200):
        env.reset(seed=seed)
        left = len(env.expert_actions())
        ended = False
        while not ended:
            fits = env.expert_actions()
            assert env._word in fits and len(fits) <= left
            left = len(fits)
            _, _, solved, truncated, _ = env.step(answer(rng.choice(fits)))
            ended = solved or truncated
        wins += solved
        assert not solved or env.expert_actions() == []
    assert wins > 170
