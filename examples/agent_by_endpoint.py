"""An agent of one's own that knows only OpenAI's client: it asks, and asks again where no answer came.

``roll train rlvr_math_agent`` trains it, in the folder that ``examples`` is in: ``agent.path`` names ``play``. As a
program of its own, started for each episode, it is ``agent: {command: [python, examples/agent_by_endpoint.py]}``. See
``docs/agents.md``.
"""

import asyncio
import json
import os
from types import SimpleNamespace

import openai

CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")  # connections are shared by all episodes


async def play(task):
    policy = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    answer = await policy.chat.completions.create(model="policy", messages=messages)
    if "</answer>" not in (answer.choices[0].message.content or ""):
        messages += [answer.choices[0].message, {"role": "user", "content": "So?"}]
        await policy.chat.completions.create(model="policy", messages=messages)


if __name__ == "__main__":
    with open(os.environ["ROLL_TASK"]) as file:
        given = json.load(file)
    asyncio.run(play(SimpleNamespace(**given, api_key=os.environ["OPENAI_API_KEY"])))
