"""MindSpeed RL's episodes of several turns: the file that names their tools, and their limits."""

from __future__ import annotations

from roll.configs.importers.draft import Draft, Kind
from roll.configs.importers.verl_tools import DIALECTS, read_tools

_RL = "rl_config"
_SWITCH, _FILE = f"{_RL}.multi_turn_enable", f"{_RL}.tool_config_path"
_LIMITS = {"max_parallel_calls": "max_parallel_calls", "max_tool_response_length": "max_tool_response_tokens"}
_CALLS, _SIDE, _FORMAT, _WHOLE = (
    f"{_RL}.{key}"
    for key in ("max_tool_calls", "tool_response_truncate_side", "tool_parser_format", "max_total_response_length")
)


def set_tools(draft: Draft) -> None:
    """The section ``tools``, of what the file beside the run's says; its form is that of verl's."""
    if not draft.theirs(_SWITCH):
        return
    if not draft.theirs(_FILE):
        note = "no tool_config_path says which tools there are: name them in tools.use or tools.servers"
        draft.tell(Kind.IMPOSSIBLE, _SWITCH, True, "tools", note=note)
        return
    if not read_tools(draft, _FILE) or not draft.get("tools"):
        return
    draft.tell(Kind.DERIVED, _SWITCH, True, "tools")
    if calls := draft.theirs(_CALLS):
        draft.derive(_CALLS, "tools.max_turns", int(calls), "turns with calls")
    for theirs, ours in _LIMITS.items():
        if limit := draft.theirs(f"{_RL}.{theirs}"):
            draft.derive(f"{_RL}.{theirs}", f"tools.{ours}", int(limit))
    if (side := draft.theirs(_SIDE)) in ("left", "middle", "right"):
        draft.derive(_SIDE, "tools.tool_response_truncate_side", side)
    if (dialect := DIALECTS.get(str(draft.theirs(_FORMAT)))) is not None:
        draft.derive(_FORMAT, "tools.dialect", dialect)
    if whole := draft.theirs(_WHOLE):
        _set_whole(draft, int(whole))


def _set_whole(draft: Draft, whole: int) -> None:
    """The length of all turns and results of an episode together, which ``sequence_length`` bounds here."""
    prompt = int(draft.get("prompt_length"))
    note = "the prompt, and all turns and results of an episode"
    draft.derive([_WHOLE, f"{_RL}.max_prompt_length"], "sequence_length", prompt + whole, note)
    draft.set("response_length", min(int(draft.get("response_length")), whole))
