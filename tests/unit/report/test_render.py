"""Episodes to watch: safe whatever the model says, complete, and readable by a browser and a GIF decoder."""

import base64
import dataclasses
import io
import json
import pathlib
import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest
from PIL import Image

from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import settings_of
from roll.data.requests import FinishReason
from roll.pipeline.rollouts import trajectory_record
from roll.report.curve import learning_curve_svg
from roll.report.gif import MAX_PICTURES, _scenes, render_episode_gif
from roll.report.render import (
    MAX_SHOWN,
    choose_episodes,
    listed_answers,
    render_episode_html,
    render_index,
    save_answers,
    save_renders,
)
from roll.rollout.types import VALID_UNKNOWN, EpisodeEnd, Trajectory, Turn
from tests.support.browser import CHROMIUM, LAPTOP, PHONE, browser
from tests.support.cli import call, refused
from tests.support.lines import write_lines
from tests.support.rollouts import make_trajectory, told_turn

SOKOBAN = "####\n#PX#\n#_O#\n####"
HOSTILE = "</pre></section><script>alert(1)</script><img src=x onerror=alert(2)> & \"'\x00\x1b[31m</title>"


def picture(shade: int, size: tuple[int, int] = (60, 40)) -> bytes:
    """A PNG as ``checked_frame`` makes them."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 90, 200)).save(buffer, "PNG")
    return buffer.getvalue()


FRAMES = (picture(1), picture(80), picture(160))


def turn(observation: str, text: str, action: str | None, *rewards: float) -> Turn:
    return told_turn(text, observation, action, *rewards)


def episode(*turns: Turn, **values: Any) -> Trajectory:
    """A solved one of Sokoban, of two turns unless others are given."""
    turns = turns or (turn(SOKOBAN, "I go <answer>Down</answer>", "Down", -0.1), turn(SOKOBAN, "hmm", None, -0.1, -0.5))
    return make_trajectory(turns, **{"tag": "Sokoban", "final_observation": SOKOBAN, "success": True, **values})


class Page(HTMLParser):
    """Collects the elements and, per frame, the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.frames: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.frames.append("")
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.frames[-1] += data + "\n"


# Pages


def test_a_page_shows_picture_words_action_and_both_rewards_of_each_turn():
    page = Page(render_episode_html(episode(frames=FRAMES)))
    assert len(page.frames) == 3
    assert "I go <answer>Down</answer>" in page.frames[0] and "\nDown\n" in page.frames[0] and "-0.10" in page.frames[0]
    assert "no valid action" in page.frames[1] and "-0.50" in page.frames[1] and "-0.70" in page.frames[1]
    assert "Solved" in page.frames[2] and "Not solved" not in page.frames[2]
    sources = [str(attrs["src"]) for tag, attrs in page.elements if tag == "img"]
    assert [base64.b64decode(source.partition(",")[2]) for source in sources] == list(FRAMES)
    assert SOKOBAN in page.frames[0], "what the policy saw is there too"
    buttons = {attrs.get("id") for tag, attrs in page.elements if tag == "button"}
    assert buttons >= {"play", "back", "next", "first", "last"}
    unknown = episode(info={VALID_UNKNOWN: True})  # nobody looks for an action
    page = Page(render_episode_html(unknown))
    assert "no valid action" not in page.frames[1] and "\nDown\n" in page.frames[0]
    assert [scene.left for scene in _scenes(unknown)] == ["Down", "", "solved"]
    assert [scene.left for scene in _scenes(episode())] == ["Down", "no valid action", "solved"]


def test_without_pictures_boards_or_turns_the_words_are_shown():
    page = Page(render_episode_html(episode()))
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert all(SOKOBAN in frame for frame in page.frames)
    told = Page(render_episode_html(episode(frames=("a dark cave", "a lake", "the end"))))
    assert "a dark cave" in told.frames[0] and SOKOBAN not in told.frames[0]
    math = episode(turn("What is 2 + 2?", "4", "4", 1.0), final_observation="")
    assert "What is 2 + 2?" in Page(render_episode_html(math)).frames[0]
    empty = make_trajectory([], end=EpisodeEnd.CONTEXT_FULL)
    assert "out of context after 0 turns" in Page(render_episode_html(empty)).frames[0]


def test_hostile_and_long_text_stays_text_and_a_page_needs_nothing_from_outside():
    turns = (turn(HOSTILE, HOSTILE, HOSTILE), turn(f"{HOSTILE}\n{SOKOBAN}\n{HOSTILE}", HOSTILE, None))
    end = "y" * (MAX_SHOWN + 1234)
    text = render_episode_html(episode(*turns, tag=HOSTILE, final_observation=end, frames=FRAMES))
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and tags.count("img") == 3 and len(page.frames) == 3
    assert not {"link", "iframe"} & set(tags)
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in page.frames[0], "shown as it was said"
    assert "(1,234 more characters)" in text and len(text) < 2 * MAX_SHOWN + 20_000
    assert all(str(attrs["src"]).startswith("data:") for _, attrs in page.elements if "src" in attrs)
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "") and "url(" not in text
    assert "default-src 'none'" in text


# GIFs


def test_a_gif_has_a_picture_per_turn_and_holds_the_last(tmp_path):
    path = tmp_path / "episode.gif"
    turns = (turn(SOKOBAN, HOSTILE * 30, None), turn("lake", "x", "Up"))
    render_episode_gif(episode(*turns, frames=(FRAMES[0], "a text between", FRAMES[2])), path)
    with Image.open(path) as gif:
        assert gif.n_frames == 3 and gif.info["loop"] == 0
        durations = []
        for index in range(3):
            gif.seek(index)
            durations.append(gif.info["duration"])
            assert len(gif.convert("RGB").getcolors(1 << 20)) > 10, "something is drawn"
    assert durations[-1] > durations[0] > 0


def test_equal_turns_keep_their_pictures_and_times_and_a_long_episode_has_few(tmp_path):
    """GIF writers merge equal pictures; the time that they are shown must add up all the same."""
    path = tmp_path / "still.gif"
    render_episode_gif(episode(*[turn("no board", "a", "a")] * 4, final_observation="no board"), path)
    with Image.open(path) as gif:
        assert gif.n_frames == 5
    render_episode_gif(episode(*[turn("a", "b", "c")] * 300), tmp_path / "long.gif")
    with Image.open(tmp_path / "long.gif") as gif:
        assert MAX_PICTURES // 2 < gif.n_frames <= MAX_PICTURES + 1


def test_rendering_costs_little(tmp_path):
    """Sixteen episodes of ten turns: 3.9 s of one core before pictures shared their tiles and their palette."""
    turns = [turn(SOKOBAN, "go", "Up")] * 10
    episodes = [episode(*turns, group=group, frames=FRAMES[:1] * 11) for group in range(16)]
    save_renders(episodes[:1], tmp_path, step=0, limit=1)
    started = time.process_time()
    save_renders(episodes, tmp_path, step=1, limit=16)
    assert time.process_time() - started < 3.0


@pytest.mark.parametrize(
    "observation", ["", "word " * 500, "Ω 中文 🙂\t\x07", "#" * 60 + "\n#P" + "_" * 57 + "#\n" + "#" * 60]
)
def test_odd_observations_can_be_drawn(tmp_path, observation):
    render_episode_gif(make_trajectory([], final_observation=observation), tmp_path / "odd.gif")


# Choosing, saving, listing


def test_solved_unsolved_and_recorded_episodes_of_different_groups_are_chosen():
    places = [{"group": group, "member": member} for group in range(4) for member in range(3)]
    episodes = [episode(**place, success=place["group"] < 2) for place in places]
    chosen = choose_episodes(episodes, 4)
    assert [(t.group_id, t.success) for t in chosen] == [(0, True), (2, False), (1, True), (3, False)]
    assert len(choose_episodes(episodes, 100)) == 12 and choose_episodes(episodes, 0) == []
    assert [t.member for t in choose_episodes([episode(member=m) for m in range(3)], 2)] == [0, 1]
    episodes = [episode(group=group, frames=FRAMES if group < 2 else ()) for group in range(4)]
    episodes.append(episode(group=9, tag="Text", success=False))
    assert [t.group_id for t in choose_episodes(episodes, 4)] == [0, 9, 1]


def test_saved_renders_are_listed_in_an_index_with_the_learning_curve(tmp_path):
    folder = tmp_path / "renders"
    metrics = [{"step": step, "rollout/success": 0.1 * step, "rollout/reward": None} for step in range(5)]
    write_lines(tmp_path / "metrics.jsonl", metrics)
    unsolved = episode(group=1, success=False)
    pages = save_renders([episode(tag="../../evil <b>"), unsolved], folder, step=20, limit=2)
    save_renders([episode()], folder, step=0, limit=2)
    assert [page.name for page in pages] == ["step-000020-evil-b-g0-m0.html", "step-000020-Sokoban-g1-m0.html"]
    save_renders([unsolved], folder, step=20, limit=2)  # again, after a resume
    index = render_index(tmp_path)
    assert index == folder / "index.html"
    text = index.read_text(encoding="utf-8")
    links = [attrs["href"] for tag, attrs in Page(text).elements if tag == "a"]
    assert links == [*(page.name for page in pages), "step-000000-Sokoban-g0-m0.html"]
    images = [str(attrs["src"]) for tag, attrs in Page(text).elements if tag == "img"]
    assert all((folder / name).exists() for name in [*links, *images]) and len(images) == 3
    assert "Success by training step" in text and "../../evil &lt;b&gt;" in text
    assert "<b>" not in text.split("evil")[1][:12]
    ElementTree.parse(folder / "learning_curve.svg")


def test_the_index_of_a_supervised_run_shows_its_loss(tmp_path):
    lines = [{"step": step, "sft/loss": 3.4 - step if step else None, "eval/loss": 2.0} for step in range(4)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    text = render_index(tmp_path).read_text(encoding="utf-8")
    assert "Loss by training step" in text and "Success by training step" not in text
    root = ElementTree.parse(tmp_path / "loss_curve.svg").getroot()
    assert [str(label.text) for label in root.iter(f"{SVG}text")][1:6] == ["0", "1", "2", "3", "4"], "the axis' labels"
    assert len(list(root.iter(f"{SVG}polyline"))) == 2 and len(list(root.iter(f"{SVG}circle"))) == 3 + 4


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_the_page_of_a_run_that_failed_says_why_and_what_is_known(tmp_path, status):
    (tmp_path / "renders").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "traceback.txt").write_text("Traceback")
    summary = {"status": status, "steps": 3, "wall_s": 90, "error": HOSTILE, "seconds": {"start": 3.25, "train": 40.0}}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"checkpoint": "/out/checkpoint-3"}))
    write_lines(tmp_path / "metrics.jsonl", [{"step": 3, "rollout/reward": 0.5, "actor/loss": None}])
    text = render_index(tmp_path).read_text(encoding="utf-8")
    assert listed_answers(tmp_path) == [] and "Answers" not in text
    for known in (status, "<b>3</b>", "<b>1.5</b>", "start 3.2, train 40.0", "rollout/reward at step 3", "0.500"):
        assert known in text, known
    assert "/out/checkpoint-3" in text and "traceback.txt" in text and "&lt;script&gt;alert(1)" in text
    assert "script" not in [tag for tag, _ in Page(text).elements]
    early = tmp_path / "before its first step"
    early.mkdir()
    (early / "summary.json").write_text(json.dumps({"status": status, "error": "RunFailedError: custom_envs.X"}))
    page = render_index(early).read_text()
    assert "RunFailedError: custom_envs.X" in page and "<svg" not in page


# The curve

SVG = "{http://www.w3.org/2000/svg}"


def test_the_curve_maps_values_to_the_axis():
    root = ElementTree.parse(io.StringIO(learning_curve_svg({"success": [(0, 0.0), (10, 1.0), (5, 0.5)]}))).getroot()
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in root.iter(f"{SVG}circle")]
    lines = sorted(float(line.get("y1", "")) for line in root.iter(f"{SVG}line"))
    assert dots[0][1] == lines[-1] and dots[2][1] == lines[0], "0 % lies on the lowest line, 100 % on the highest"
    assert dots[1] == pytest.approx(((dots[0][0] + dots[2][0]) / 2, (lines[0] + lines[-1]) / 2), abs=0.1)


@pytest.mark.parametrize(
    ("width", "title", "below"), [(760, "Loss by training step", False), (360, "Loss", True), (760, "A" * 70, True)]
)
def test_a_narrow_curve_and_a_long_title_have_the_legend_below_it_in_letters_of_one_size(width, title, below):
    names = {"training": [(0, 0.1), (9, 0.4)], "held-out": [(0, 0.2)]}
    root = ElementTree.fromstring(learning_curve_svg(names, width=width, title=title))
    places = {text.text: [float(text.get(axis, "")) for axis in "xy"] for text in root.iter(f"{SVG}text")}
    assert root.get("font-size") == "13"
    for name in names:
        assert (places[name][1] > places[title][1] + 10) == below
        assert 0 < places[name][0] < float(root.get("viewBox", "").split()[2]) - 40


def test_several_curves_are_named_and_long_ones_are_smoothed():
    noisy = [(step, float(step % 2)) for step in range(200)]
    root = ElementTree.fromstring(learning_curve_svg({"seed <0>": noisy, "seed 1": [(1, 0.3), (2, float("nan"))]}))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "seed <0>" in texts and "seed 1" in texts and "100%" in texts
    raw, smooth, short = (line.get("points", "").split() for line in root.iter(f"{SVG}polyline"))
    assert len(raw) == len(smooth) == 200 and len(short) == 1
    heights = [float(point.split(",")[1]) for point in smooth[20:-20]]
    assert max(heights) - min(heights) < 20


@pytest.mark.parametrize("points", [[], [(3, 0.5)], [(0, float("nan"))], [(-5, 0.2), (1e6, 7.0)]])
def test_few_or_odd_points_still_make_a_picture(points):
    ElementTree.fromstring(learning_curve_svg({"success": points}))


def answer(number: int, text: str, found: str | None, truth: str, success: bool) -> Trajectory:
    info = {"prompt_id": f"row-{number}", "ground_truth": truth}
    said = turn(f"question {number} <b>", text, found, float(success))
    return make_trajectory([said], tag="t", group=number, success=success, info=info)


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


# The report of a run


def a_run(folder: pathlib.Path, steps: int = 30, words: str = "four") -> pathlib.Path:
    """What a run has written: metrics, configuration, summary, two evaluations' episodes."""
    (folder / "trajectories").mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "eval/success": 0.25, "eval/prompts": 4}]
    for step in range(1, steps + 1):
        figures = {"rollout/success": step / steps, "rollout/reward": step / steps, "rollout/episodes": 4.0}
        lines.append({"step": step, **figures, "time/train": 0.5, "time/rollout": 1.5, "actor/lr": None})
    lines[-1] |= {"eval/success": 0.75, "eval/prompts": 4}
    write_lines(folder / "metrics.jsonl", lines)
    config = {"seed": 7, "max_steps": 500, "actor_infer": {"infer_batch_size": 1}}
    (folder / "config.yaml").write_text(json.dumps(config))
    alarm = {"watch": "dead_groups", "action": "warn", "text": f"{words} groups", "first": 3, "last": 9, "count": 2}
    summary = {"status": "completed", "steps": steps, "seconds": {"start": 9.0, "rollout": 45.0, "train": 15.0}}
    summary |= {"watches": {"dead_groups": alarm}, "versions": {"torch": "2.9.0"}}
    summary |= {"draws": {"trained": 60, "settled": 3}, "data": {"actor_train.data_args": {"rows": 90, "samples": 84}}}
    workers = {"actor_train[0]": [[3.0, 4.0]], "actor_infer[0]": [[1.0, 2.5]]}
    workers |= {"actor_infer[1]": [[0.5, 2.0], [2.0, 3.0]]}
    phases = [["rollout", 1.0, 3.0], ["train", 3.0, 4.0]]
    same = {"start": 0.0, "phases": phases, "workers": workers}
    write_lines(folder / "timeline.jsonl", [{"step": step, **same} for step in (1, 2)])
    (folder / "summary.json").write_text(json.dumps(summary))
    for step in (0, steps):
        texts = (words, f"{words} at {step}", "seven", "eight")
        answers = [answer(number, text, text, "7", (number + step) % 2 == 0) for number, text in enumerate(texts)]
        answers = [dataclasses.replace(each, seed=number) for number, each in enumerate(answers)]
        lines = [trajectory_record(each) for each in answers]
        lines[0]["turns"][0]["finish_reason"] = "length"
        write_lines(folder / "trajectories" / f"eval-{step:05d}.jsonl", lines)
    tokens = ["asked", [words, -0.5, -0.25, 1.5, 1.0, 3], ["no", -0.5, None, -0.75, 0.0, 3]]
    row = {"tag": "t", "group": 1, "score": 1.0, "tokens": tokens}
    write_lines(folder / "trajectories" / f"tokens-{steps:05d}.jsonl", [row])
    return folder


def test_the_page_of_a_run_shows_metrics_times_diagnosis_watches_settings_versions_and_episodes(tmp_path):
    planned = {"device": "H100", "seconds": {"rollout": 0.5, "train": 1.0, "sync": 2.0}}
    index = render_index(a_run(tmp_path / "run", steps=31), schema=RLVRConfig, forecast=planned)
    page = index.read_text(encoding="utf-8")
    text = re.sub(r"(<[^>]+>|\s)+", " ", page.partition("</style>")[2])
    for words in (
        "The run learns, going by the training reward 0.177 → 0.855 over 31 steps; held-out success 25.0% → 75.0%",
        "dead_groups four groups 2 times, step 3 to 9",
        "75.0% 30.1% to 95.4% (4)",
        "rollout 46.5 s 75%",
        "train 15.5 s 25%",
        "rollout train actor_train 0% 100% actor_infer 88% (75%) 0%",
        "rollout 0.5 s 1.5 s 3 train 1 s 0.5 s 0.5 Position",
        "prompts or starts drawn 63, of 84 in the data",
        "settled without training 3",
        "rollout/success 1 ",
        "constant: rollout/episodes 4",
        "differ from their defaults (2) seed 7 actor_infer.infer_batch_size 1 have their defaults (1)",
        "max_steps 500",
        "torch 2.9.0",
        "wrong now, right at step 0",
        "right now, wrong at step 0",
        "cut off · evaluation of step 31",
        "right answer 7",
    ):
        assert words in text, words
    assert "actor/lr" not in text, "nothing was measured"
    likelier = "log-prob -0.5, of the trainer -0.25, advantage +1.5, ratio 1.28, reward +1, sampled by version 3"
    assert f'0.65);text-decoration:underline wavy" title="{likelier}, is made likelier">four</span>' in page
    assert 'rgba(200,64,47,0.33)" title="log-prob -0.5, advantage -0.75, sampled by version 3, is made less' in page


def test_the_page_needs_nothing_from_outside_escapes_everything_and_stays_small(tmp_path, capsys):
    folder = a_run(tmp_path / "run", steps=2000, words=HOSTILE * 200)
    assert call(capsys, "report", folder, "-o", tmp_path / "one.html")[0] == f"{tmp_path / 'one.html'}\n"
    text = (tmp_path / "one.html").read_text(encoding="utf-8")
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert not {"script", "img", "iframe", "link", "a"} & set(tags) and tags.count("svg") >= 4
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "").replace(SVG[1:-1], "")
    assert len(text) < 400_000 and "default-src 'none'" in text
    for drawn in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawn)
    assert "expected a run's folder" in refused(capsys, "report", tmp_path / "none")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_has_nothing_to_say_of_the_page_and_shows_what_a_tapped_token_was_trained_for(tmp_path):
    page = render_index(a_run(tmp_path / "run", words=HOSTILE), schema=RLVRConfig)
    with browser(tmp_path / "profile") as window:
        for size in (LAPTOP, PHONE):
            for dark in (False, True):
                seen = window.look(page, size, dark=dark)
                assert seen.messages == [] and seen.overflow == 0
        token = "document.querySelector('span[tabindex]')"
        window.value(f"{token}.focus()")
        shown = window.value(f"getComputedStyle({token}, '::after').content")
        assert "log-prob -0.5, of the trainer -0.25, advantage +1.5, ratio 1.28" in shown and "likelier" in shown
        assert window.value(f"getComputedStyle({token}, '::after').position") == "fixed"
        assert window.value("document.scripts.length + document.querySelectorAll('img').length") == 0


def test_settings_are_compared_with_the_defaults_of_their_sections():
    rewards = {"a": {"tag_included": ["t"], "verifiers": [{"name": "math"}]}}
    config = RLVRConfig(seed=1, actor_train={"training_args": {"learning_rate": 3e-5}}, rewards=rewards)
    changed = {key: value for key, value, differs in settings_of(config.model_dump(mode="json"), RLVRConfig) if differs}
    verifiers = changed.pop("rewards.a.verifiers")
    assert verifiers[0]["name"] == "math" and changed.pop("rewards.a.tag_included") == ["t"]
    assert changed == {"seed": 1, "actor_train.training_args.learning_rate": 3e-5}
