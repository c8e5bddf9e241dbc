"""A run that records a step: traces of each role and rank, Ray's timeline, model FLOPs beside a peak, the same bits."""

import gzip
import json

import pytest

from tests.integration.conftest import assert_same_tensors

ROLES = ("actor_infer", "actor_train", "reference")
RECORDED = "profiler={steps: [2], shapes: true, memory: true, ray_timeline: true, peak_tflops: 0.01}"


@pytest.mark.slow
def test_a_recorded_step_computes_what_another_does(rlvr):
    keys = ("max_steps=2", "save_steps=2", "use_kl_loss=true", "kl_loss_coef=0.1")
    plain = rlvr(*keys, output="plain").ended()
    run = rlvr(*keys, RECORDED, output="recorded").ended()

    assert_same_tensors(run.tensors(2), plain.tensors(2))
    assert run.repeatable_metrics() == plain.repeatable_metrics()
    folder = run.path / "profile"
    assert not (plain.path / "profile").exists()
    traces = {role: folder / f"step-00002-{role}-0.trace.json.gz" for role in ROLES}
    assert set(folder.iterdir()) == {folder / "ray_timeline.json", *traces.values()}
    for role, file in traces.items():
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        matrices = [event for event in events if event.get("name") in ("aten::mm", "aten::addmm")]
        assert len(matrices) > 5 and all("Input Dims" in event["args"] for event in matrices), role
        resident = [event["args"]["MiB"] for event in events if event["name"] == "resident memory"]
        assert len(resident) > 5 and min(resident) > 100, role
    timeline = json.loads((folder / "ray_timeline.json").read_text())
    assert any("train" in event["name"] for event in timeline)
    for metrics in (run.metrics[1], run.metrics[2]):
        assert metrics["mfu/train"] == pytest.approx(metrics["tflops_per_device/train"] / 0.01)
        assert metrics["tokens_per_s_per_device/train"] == pytest.approx(metrics["tokens_per_s/train"])
    assert "tflops_per_device/train" in plain.metrics[1] and "mfu/train" not in plain.metrics[1]
