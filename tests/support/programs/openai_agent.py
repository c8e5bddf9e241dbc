"""An agent that knows nothing of where it runs: a plain client of OpenAI's API that asks twice."""

import json
import os

import openai

with open(os.environ["ROLL_TASK"]) as file:
    messages = json.load(file)["messages"]
client = openai.OpenAI()
first = client.chat.completions.create(model="gpt-5", messages=messages, max_tokens=4)
messages += [first.choices[0].message, {"role": "user", "content": "Are you sure?"}]
client.chat.completions.create(model="gpt-5", messages=messages, stream=False)
