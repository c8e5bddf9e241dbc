"""A user who answers a policy (``roll.configs.rlvr``)."""

from collections.abc import Mapping, Sequence

from roll.data.prompts import Prompt


class Counting:
    """Says how many characters it has heard, and pays a hundredth for each."""

    async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
        heard = len(messages[-1]["content"])
        return f"{heard} of {prompt.tag}", heard / 100, False
