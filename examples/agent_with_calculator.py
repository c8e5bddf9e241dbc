"""An agent of one's own with a tool of its own, that knows only OpenAI's client.

``roll train rlvr_tools_agent``, in the folder that ``examples`` is in, trains the policy that it asks: the task is that
of ``rlvr_tools``, where the calculator is one of the run's tools. See ``docs/agents.md``.
"""

import json

import openai
from simpleeval import simple_eval

CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")  # connections are shared by all episodes
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def play(task):
    policy = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    for _ in range(2):
        completion = await policy.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        answer = completion.choices[0].message
        if not answer.tool_calls:
            break
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})


def calculate(arguments):
    try:
        return str(simple_eval(json.loads(arguments)["expression"]))
    except Exception as error:  # the policy reads what is wrong with its expression
        return f"error: {error}"
