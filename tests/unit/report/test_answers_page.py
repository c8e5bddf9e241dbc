"""The page of an evaluation's answers."""

import dataclasses
import json
import re

import numpy as np

from roll.data.requests import Completion, FinishReason
from roll.report.page import listed_answers, save_answers
from roll.report.render import render_index
from roll.rollout.types import EpisodeEnd, Trajectory, Turn


def answer(number: int, text: str, found: str | None, truth: str, success: bool) -> Trajectory:
    ids = np.asarray([1], dtype=np.int64)
    completion = Completion("r", ids, np.zeros(1, dtype=np.float32), FinishReason.STOP, np.zeros(1, np.int64))
    turn = Turn(ids, completion, text, f"question {number} <b>", found, float(success), 0.0, "s")
    info = {"prompt_id": f"row-{number}", "ground_truth": truth}
    return Trajectory("t", number, 0, 0, (turn,), EpisodeEnd.TERMINATED, success, "", True, info)


def test_answers_are_listed_escaped_with_what_was_right(tmp_path):
    answers = [answer(0, "it is <script>4</script>", "4", "5", False), answer(1, "seven", None, "7", True)]
    page = save_answers(answers, tmp_path / "renders", 20).read_text()
    assert "Step 20: 1 of 2 answers right" in page
    assert "it is &lt;script&gt;4&lt;/script&gt;" in page and "question 1 &lt;b&gt;" in page
    assert 'title="row-1"' in page and "+1.00" in page and '">5</td>' in page and ">—</td>" in page


def test_an_episode_of_several_turns_is_shown_from_its_question_on(tmp_path):
    asked, ended = answer(0, "[add(1, 2)]", "add", "3", True), answer(0, "it is 3", "3", "3", True)
    told = dataclasses.replace(ended.turns[0], observation="3 <b>")
    page = save_answers([dataclasses.replace(asked, turns=(*asked.turns, told))], tmp_path, 1).read_text()
    words = ["question 0 &lt;b&gt;", "[add(1, 2)]", "3 &lt;b&gt;", "it is 3", ">3</td>", ">3</td>"]
    assert re.search(".*".join(map(re.escape, words)), page, re.DOTALL) and page.count("<tr>") == 2


def test_an_answer_is_shown_with_its_system_prompt_and_why_it_ended(tmp_path):
    messages = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "question 0 <b>"}]
    asked = answer(0, "four", "4", "4", True)
    asked = dataclasses.replace(asked, info={**asked.info, "conversation": json.dumps(messages)})
    said = dataclasses.replace(asked.turns[0].completion, finish_reason=FinishReason.LENGTH)
    cut = dataclasses.replace(asked, turns=(dataclasses.replace(asked.turns[0], completion=said),))
    full = dataclasses.replace(asked, end=EpisodeEnd.CONTEXT_FULL)
    page = save_answers([asked, cut, full], tmp_path, 1).read_text()
    assert page.count("system: Be &lt;brief&gt;.") == 3 and page.count("question 0 &lt;b&gt;") == 3
    assert re.findall(r'data-name="end">([^<]*)<', page) == ["stop", "cut at the length limit", "sequence is full"]


def test_an_answer_of_megabytes_is_shortened_and_one_that_cost_too_much_says_so(tmp_path):
    page = save_answers([answer(0, "seven", None, "assert f() == 7\n" * 100_000, False)], tmp_path, 1).read_text()
    assert "1,580,000 more characters" in page and len(page) < 100_000
    dear = answer(0, "9^9^9", None, "4", False)
    dear.info["over_budget"] = "math: took more than 1 s of CPU time"
    page = save_answers([dear, answer(1, "4", "4", "4", True)], tmp_path, 1).read_text()
    assert page.count("over budget: math: took more than 1 s of CPU time") == 1


def test_the_index_links_the_pages_newest_first_and_each_once(tmp_path):
    folder = tmp_path / "renders"
    for step in (0, 10, 10):
        save_answers([answer(0, "4", "4", "4", step == 10)], folder, step)
    index = render_index(tmp_path).read_text()
    assert index.count('href="answers-000010.html"') == 1
    assert index.index("step 10") < index.index("before training")
    assert "1 of 1 shown are right" in index and "0 of 1 shown are right" in index


def test_a_run_without_answers_has_no_section_for_them(tmp_path):
    assert listed_answers(tmp_path) == []
    assert "Answers" not in render_index(tmp_path).read_text()
