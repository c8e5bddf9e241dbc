"""An environment of the package verifiers laid out by its own command: sums, in one turn, in several, with a tool."""

from typing import Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, left: int, right: int) -> str:
        """Adds two numbers."""
        return str(left + right)


class SumsTaskConfig(vf.TaskConfig):
    kind: Literal["single", "multi", "tool"] = "single"
    fault: Literal["reward raises", "no reward", "not a number"] | None = None
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsData(vf.TaskData):
    left: int
    right: int


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [SumsToolset(config.tools)] if config.kind == "tool" else []

    @vf.reward(weight=1.0)
    async def right_answer(self, trace: vf.Trace):
        if self.config.fault == "reward raises":
            raise OSError("the grader is away")
        if self.config.fault == "no reward":
            return {}
        if self.config.fault == "not a number":
            return float("nan")
        return float(str(self.data.left + self.data.right) in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short_answer(self, trace: vf.Trace):
        return {} if self.config.fault == "no reward" else float(len(trace.last_reply) < 20)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int | None = 4
    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    @property
    def bounded(self) -> bool:
        return self.config.num_tasks is not None or super()._bounded is True

    def load(self):
        number = 0
        while self.config.num_tasks is None or number < self.config.num_tasks:
            data = SumsData(prompt=f"{number}+{number + 1}=", system_prompt="Add.", left=number, right=number + 1)
            yield SumsTask(data, self.config.task)
            number += 1


class SumsEnvConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SumsEnv(vf.Env[SumsEnvConfig]):
    """With several turns the user says whether the sum is right, and gives a second try."""

    async def run(self, task, agents):
        if task.config.kind != "multi":
            await agents.solver.run(task)
            return
        async with agents.solver.interaction(task) as interaction:
            said = await interaction.turn()
            if not said.terminated and str(task.data.left + task.data.right) not in said.last_reply:
                await interaction.turn("No. Once more:")


class SumsHarnessConfig(vf.HarnessConfig):
    pass


class SumsHarness(vf.Harness[SumsHarnessConfig]):
    """A loop of chat and tools that needs no program of its own."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt]
        tools, servers = await self._tools(mcp_urls)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as policy:
            while True:
                keys = {"tools": tools} if tools else {}
                answer = await policy.chat.completions.create(model=ctx.model, messages=messages, **keys)
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in said.tool_calls:
                    told = await self._call(servers[call.function.name], call.function)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told})

    async def _tools(self, mcp_urls):
        from mcp import Client

        tools, servers = [], {}
        for url in mcp_urls.values():
            async with Client(url) as client:
                for tool in (await client.list_tools()).tools:
                    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                    tools.append({"type": "function", "function": function})
                    servers[tool.name] = url
        return tools, servers

    async def _call(self, url, function):
        import json

        from mcp import Client

        async with Client(url) as client:
            result = await client.call_tool(function.name, json.loads(function.arguments))
        return "\n".join(block.text for block in result.content)


__all__ = ["SumsEnv", "SumsHarness", "SumsTaskset"]

if __name__ == "__main__":
    SumsToolset.run()
