"""Checks of what a run may need beside the machine: a model hub, a sandbox for programs, a model's chat template."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from roll.extras.doctor.findings import Finding, judged
from roll.preflight.inputs import ask_hub, hub_endpoint, hub_is_off

HUB_SECONDS = 3.0


def check_hub() -> Iterator[Finding]:
    """Checks whether the Hugging Face hub answers; a token is told of, never shown."""
    if hub_is_off():
        yield Finding("ok", "hub", "HF_HUB_OFFLINE is set: models must be folders of this machine or in its cache")
        return
    from huggingface_hub import get_token

    host = urlsplit(hub_endpoint()).hostname or "the hub"
    status = ask_hub("models?limit=1", HUB_SECONDS)
    token = "with a token" if get_token() else "without a token"
    answer = f"answers {status}" if status else f"no answer within {HUB_SECONDS:g} s"
    fix = "Set HTTPS_PROXY or HF_ENDPOINT; or download models elsewhere and set HF_HUB_OFFLINE=1."
    yield judged("hub", f"{host}: {answer}, {token}", warning=status != 200, fix=fix)


def check_sandbox() -> Iterator[Finding]:
    """Checks whether programs of a policy can be isolated, which rewards and tools that run code need."""
    from roll.extras.sandbox.pool import Sandbox
    from roll.rewards.types import SandboxUnavailableError

    try:
        backend = Sandbox().backend
    except SandboxUnavailableError as error:
        fix = (
            "Install bubblewrap, or permit user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container "
            "--security-opt seccomp=unconfined); needed only by rewards, tools and agents that run programs."
        )
        yield Finding("warning", "sandbox", str(error).removeprefix("sandbox: ").partition(". Expected")[0], fix)
        return
    yield Finding("ok", "sandbox", f"programs are isolated by {backend}")


def check_chat_template(model: str, trusts: bool = False) -> Iterator[Finding]:
    """Checks what the chat template of a model does to conversations that grow.

    Args:
        model: folder, or a name on the hub.
        trusts: whether Python files that come with it may run.
    """
    from roll.agentic.tools.dialects import parsers
    from roll.data.template_check import check_template
    from roll.models.tokenizer import load_tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = load_tokenizer(model, alone=True, trust_remote_code=trusts)
        report = check_template(tokenizer, "native", parsers())
    except (OSError, ValueError) as error:
        yield Finding("error", "template", f"{model}: {str(error).splitlines()[0]}", "roll doctor --model FOLDER")
        return
    for problem in report.problems:
        yield Finding("warning", f"template {problem.name}", problem.text, f"roll template check {model} shows more.")
    yield Finding("ok", "template", f"{model}: tool dialect {report.dialect or 'unknown'}")
