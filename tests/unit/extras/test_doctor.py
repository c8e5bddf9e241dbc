"""What ``roll doctor`` says of machines as they are, and of made-up ones."""

import json
import resource
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from roll.__main__ import main
from roll.extras import doctor as machine
from roll.extras.doctor import Finding, NodeReport, as_json, compare, examine, exit_code, judged, page
from roll.models.tiny import make_tokenizer
from tests.support.web import Reply, serving

GIB = 2**30


def levels(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_a_fix_is_told_where_something_is_wrong_and_a_check_that_fails_hides_no_other():
    findings = [judged("a", "fine", fix="do it"), judged("b", "slow", warning=True, fix="do it")]
    assert [finding.fix for finding in findings] == ["", "do it"] and exit_code(findings) == 0
    findings.append(judged("c", "broken", error=True, warning=True, fix="mend it"))
    assert exit_code(findings) == 1
    assert "error    c  broken\n            fix: mend it" in page(findings)
    assert page(findings).endswith("1 errors, 1 warnings, 1 ok\n")
    told = json.loads(as_json(findings))
    assert told["healthy"] is False and [each["level"] for each in told["findings"]] == ["ok", "warning", "error"]

    def broken() -> Iterator[Finding]:
        raise OSError("no such device")

    (found,) = examine("disk", broken)
    assert (found.level, found.name) == ("warning", "disk") and "no such device" in found.got


@pytest.mark.parametrize(
    ("files", "size", "cores", "told"),
    [
        ({"memory.max": f"{8 * GIB}", "cpu.max": "150000 100000"}, 8, 1.5, ", the control group's limit; 8.0"),
        ({"memory/memory.limit_in_bytes": f"{8 * GIB}", "cpu/cpu.cfs_quota_us": "150000",
          "cpu/cpu.cfs_period_us": "100000"}, 8, 1.5, ", the control group's limit; 8.0"),
        ({"memory.max": "max", "cpu.max": "max 100000"}, 64, None, "; 32.0"),
    ],
    ids=["version 2", "version 1", "no limits"],
)  # fmt: skip
def test_limits_of_a_control_group_go_before_the_machine(tmp_path, files, size, cores, told):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (machine.memory_bytes(meminfo, tmp_path), machine.cgroup_cores(tmp_path)) == (size * GIB, cores)
    (memory,) = machine.check_memory(meminfo, tmp_path)
    assert memory.got == f"{size}.0 GiB{told} GiB available"


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (machine.judge_shm(64 * 2**20, 64 * 2**20, 64 * GIB), "error"),
        (machine.judge_shm(GIB, GIB, 64 * GIB), "warning"), (machine.judge_shm(GIB, GIB, 4 * GIB), "ok"),
        (machine.judge_files(256), "error"), (machine.judge_files(4096), "warning"),
        (machine.judge_files(resource.RLIM_INFINITY), "ok"), (machine.judge_processes(2048), "warning"),
        (machine.judge_locked(65536, rdma=True), "warning"), (machine.judge_locked(65536, rdma=False), "ok"),
    ],
)  # fmt: skip
def test_bounds(found, level):
    assert found.level == level and bool(found.fix) == (level != "ok")


def test_ports_that_are_taken_are_named():
    with serving() as server:
        assert not machine._can_bind(server.server_port)
    assert "ports" in levels(machine.check_ports())


def test_versions_against_what_is_asked_for():
    texts = ["torch>=2.11", "ray>=99", "absent>=1", 'wandb>=0.20; extra == "wandb"', 'peft<0.1; extra == "lora"']
    requirements = [Requirement(text) for text in texts]
    found = levels(machine.check_requirements(requirements, {"torch": "2.13.0+cpu", "ray": "2.60.0", "peft": "0.21"}))
    assert found == {"ray": "error", "absent": "error", "peft": "warning", "packages": "ok"}
    assert levels(machine.check_python("3.10.1", ">=3.11,<3.14")) == {"python": "error"}


def test_a_version_that_no_file_of_constraints_has_is_named():
    requirements = [Requirement("pytest"), Requirement("absent")]
    seen = machine.compare_tested(["pytest==0.0.1\nabsent==3", "pytest==0.0.2"], requirements).got
    assert seen.startswith("not tested: pytest ") and seen.endswith("(tested: 0.0.1, 0.0.2)")
    pins = ["pytest==0.0.1", f"pytest=={version('pytest')}"]
    assert "not tested" not in machine.compare_tested(pins, requirements).got


def test_the_disk_is_tried_where_the_output_will_be_and_left_as_it_was(tmp_path):
    found = list(machine.check_disk(tmp_path / "output" / "run"))
    assert [finding.name for finding in found] == ["disk room", "disk speed"]
    assert str(tmp_path) in found[0].got and not list(tmp_path.iterdir())


def test_the_hub_is_asked_and_its_token_is_never_shown(monkeypatch):
    with serving(Reply()) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://me:hf_hidden@127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        (found,) = machine.check_hub()
    assert (found.level, found.got) == ("ok", "127.0.0.1: answers 200, with a token")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [finding.level for finding in machine.check_hub()] == ["ok"]


def test_machines_are_compared_with_the_driver():
    driver = {"roll": "1", "ray": "2", "torch": "3"}
    reports = [
        NodeReport("near", driver, 0.01, 0.001, []),
        NodeReport("late", driver | {"torch": "4"}, -45.0, 0.001, []),
        NodeReport("old", driver | {"ray": "1"}, 5.0, 0.001, []),
        NodeReport("far", driver, 20.0, 19.5, []),
    ]
    found = levels(compare(driver, reports))
    assert [found[f"versions on {name}"] for name in ("near", "late", "old")] == ["ok", "warning", "error"]
    clocks = [found[f"clock of {name}"] for name in ("near", "late", "old", "far")]
    assert clocks == ["ok", "error", "warning", "ok"]


def test_the_command_examines_this_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    make_tokenizer().save_pretrained(tmp_path)
    code = main(["doctor", "--json", "--output-dir", str(tmp_path), "--model", str(tmp_path)])
    told = capsys.readouterr().out
    names = {each["name"]: each["level"] for each in json.loads(told)["findings"]}
    assert code == int("error" in names.values())
    assert {"python", "packages", "gpus", "memory", "cores", "disk speed", "sandbox", "hub", "template"} <= set(names)
    assert "very-secret-value" not in told
    assert levels(machine.check_chat_template(str(tmp_path / "none"))) == {"template": "error"}


@pytest.mark.slow
def test_every_machine_of_a_cluster_is_examined(tmp_path):
    from roll.distributed.cluster.ray_session import ray_session
    from roll.extras.doctor import check_cluster

    with ray_session({"num_cpus": 2}) as session:
        found = list(check_cluster(session.address, tmp_path))
    assert [each.got for each in found if each.name == "cluster"] == ["1 of 1 machines checked"]
    clock = next(each for each in found if each.name.startswith("clock of"))
    assert clock.level == "ok" and "+0.0" in clock.got.replace("-0.0", "+0.0")
    assert any(each.node and each.name == "disk room" for each in found)
