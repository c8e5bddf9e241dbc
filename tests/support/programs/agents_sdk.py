"""An agent of OpenAI's Agents SDK, with a tool: all that it knows of the policy is in its environment variables."""

import json
import os

from agents import Agent, Runner, function_tool


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


with open(os.environ["ROLL_TASK"]) as file:
    prompt = json.load(file)["prompt"]
Runner.run_sync(Agent(name="Sums", instructions="Multiply with the tool.", tools=[multiply]), prompt, max_turns=3)
