"""Datasets of prompts: columns, filters, lengths, and what is wrong with a row."""

import json
import logging
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from roll.configs.data import DataArguments
from roll.configs.prompts import DataGeneratorConfig
from roll.configs.rlvr import RLVRConfig
from roll.data import prompts as prompts_module
from roll.data.files import Problems
from roll.data.prompt_rows import RowError
from roll.data.prompts import DataError, Prompt, PromptDataset, PromptSampler, load_prompts
from roll.data.questions import Answer, AnswerColumns, read_responses
from roll.data.renderer import ChatRenderer
from roll.distributed.cluster.errors import WorkerDiedError
from roll.models.tiny import make_tokenizer
from roll.pipeline.prompts import PromptRolloutWorkers, load_datasets, make_data
from roll.pipeline.rlvr import run_rlvr
from roll.pipeline.teachers import TeacherPrompts
from roll.preflight.templates import policy_renderer
from roll.utils.registry import UnknownNameError
from tests.support.examples import examples
from tests.support.lines import write_lines
from tests.support.sizes import tiny_folder
from tests.support.talks import says, system, user

RENDERER = ChatRenderer(make_tokenizer())
USER = [user("2*3=")]
ASKED = user("1+1=")
THINK = system("Think.")
OPTIONS: dict[str, Any] = {"renderer": None, "prompt_length": None, "allowed_tags": None, "seed": 0}


def load(path: Path | list[str] | None = None, **args: Any) -> PromptDataset:
    """With arguments of the data, and of the call where they are among ``OPTIONS``."""
    options = {name: args.pop(name, usual) for name, usual in OPTIONS.items()}
    if "messages" not in args:
        args.setdefault("prompt", "prompt")
    return load_prompts(DataArguments(file_name=str(path) if isinstance(path, Path) else path, **args), **options)


def dataset(folder: Path, *rows: Mapping[str, Any], **columns: Any) -> Path:
    """JSON lines of ``rows``, each with ``columns`` and what every row needs."""
    defaults = {"prompt": "1+1=", "solution": "2", "tag": "math"}
    return write_lines(folder / "data.jsonl", [{**defaults, **columns, **row} for row in rows])


def reasons(path: Path, **args: Any) -> list[str]:
    """The problems of ``path``, without its name."""
    with pytest.raises(DataError) as raised:
        load(path, **args)
    return [problem.removeprefix(f"{path}:") for problem in raised.value.problems]


def test_rows_become_a_sequence_of_prompts(tmp_path):
    path = dataset(tmp_path, {"id": "x", "level": 3, "sources": ["a"]}, {"id": 7, "solution": {"any": [1.5, None]}})
    first, second = load(path)
    assert (first.id, first.tag, first.ground_truth, first.prompt_ids) == ("x", "math", "2", None)
    assert first.messages == (ASKED,)
    assert first.extra_info == {"level": 3, "sources": ["a"]}
    assert second.id == "7" and second.ground_truth == {"any": [1.5, None]}
    assert pickle.loads(pickle.dumps(first)) == first
    prompts = load(dataset(tmp_path, {"id": "a"}, {"id": "b"}, {"id": "c"}))
    assert len(prompts) == 3 and [p.id for p in prompts[1:]] == ["b", "c"] and prompts[-1].id == "c"
    assert [p.id for p in pickle.loads(pickle.dumps(prompts))] == ["a", "b", "c"]


def test_columns_have_other_names_and_rows_without_id_are_named_by_their_place(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"q": "a", "r": 1, "t": "x"}, {"q": "b", "r": 2, "t": "y"}]')
    prompts = load(path, prompt="q", response="r", tag="t")
    assert [(p.id, p.tag, p.ground_truth, p.extra_info) for p in prompts] == [
        (f"{path}:1", "x", 1, {}),
        (f"{path}:2", "y", 2, {}),
    ]
    assert [p.id for p in load(path, prompt="q", response="r", tag="t", id="r")] == ["1", "2"]
    assert load(path, prompt="q", response=None, tag="t")[0].ground_truth is None


def test_conversations_and_the_system_prompt(tmp_path):
    long = [system("Be brief."), *USER, says("6"), user("Sure?", name=None)]
    path = dataset(tmp_path, {"messages": USER}, {"messages": long}, {"messages": json.dumps(USER)})
    prompts = load(path, messages="messages", system_prompt="Think.")
    assert prompts[0].messages == prompts[2].messages == (THINK, *USER)
    assert prompts[1].messages == (*long[:3], user("Sure?"))
    assert load(path, messages="messages")[0].messages == tuple(USER)
    assert load(path, system_prompt="Think.")[0].messages == (THINK, ASKED)


def test_a_row_has_a_system_message_and_a_matter_of_its_own(tmp_path):
    rows = [{"s": "Add.", "question": "Sum up:", "input": "1 2"}, {"s": None, "question": "Greet.", "input": " "}]
    prompts = load(dataset(tmp_path, *rows), prompt="question", system="s", query="input", system_prompt="Think.")
    assert [prompt.messages for prompt in prompts] == [
        (system("Add."), user("Sum up:\n1 2")),
        (THINK, user("Greet.")),
    ]
    assert prompts[0].extra_info == {"prompt": "1+1="}
    path = dataset(tmp_path, {"s": "Add.", "messages": [THINK, *USER]}, {"messages": USER})
    twice, missing = reasons(path, messages="messages", system="s")
    assert twice == "1: column 's': a system message, but column 'messages' begins with one"
    assert missing.startswith("2: ") and "'s'" in missing
    assert [problem.path for problem in DataArguments(query="input", messages="m").problems()] == ["query"]


def test_rows_as_verl_writes_them_and_a_column_whose_name_has_a_dot_comes_before_the_path(tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [user(f"{n}+1=")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n, "split": "train"},
        }
        for n in range(3)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    columns = {"response": "reward_model.ground_truth", "tag": "data_source"}
    prompts = load(path, messages="prompt", **columns)
    assert [p.ground_truth for p in prompts] == ["1", "2", "3"]
    assert prompts[2].messages == (user("2+1="),)
    assert prompts[2].tag == "openai/gsm8k" and prompts[2].id == f"{path}:3"
    others = {"ability": "math", "reward_model": rows[2]["reward_model"]}
    assert prompts[2].extra_info == others | {"index": 2, "split": "train"}
    by_index = load(path, id="extra_info.index", **columns)
    assert [p.id for p in by_index] == ["0", "1", "2"]
    assert [p.messages for p in prompts] == [p.messages for p in by_index]
    path = dataset(tmp_path, {"a.b": "flat", "a": {"b": "nested"}}, {"a": {"b": "nested"}})
    assert [p.ground_truth for p in load(path, response="a.b")] == ["flat", "nested"]


def test_a_missing_tag_is_the_default_one(tmp_path):
    path = dataset(tmp_path, {}, {"tag": None}, {"tag": 5})
    assert [p.tag for p in load(path, default_tag="other")] == ["math", "other", "5"]
    assert [p.tag for p in load(path, tag="domain", default_tag="other")] == ["other"] * 3
    assert reasons(path) == ["2: column 'tag' is null; expected it, or data_args.default_tag"]
    assert reasons(path, tag="domain")[0] == "1: column 'domain' is missing; expected it, or data_args.default_tag"
    assert reasons(path, default_tag="maths", allowed_tags={"math", "5"}) == [
        "2: tag 'maths', expected one of 5, math; did you mean 'math'?"
    ]


@pytest.mark.parametrize(
    ("row", "args", "reason"),
    [
        ({}, {"prompt": "promt"}, "no column 'promt', the row has 'prompt', 'solution', 'tag'; did you mean 'prompt'?"),
        ({}, {"response": "a.b"}, "no column 'a.b', the row has 'prompt', 'solution', 'tag' (data_args.response: null"),
        ({}, {"id": "uid"}, "no column 'uid', the row has"),
        ({"tag": True}, {}, "column 'tag': True, expected text or a whole number"),
        ({"tag": ""}, {}, "column 'tag': '', expected text or a whole number"),
        ({"prompt": " \n"}, {}, "column 'prompt': empty, expected a question"),
        ({"prompt": None}, {}, "column 'prompt': null, expected text"),
        ({"prompt": 12}, {}, "column 'prompt': 12, expected text"),
        ({"m": []}, {"messages": "m"}, "column 'm': [], expected a list of messages"),
        ({"m": ["x"]}, {"messages": "m"}, "m[0]: 'x', expected an object with role and content"),
        ({"m": [{"value": "x"}]}, {"messages": "m"}, "m[0]: no role, got 'value'"),
        ({"m": [{"role": "user"}]}, {"messages": "m"}, "m[0]: no content, got 'role'"),
        ({"m": [{"role": ["user"], "content": "x"}]}, {"messages": "m"}, "m[0].role: ['user'], expected one of"),
        ({"m": [user([{"type": "text"}])]}, {"messages": "m"}, "m[0].content[0].text: null, expected"),
        ({"m": [*USER, user("")]}, {"messages": "m"}, "m[1].content: empty, expected a question"),
        (
            {"m": [*USER, says("6")]},
            {"messages": "m"},
            "m[1]: the last message is the assistant's, expected the user's",
        ),
        ({"m": [{**USER[0], "tool_calls": [1]}]}, {"messages": "m"}, "m[0].tool_calls[0]: 1, expected an object with"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_line(tmp_path, row, args, reason):
    path = dataset(tmp_path, {"m": USER} if "m" in row else {}, row)
    assert reasons(path, **args)[-1].startswith(f"2: {reason}")


def test_all_problems_of_all_files_come_together(tmp_path):
    one = dataset(tmp_path, {}, {"prompt": ""})
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "x"\n{"prompt": "x", "solution": 1, "tag": "arts"}\n')
    with pytest.raises(DataError) as raised:
        load([str(one), str(other), str(tmp_path / "none.jsonl")], allowed_tags={"math"})
    assert [problem.removeprefix(f"{tmp_path}/").split(" ")[0] for problem in raised.value.problems] == [
        "none.jsonl:",  # files are looked for before any is read
        "data.jsonl:2:",
        "other.jsonl:1:",
        "other.jsonl:2:",
    ]
    assert isinstance(raised.value, ValueError) and raised.value.count == 4


def test_rows_without_an_id_or_with_that_of_another_are_told_apart_by_their_place(tmp_path):
    path = dataset(tmp_path, *({"id": value} for value in ("a", 1, "a", 1.0, None, 2.5, "", [1])))
    data = load(path)
    names = [prompt.id.replace(str(path), "data") for prompt in data]
    assert names == ["a", "1", "a data:3", "1 data:4", "data:5", "2.5", "data:7", "data:8"]
    (note,) = data.report.notes
    assert "ids that others have too" in note and note.endswith(f"2 rows, the first {path}:3")


def test_reference_answers_that_are_empty_are_told_with_the_first(tmp_path):
    path = dataset(tmp_path, *({"solution": value} for value in ("2", " ", 0, False, None, [])))
    (note,) = load(path).report.notes
    assert note == f"warning: {path}: empty reference answers (column 'solution'): 3 rows, the first {path}:2"
    assert not load(path, response=None).report.notes


def test_a_dataset_without_prompts_is_an_error(tmp_path):
    path = dataset(tmp_path)
    assert reasons(path) == [" no rows"]
    path = dataset(tmp_path, {"source": "a"}, {"source": "a"})
    assert reasons(path, dataset_filter={"source": "b"}) == [" dataset_filter removed all 2 rows"]
    assert reasons(path, renderer=RENDERER, prompt_length=3, prompt_overflow="drop") == [
        f"no prompts: all 2 have more than prompt_length = 3 tokens, the longest {len(RENDERER.prompt([ASKED]))}"
    ]


def test_the_filter_keeps_sources_and_difficulties(tmp_path):
    rows = [{"id": f"{source}{level}", "source": source, "difficulty": level} for source in "abc" for level in range(4)]
    path = dataset(tmp_path, *rows)

    def kept(**rules: Any) -> list[str]:
        return [p.id for p in load(path, dataset_filter=rules)]

    assert kept(source="b") == ["b0", "b1", "b2", "b3"]
    assert kept(source=["a", "c"], max_difficulty=0) == ["a0", "c0"]
    assert kept(min_difficulty=1, max_difficulty=2) == ["a1", "a2", "b1", "b2", "c1", "c2"]
    report = load(path, dataset_filter={"source": "b"}).report
    assert (report.rows, report.filtered, report.prompts) == (12, 8, 4)


def test_the_filter_reads_dotted_columns_and_numbers_in_text_and_nothing_of_what_it_leaves_out(tmp_path):
    path = dataset(tmp_path, {"meta": {"level": "1.5"}}, {"meta": {"level": 3}}, {"meta": {"level": "nan"}})
    rules = {"difficulty_column": "meta.level", "min_difficulty": 2}
    assert reasons(path, dataset_filter=rules) == ["3: column 'meta.level': 'nan', expected a number"]
    assert reasons(path, dataset_filter={"source": "x"})[0].startswith("1: no column 'source', the row has")
    path = dataset(tmp_path, {"meta": {"level": "1.5"}}, {"meta": {"level": 3}})
    assert len(load(path, dataset_filter=rules)) == 1
    path = dataset(tmp_path, {"source": "a"}, {"source": "b", "prompt": None, "tag": "unknown"})
    assert len(load(path, dataset_filter={"source": "a"}, allowed_tags={"math"})) == 1


def test_num_samples_takes_the_first_or_draws_by_the_seed(tmp_path):
    path = dataset(tmp_path, *({"id": n} for n in range(100)))

    def drawn(seed: int, **args: Any) -> list[int]:
        return [int(p.id) for p in load(path, seed=seed, dataset_filter={"num_samples": 10}, **args)]

    assert drawn(0, shuffle=False) == list(range(10))
    assert drawn(0) == drawn(0) == sorted(set(drawn(0))) != drawn(1)
    assert len(drawn(0)) == 10 and max(drawn(0)) > 20
    assert len(load(path, dataset_filter={"num_samples": 1000})) == 100


def long_and_short(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    rows = [{"id": n, "prompt": "x" * n} for n in (5, 40, 10, 60)]
    whole = [RENDERER.prompt([user(row["prompt"])]).tolist() for row in rows]
    return dataset(tmp_path, *rows), whole


def test_prompts_that_are_too_long_stop_the_run_or_are_left_out(tmp_path, caplog):
    path, whole = long_and_short(tmp_path)
    limit = len(whole[2])
    expected = f"expected at most prompt_length = {limit} (see data_args.prompt_overflow)"
    assert reasons(path, renderer=RENDERER, prompt_length=limit) == [
        f"2: {len(whole[1])} tokens, {expected}",
        f"4: {len(whole[3])} tokens, {expected}",
    ]
    prompts = load(path, renderer=RENDERER, prompt_length=len(whole[3]))
    assert len(prompts) == 4 and all(p.prompt_ids is None for p in prompts)
    assert prompts.report.longest == len(whole[3]) and prompts.report.overlong == 0
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prompts = load(path, renderer=RENDERER, prompt_length=limit, prompt_overflow="drop")
    assert [p.id for p in prompts] == ["5", "10"]
    assert caplog.messages == [str(prompts.report)]
    assert str(prompts.report) == (
        f"2 prompts (math 2): 4 rows read, 0 removed by the filter, longest {len(whole[3])} tokens, "
        f"2 over {limit} tokens dropped"
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_that_are_too_long_lose_a_side(tmp_path, side):
    path, whole = long_and_short(tmp_path)
    limit = len(whole[2])
    prompts = load(path, renderer=RENDERER, prompt_length=limit, prompt_overflow=side)
    cut = [ids[-limit:] if side == "left" else ids[:limit] for ids in whole]
    seen = [None if p.prompt_ids is None else p.prompt_ids.tolist() for p in prompts]
    assert seen == [None, cut[1], None, cut[3]]
    (note,) = prompts.report.notes
    assert f"prompt_length = {limit} tokens are truncated on the {side}: 2 rows, the first {path}:2" in note
    assert all(p.prompt_ids.dtype == np.int64 for p in prompts if p.prompt_ids is not None)
    assert (prompts.report.overlong, prompts.report.longest) == (2, len(whole[3]))


def test_lengths_count_the_system_prompt_and_need_no_limit(tmp_path):
    path = dataset(tmp_path, {})
    short, long = (load(path, renderer=RENDERER, system_prompt=system).report.longest for system in (None, "Think."))
    assert short == len(RENDERER.prompt([ASKED])) < long
    assert load(path).report.longest is None


@pytest.mark.parametrize("count", [3, 2500])
def test_a_template_that_refuses_messages_is_told_by_row(tmp_path, count):
    picky = ChatRenderer(
        make_tokenizer(),
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}{{ messages[0].role }}",
    )
    path = dataset(tmp_path, *({"prompt": "bad" if n == count - 2 else "good"} for n in range(count)))
    assert reasons(path, renderer=picky) == [f"{count - 1}: the chat template cannot render the messages: no bad words"]


def test_processes_measure_the_same_lengths(tmp_path, monkeypatch):
    path, whole = long_and_short(tmp_path)
    monkeypatch.setattr(prompts_module, "_CHUNK_PER_PROCESS", 2)
    args = {"renderer": RENDERER, "prompt_length": len(whole[2]), "prompt_overflow": "right"}
    alone, together = (load(path, preprocessing_num_workers=workers, **args) for workers in (None, 2))
    assert together.report == alone.report
    for one, other in zip(alone, together, strict=True):
        assert one.id == other.id and np.array_equal(one.prompt_ids, other.prompt_ids)


def addition(data_args: DataArguments, seed: int) -> Iterator[dict[str, Any]]:
    yield from (
        {"prompt": f"{seed}+{n}=", "solution": np.int64(seed + n), "tag": data_args.default_tag} for n in range(3)
    )


def broken(data_args: DataArguments, seed: int) -> list[Any]:
    return [{"prompt": "fine", "tag": "math", "solution": None}, 3, {"prompt": "x", "extra": object()}]


def test_a_dataset_class_takes_the_place_of_files_and_may_be_in_one(tmp_path):
    name = f"{__name__}:addition"
    prompts = load(dataset_cls=name, default_tag="sums", seed=40)
    assert [(p.id, p.tag, p.ground_truth) for p in prompts] == [(f"{name}:{n}", "sums", 39 + n) for n in (1, 2, 3)]
    assert json.dumps(prompts[0].ground_truth) == "40" and prompts[2].messages[0]["content"] == "40+2="
    (tmp_path / "rows.py").write_text(
        "def rows(data_args, seed):\n    return [{'prompt': 'x', 'solution': seed, 'tag': 't'}]\n"
    )
    name = f"{tmp_path}/rows.py:rows"
    assert not list(DataArguments(dataset_cls=name, prompt="prompt").problems())
    assert [(p.id, p.ground_truth) for p in load(dataset_cls=name, seed=7)] == [(f"{name}:1", 7)]


def test_mistakes_of_a_dataset_class_have_their_row():
    name = f"{__name__}:broken"
    with pytest.raises(DataError) as raised:
        load(dataset_cls=name)
    assert raised.value.problems == [
        f"{name}:row 2: a number, expected a mapping of columns",
        f"{name}:row 3: column 'tag' is missing; expected it, or data_args.default_tag",
    ]
    with pytest.raises(UnknownNameError, match=r"data_args\.dataset_cls .*did you mean 'addition'"):
        load(dataset_cls=f"{__name__}:adition")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('q')", "KeyError: 'q'"),
        ("yield {'prompt': 'x', 'solution': 1, 'tag': 't'}; raise OSError('gone')", "OSError: gone"),
        ("return 5", "TypeError: 'int' object is not iterable; expected rows as mappings"),
    ],
)
def test_a_dataset_class_that_raises_is_named(tmp_path, body, words):
    (tmp_path / "rows.py").write_text(f"def rows(data_args, seed):\n    {body}\n")
    with pytest.raises(DataError) as raised:
        load(dataset_cls=f"{tmp_path}/rows.py:rows")
    assert raised.value.problems[0].startswith(f"data_args.dataset_cls {tmp_path}/rows.py:rows: {words}")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"prompt": "p"}, None),
        ({"file_name": "a.jsonl", "prompt": "p"}, None),
        ({"domain_interleave_probs": {"a": 0.1, "b": 0.2, "c": 0.7000005}}, None),
        ({"file_name": "a.jsonl"}, "prompt: got null, expected the column of the question, or messages"),
        ({"dataset_cls": "a:b"}, "prompt: got null, .* since dataset_cls is set"),
        ({"prompt": "p", "messages": "m"}, "messages: got .m., expected null with prompt = p"),
        ({"file_name": []}, r"file_name: got \[\], expected null, a path or a list"),
        ({"file_name": ["a", ""], "prompt": "p"}, "file_name: got"),
        ({"dataset_cls": "a.b", "prompt": "p"}, "dataset_cls: got .a.b., expected package.module:attribute"),
        (
            {"domain_interleave_probs": {"a": 0.5, "b": 0.6}},
            "domain_interleave_probs: got .*expected a sum of 1, not 1.1",
        ),
        ({"domain_interleave_probs": {"a": 0.0, "b": 1.0}}, r'got \{"a": 0.0\}, expected positive'),
    ],
)
def test_rules_between_the_keys(args, problem):
    found = list(DataArguments(**args).problems())
    assert len(found) == (problem is not None)
    assert problem is None or re.search(problem, str(found[0]))


def test_rules_of_the_filter_and_of_the_columns():
    args = DataArguments(dataset_filter={"min_difficulty": 2, "max_difficulty": 1})
    (problem,) = args.dataset_filter.problems()
    assert str(problem) == "min_difficulty: got 2.0, expected at most max_difficulty = 1.0"
    assert list(DataArguments(dataset_filter={"source": [""]}).dataset_filter.problems())
    with pytest.raises(ValueError, match="prompt_overflow"):
        DataArguments(prompt_overflow="middle")
    for args, message in (
        ({"prompt": "p"}, "data_args.file_name: got null, expected files"),
        ({"file_name": "x.jsonl"}, "data_args.prompt: got null"),
    ):
        with pytest.raises(ValueError, match=message):
            load_prompts(DataArguments(**args), **OPTIONS)


MESSAGES = (system("S"), user("3+4="))


def row(name: str = "a", **columns: object) -> Prompt:
    return Prompt(name, "sums", MESSAGES, ground_truth="7", extra_info=columns)


def test_placeholders_are_columns_of_the_row():
    writer = TeacherPrompts("{prompt} is {answer}: {worked.steps} {n} \\boxed{x} {{n}}", RENDERER, "answer")
    prompt = row(worked={"steps": "{prompt} up"}, n=2)
    *before, last = writer.messages(prompt)
    assert before == [MESSAGES[0]] and last["role"] == "user"
    assert last["content"] == "3+4= is 7: {prompt} up 2 \\boxed{x} {{n}}", "what is filled in is not filled again"
    assert writer.ids(prompt).tolist() == RENDERER.prompt([*before, last]).tolist()
    assert prompt.messages == MESSAGES
    with pytest.raises(RowError, match=r"no column 'worked\.steps'"):
        writer.messages(row())


def test_long_columns_lose_their_end():
    tokenizer, text = RENDERER.tokenizer, "3+4=7, 30+40=70"
    for most in range(1, 20):
        said = TeacherPrompts("{prompt}{answer}|{solution}", RENDERER, "answer", most).messages(row(solution=text))
        kept = said[-1]["content"].removeprefix("3+4=7|")
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert text.startswith(kept) and len(tokenizer(kept)["input_ids"]) == min(most, count)
    cut = TeacherPrompts("{solution}", RENDERER, column_length=3).messages(row(solution="abα"))
    assert cut[-1]["content"] in ("ab", "abα"), "no part of a character"


def test_everything_wrong_with_the_rows_is_told():
    writer = TeacherPrompts("{prompt} {solution}", RENDERER)
    rows = [row("a", solution="7"), row("b"), row("c", solution=None), row("d", solution="9" * 80)]
    writer.check(rows[:1], 60)
    with pytest.raises(DataError) as caught:
        writer.check(rows, 60)
    assert caught.value.count == 3
    told = "\n".join(caught.value.problems)
    for words in (
        "b: teacher_prompt: no column 'solution'",
        "c: teacher_prompt: column 'solution': None, expected text or a number",
        "d: teacher_prompt: ",
        "tokens, expected at most 60: sequence_length minus the longest response",
    ):
        assert words in told, told


def prompts(**sizes: int) -> list[Prompt]:
    """Prompts ``a0, a1 … b0 …`` of the tags ``a, b …``."""
    return [Prompt(f"{tag}{index}", tag, (user("?"),)) for tag, size in sizes.items() for index in range(size)]


def ids(sampler: PromptSampler, draws: range) -> list[str]:
    return [sampler[n].id for n in draws]


SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
seeds = st.integers(0, 2**40)


@examples(40)
@given(size=st.integers(1, 40), seed=seeds, epochs=st.integers(1, 30))
def test_every_epoch_has_every_prompt_once(size, seed, epochs):
    dataset = prompts(a=size)
    sampler = PromptSampler(dataset, seed)
    for epoch in range(epochs):
        draws = range(epoch * size, (epoch + 1) * size)
        assert sorted(ids(sampler, draws)) == sorted(prompt.id for prompt in dataset)
        assert {sampler.epoch_of(n) for n in draws} == {epoch}


@examples(40)
@given(seed=seeds, draws=st.lists(st.integers(0, 20_000), max_size=30), mixed=st.booleans(), shuffle=st.booleans())
def test_two_samplers_agree_whatever_the_order_of_asking(seed, draws, mixed, shuffle):
    dataset = prompts(a=7, b=50, c=1)
    one, other = (PromptSampler(dataset, seed, shuffle, SHARES if mixed else None) for _ in range(2))
    first = {n: (one[n].id, one.epoch_of(n)) for n in draws}
    assert first == {n: (other[n].id, other.epoch_of(n)) for n in reversed(draws)}
    assert first == {n: (one[n].id, one.epoch_of(n)) for n in sorted(draws)}


@examples(20)
@given(seed=seeds, sizes=st.tuples(*[st.integers(1, 30)] * 3), shuffle=st.booleans())
def test_within_a_domain_nothing_repeats_before_all_of_it_was_seen(seed, sizes, shuffle):
    dataset = prompts(**dict(zip("abc", sizes, strict=True)))
    sampler = PromptSampler(dataset, seed, shuffle, SHARES)
    drawn: Counter[str] = Counter()
    per_tag: dict[str, list[str]] = {tag: [] for tag in "abc"}
    for n in range(2500):  # beyond two edges of the blocks in which domains are chosen
        prompt = sampler[n]
        assert sampler.epoch_of(n) == drawn[prompt.id]
        drawn[prompt.id] += 1
        per_tag[prompt.tag].append(prompt.id)
    for tag, size in zip("abc", sizes, strict=True):
        for start in range(0, len(per_tag[tag]) - size + 1, size):
            assert len(set(per_tag[tag][start : start + size])) == size


def test_without_shuffling_the_order_is_that_of_the_dataset():
    dataset = prompts(a=2, b=3)
    assert ids(PromptSampler(dataset, 0, shuffle=False), range(12)) == ["a0", "a1", "b0", "b1", "b2"] * 2 + ["a0", "a1"]
    drawn = ids(PromptSampler(dataset, 0, False, {"a": 0.5, "b": 0.5}), range(100))
    assert [name for name in drawn if name[0] == "b"][:7] == ["b0", "b1", "b2", "b0", "b1", "b2", "b0"]


def test_epochs_and_seeds_have_orders_of_their_own():
    samplers = [PromptSampler(prompts(a=30), seed) for seed in range(5)]
    orders = {tuple(ids(sampler, range(start, start + 30))) for sampler in samplers for start in range(0, 150, 30)}
    assert len(orders) == 25


def test_positions_of_a_prompt_are_spread_over_the_epochs_and_domains_have_their_shares():
    """Each of 5 prompts comes first in about a fifth of 2,000 epochs; 4 standard deviations are 72."""
    sampler = PromptSampler(prompts(a=5), 0)
    first = Counter(sampler[5 * epoch].id for epoch in range(2000))
    assert len(first) == 5 and all(abs(count - 400) < 72 for count in first.values())
    # Over 10,000 draws; 4 standard deviations are below 200.
    for seed in range(3):
        sampler = PromptSampler(prompts(a=3, b=500, c=20), seed, True, SHARES)
        drawn = Counter(sampler[n].tag for n in range(10_000))
        assert all(abs(drawn[tag] - 10_000 * share) < 200 for tag, share in SHARES.items())


def test_the_order_stays_the_same_between_versions():
    """A checkpoint's position means the same prompts tomorrow."""
    dataset = prompts(a=4, b=2)
    assert ids(PromptSampler(dataset, 42), range(8)) == ["a1", "a0", "b0", "b1", "a2", "a3", "a1", "a3"]
    for shares in ({"a": 0.25, "b": 0.75}, {"b": 0.75, "a": 0.25}):  # nor does the order of a file's keys matter
        assert " ".join(ids(PromptSampler(dataset, 42, True, shares), range(8))) == "a2 a0 b0 b1 b0 b1 b1 b0"


def test_tags_may_share_a_domain():
    dataset = prompts(gsm8k=2, aime=2, humaneval=1)
    domains = {"gsm8k": "math", "aime": "math", "humaneval": "code"}
    sampler = PromptSampler(dataset, 0, True, {"math": 0.5, "code": 0.5}, domains)
    drawn = [sampler[n] for n in range(1000)]
    maths = [prompt.id for prompt in drawn if prompt.tag != "humaneval"]
    assert abs(len(maths) - 500) < 64
    assert {frozenset(maths[start : start + 4]) for start in range(0, 400, 4)} == {
        frozenset({"gsm8k0", "gsm8k1", "aime0", "aime1"})
    }


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 1.0}, r"no share for 'b' \(2 prompts\), expected one for every domain"),
        ({"a": 0.5, "b": 0.25, "x": 0.25}, "got x, for which the dataset has no prompts"),
        ({"a": 0.5, "b": 0.6}, "expected a sum of 1, not 1.1"),
        ({"a": 1.5, "b": -0.5}, "expected positive shares"),
        ({}, "expected a sum of 1, not 0"),
    ],
)
def test_wrong_shares_are_named(shares, message):
    with pytest.raises(ValueError, match=message):
        PromptSampler(prompts(a=1, b=2), 0, True, shares)


def test_a_far_position_is_reached_directly_and_there_is_none_before_the_first_or_of_no_prompts():
    sampler = PromptSampler(prompts(a=3, b=4), 0)
    assert sampler[10**15].id in {"a0", "a1", "a2", "b0", "b1", "b2", "b3"}
    assert sampler.epoch_of(10**15) == 10**15 // 7
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler([], 0)
    with pytest.raises(IndexError, match="draw -1"):
        sampler[-1]


def responses(folder: Path, rows: list[dict[str, Any]], problems: Problems | None = None) -> list[Any]:
    """What is read of a file with ``rows``, whose problems are raised unless they are kept."""
    kept = problems or Problems()
    file = write_lines(folder / "said.jsonl", rows)
    found = list(read_responses([str(file)], AnswerColumns(), kept, without="scores"))
    if problems is None:
        kept.raise_any()
    return found


def test_an_episodes_question_is_the_whole_conversation(tmp_path):
    messages = [system("Add."), user("1+1")]
    turns = [{"observation": "1+1", "text": "2"}, {"observation": "Sure?", "text": "Yes"}]
    info = {"ground_truth": "2", "conversation": json.dumps(messages)}
    (found,) = responses(tmp_path, [{"turns": turns, "info": info, "group_id": 0, "tag": "sums"}])
    assert list(found.messages) == [*messages, says("2"), user("Sure?")] and found.prompt == "Sure?"


def test_what_is_wrong_with_a_row_of_somebody_elses_is_told_with_its_place(tmp_path):
    problems, turns = Problems(), [{"observation": "1+1", "text": "2"}]
    rows = [
        {"prompt": "1+1", "solution": "2", "answers": [{"text": "2", "num_tokens": "many"}]},
        {"turns": turns, "info": {"conversation": "[{"}, "group_id": 0, "tag": "sums"},
        {"prompt": "1+1", "solution": "2", "answers": [{"text": "2", "num_tokens": 3.0}]},
    ]
    (found,) = responses(tmp_path, rows, problems)
    assert found.answers == (Answer("2", 3),)
    with pytest.raises(DataError, match=r"jsonl:1: .*num_tokens.*'many'.*\n.*jsonl:2: info.conversation.*JSON"):
        problems.raise_any()


CALLS: list[dict[str, Any]] = []


def generate(folder: Path, **args: Any) -> None:
    CALLS.append(args)
    if args.get("fail"):
        raise ValueError("fail: got true, expected false")
    (folder / "train.jsonl").write_text("made")


def rows(tag: str, count: int) -> list[dict[str, Any]]:
    return [{"id": f"{tag}{n}", "tag": tag, "prompt": f"{n}?", "solution": n} for n in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory, seed=1))


def config(model: str, tmp_path: Path, **data: Any) -> RLVRConfig:
    write_lines(tmp_path / "train.jsonl", rows("a", 3) + rows("b", 2))
    write_lines(tmp_path / "val.jsonl", rows("a", 1))
    files = {name: {"file_name": str(tmp_path / f"{name}.jsonl"), "prompt": "prompt"} for name in ("train", "val")}
    domains = {"one": ["a"], "two": ["b"]} if "domain_interleave_probs" in data else {"one": ["a", "b"]}
    return RLVRConfig.model_validate(
        {
            "pretrain": model,
            "adv_estimator": "grpo",
            "output_dir": str(tmp_path / "output"),
            "rewards": {
                name: {"tag_included": tags, "verifiers": [{"name": "format"}]} for name, tags in domains.items()
            },
            "actor_train": {"data_args": files["train"] | data},
            "validation": {"data_args": files["val"]},
        }
    )


def test_datasets_are_read_and_told_of_in_a_line_each(model, tmp_path):
    run = config(model, tmp_path)
    datasets = load_datasets(run, policy_renderer(run))
    assert len(datasets.train) == 5
    train, val = datasets.describe()
    assert train.startswith("training data: 5 prompts (a 3, b 2): 5 rows read")
    assert val.startswith("held-out data: 1 prompts (a 1)")
    only = run.model_copy(update={"eval_only": True})
    assert load_datasets(only, policy_renderer(only)).train is None
    assert len(load_datasets(run.model_copy(update={"validation": None}), policy_renderer(run)).describe()) == 1


def test_held_out_prompts_have_a_bound_of_their_own(model, tmp_path):
    run = config(model, tmp_path, prompt_overflow="drop")
    renderer, short = policy_renderer(run), {"prompt_length": 1}
    with pytest.raises(DataError, match="more than prompt_length = 1 tokens"):
        load_datasets(run.model_copy(update=short), renderer)
    datasets = load_datasets(run.model_copy(update={**short, "val_prompt_length": 64, "eval_only": True}), renderer)
    assert len(datasets.val) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"file_name": "no-such.jsonl"}, "no-such.jsonl: no such file or folder"),
        ({"prompt": "question"}, "train.jsonl:1: "),
        ({"dataset_cls": "roll.nowhere:Data", "file_name": None}, "roll.nowhere"),
        ({"domain_interleave_probs": {"one": 1.0}}, "domain_interleave_probs: got no share for 'two' (2 prompts)"),
        ({"template": "{{ no such"}, "template"),
    ],
)
def test_wrong_data_is_exit_code_2_before_anything_starts(model, tmp_path, capsys, data, message):
    assert run_rlvr(config(model, tmp_path, **data)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_data_is_made_once_for_equal_arguments(tmp_path):
    def make(**args: Any) -> int:
        CALLS.clear()
        make_data(DataGeneratorConfig(path=f"{__name__}:generate", folder=str(tmp_path / "data"), args=args))
        return len(CALLS)

    assert make(size=3) == 1 and CALLS == [{"size": 3}]
    assert (tmp_path / "data" / "train.jsonl").read_text() == "made"
    assert make(size=3) == 0
    assert make(size=4) == 1
    with pytest.raises(ValueError, match="expected false"):
        make(fail=True)
    assert make(size=4) == 1, "what a failed call may have left counts as not made"


def test_a_generator_that_refuses_its_arguments_is_exit_code_2(model, tmp_path, capsys):
    generator = DataGeneratorConfig(path=f"{__name__}:generate", folder=str(tmp_path / "data"), args={"fail": True})
    assert run_rlvr(config(model, tmp_path).model_copy(update={"data_generator": generator})) == 2
    assert "fail: got true, expected false" in capsys.readouterr().err


def test_a_reward_worker_that_died_after_its_last_answer_does_not_end_the_step():
    roles, died = PromptRolloutWorkers.__new__(PromptRolloutWorkers), WorkerDiedError("dead", 0, "m", 3, "killed")
    roles._rewards = {"alive": Mock(**{"call.return_value": [2, 3]}), "dead": Mock(**{"call.side_effect": died})}
    assert roles.take_retries() == {"reward/alive/retries": 5, "reward/dead/retries": 0}
    roles._rewards["dead"].call.assert_called_once_with("take_retries")


def test_answers_are_grouped_by_the_pictures_of_their_question(tmp_path):
    talk = [user([{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "?"}])]
    rows: list[dict[str, Any]] = [{"prompt": "?", "images": [name]} for name in ("a.png", "a.png", "b.png")]
    rows += [{"messages": talk}, {"messages": [user("?")], "images": "a.png"}]
    found = responses(tmp_path, [row | {"answers": "4", "solution": "4"} for row in rows])
    assert [row.prompt for row in found] == ["<image>?"] * 4 + ["?"]
    assert found[0].group == found[1].group and len({row.group for row in found}) == 4
    assert all("images" not in row.extra for row in found)


def test_answers_are_grouped_by_id_and_question_and_an_id_of_null_is_none(tmp_path):
    asked = [("a", "1+1="), ("a", "1+1="), ("a", "2+2="), ("b", "1+1="), (None, "1+1="), (None, "2+2="), (None, "2+2=")]
    rows = [{"id": own, "prompt": question} for own, question in asked]
    rows += [{"id": own} for own in ("a", "a", None, None)]
    found = responses(tmp_path, [row | {"answers": "4", "solution": "4"} for row in rows])
    numbers = {group: number for number, group in enumerate(dict.fromkeys(row.group for row in found))}
    assert [numbers[row.group] for row in found] == [0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 7]
