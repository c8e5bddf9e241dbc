"""The forms of tests that public datasets have: right programs score in each, wrong ones in none."""

import base64
import json
import pickle
import zlib

import pytest

from roll.extras.sandbox.code_tests import CallTest, CodeTest, ProgramTest, parse_tests
from roll.extras.sandbox.verifier import CodeConfig, CodeVerifier
from roll.rewards import Sample
from tests.unit.extras.sandbox.code_forms import ADD, CHECK, EURUS, FORMS, IO, LCB_COLUMN, private
from tests.unit.extras.sandbox.forked_sandbox import scores


def check_scores(forms, wrong):
    for form in forms:
        wanted = dict.fromkeys(form.right, 1.0) | dict.fromkeys(form.wrong[wrong], 0.0)
        seen = scores([(form.tests, program, form.extra) for program in wanted], **form.args)
        assert dict(zip(wanted, seen, strict=True)) == wanted, form.name


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_right_programs_score_in_every_form_and_wrong_ones_in_none(every):
    assert len({form.name for form in FORMS}) == len(FORMS) > 100
    check_scores(FORMS[::every], slice(1))


@pytest.mark.slow
def test_further_wrong_programs_score_in_no_form():
    check_scores(FORMS, slice(1, None))


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([{"input": "1", "output": "2", "checker": "int main() {}"}], r"tests\[0\]: got the key 'checker'"),
        ({**IO, "weights": [1, 2]}, "got the key 'weights', which is not understood"),
        ([{"input": "1", "output": "2"}, {"input": "1", "output": "2", "tolerance": 1}], r"tests\[1\]: got the key"),
        ([{"type": "interactive", "input": "1", "output": "2"}], "got the type 'interactive', expected one of stdin"),
        ([{"testtype": "special", "input": "1", "output": "2"}], "got the type 'special'"),
        ({"language": "cpp", "test_cases": [{"input": "1", "output": "2"}]}, "language: got 'cpp', expected python"),
        (LCB_COLUMN, r"tests\[0\]: got a call without the name of its function"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [1, 2]}, "got 1 inputs and 2 outputs"),
        ({"fn_name": "f", "inputs": [], "outputs": []}, "got 0 inputs and 0 outputs, .* at least 1"),
        ({"fn_name": "f", "inputs": ["not json"], "outputs": ["1"]}, "expected one JSON value a line"),
        ({"fn_name": 3, "inputs": [[1]], "outputs": [1]}, "fn_name: got 3"),
        ({"inputs": [[1]], "outputs": [[2]]}, "got 1, expected text, or fn_name with it"),
        ([{"input": "1", "output": "2"}, {"fn_name": "f", "input": [1], "output": 2}], "expected tests of one kind"),
        ([{"input": "1", "output": "2"}, "assert f(1) == 2"], "expected tests of one kind"),
        ([{"input": "1", "output": "2", "test": "assert f(1) == 2"}], "expected either code or input and output"),
        ([{"type": "assert", "input": "1", "output": "2"}], "got input and output in a test of code"),
        ([["1", "2"]], r"tests\[0\]: got \['1', '2'\], expected an object"),
        ([{}], "expected the keys input and output, or code"),
        ({"test_cases": []}, "expected a list of tests"),
        ({"type": "function_call", "test_cases": "hello"}, "expected tests as JSON"),
        ("assert 'x' in {response}", "code about the text of the response"),
        ("def test_it(tmp_path):\n    assert f(tmp_path) == 2", "test_it needs tmp_path: fixtures"),
        ({"test": "assert f(1) == 2", "entry_point": "f("}, "entry_point: got 'f\\('"),
        (base64.b64encode(zlib.compress(pickle.dumps([1, 2]))).decode(), "compressed tests .* a pickle with"),
        (base64.b64encode(zlib.compress(pickle.dumps(print))).decode(), "compressed tests .* a pickle with"),
        (private(LCB_COLUMN)[:-40], "compressed tests that cannot be read"),
        (None, "tests: got None"),
        ([], r"tests: got \[\]"),
        (7, "tests: got 7"),
        ([{"input": "1"}], "expected one of stdout and output"),
        ([{"input": "1", "stdin": "1", "output": "2"}], "expected one of stdin and input"),
        ([{"input": 1, "output": "2"}], r"tests\[0\].input: got 1, expected text"),
        ({"inputs": [[1]], "outputs": []}, "lists of one length"),
        ({"fn_name": "f", "inputs": [1], "outputs": [2]}, r"tests.inputs\[0\].inputs: got 1, expected the list"),
        ({"fn_name": "f(); g", "inputs": [[1]], "outputs": [2]}, r"tests.fn_name: got 'f\(\); g'"),
        ({"wrong": 1}, "got the key 'wrong', which is not understood"),
        (["assert f(1 ="], "got code that does not parse"),
        ({"test": 3}, "tests.test: got 3, expected a list of tests"),
        ("", "never uses the program, so any program passes"),
        ([""], "never uses the program"),
        ({"test": CHECK}, r"never uses the program.* check\(candidate\) with its entry_point"),
        ({"test": "METADATA = {'author': None}\n" + CHECK}, "never uses the program"),
        (["import math", "assert 1 == 1"], "never uses the program"),
    ],
)
def test_what_is_not_understood_is_an_error_of_the_row(tests, message):
    with pytest.raises(ValueError, match=message):
        parse_tests(tests)
    row = Sample("?", "", json.loads(json.dumps(tests)), "code")
    with pytest.raises(ValueError, match=message):
        CodeVerifier.check_row(CodeConfig(), row)
    with pytest.raises(ValueError, match=message):  # and no zero
        scores([(tests, ADD)])


def test_rows_are_read_by_the_keys_of_the_configuration_up_to_a_bound(monkeypatch):
    row = Sample(prompt="?", response="", ground_truth=None, data_source="code", extra_info={"cases": EURUS})
    CodeVerifier.check_row(CodeConfig(tests_key="cases"), row)
    with pytest.raises(ValueError, match="tests: got None"):
        CodeVerifier.check_row(CodeConfig(), row)
    monkeypatch.setattr("roll.extras.sandbox.code_tests._MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="compressed tests that cannot be read: more than"):
        parse_tests(private([{"input": "1" * 2000, "output": "2"}]))


def test_values_and_arguments_are_read_as_they_are_written():
    programs = parse_tests([{"input": "1 2\n", "output": "3\n"}, {"stdin": "5 -7", "stdout": "-2"}]).tests
    assert programs == (ProgramTest("1 2\n", "3\n"), ProgramTest("5 -7", "-2"))
    assert parse_tests({"test": "assert f() == 1"}, entry_point="f").tests == (CodeTest("assert f() == 1"),)
    assert parse_tests({"test": CHECK, "entry_point": "add"}).tests[0].code.endswith("check(add)\n")
    assert isinstance(parse_tests("{'not': json}").tests[0], CodeTest), "it can only fail, with NameError"
    assert parse_tests(EURUS).tests[0] == CallTest("add", [1, 2], [3]) and parse_tests(EURUS).wrapped
    lines = {"fn_name": "f", "inputs": ['[1, 2]\n"x"'], "outputs": ['{"a": null}']}
    assert parse_tests(lines).tests == (CallTest("f", [[1, 2], "x"], {"a": None}),)
    named = parse_tests([{"input": "nums = [3, 3], target = 6", "output": "[0, 1]"}], entry_point="Solution().twoSum")
    assert named.tests == (CallTest("twoSum", [], [0, 1], {"nums": [3, 3], "target": 6}),)
    assert not parse_tests([{**LCB_COLUMN[0], "output": "[3]", "fn_name": "f"}]).wrapped


@pytest.mark.parametrize("partial", [False, True])
def test_wrapped_values_are_read_in_one_way_throughout(partial):
    tests = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[1], [2], [3]]}
    cases = [(tests, f"def f(n):\n    return {value}\n") for value in ("n", "n if n == 1 else [n]")]
    assert scores(cases, partial=partial) == [1.0, pytest.approx(2 / 3) if partial else 0.0]


def test_code_that_asks_nothing_is_no_test_of_its_own():
    suite = parse_tests(["import math", "assert math.floor(add(1, 2)) == 3", "assert True"])
    assert [test.code for test in suite.tests] == ["assert math.floor(add(1, 2)) == 3\nassert True"]
    tests = ["assert True", "assert add(1, 2) == 3"]
    assert scores([(tests, ADD), (tests, "pass")], partial=True) == [1.0, 0.0]
