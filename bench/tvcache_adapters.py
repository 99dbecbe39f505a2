"""The adapters against the real packages: SkyRL-gym's SQLEnv, and the tool call of verl's agent loop.

Both need a separate environment: `--install DIR` makes one (skyrl-gym and its dependencies; verl without its
dependencies and with what its BaseTool imports) and runs this script in it. Without the packages nothing is measured
(77). SQLEnv: 8 rollouts of one question, the same model outputs with and without the cache; observations and rewards
must be equal. verl: 8 rollouts with two calls per turn through `ToolAgentLoop._call_tool`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from common.report import Report, not_measured

from tvcache import Cache
from tvcache.adapters import skyrl
from tvcache.adapters.verl import Sessions, cached

ROLLOUTS = 8
VERL_NEEDS = (
    *("torch", "ray", "tensordict", "transformers>=4.50", "codetiming", "hydra-core", "pillow", "orjson", "datasets"),
    *("cachetools", "uvicorn", "fastapi"),
)
"""What verl's BaseTool and its agent loop import."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR", help="make an environment in DIR and run in it")
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    args = parser.parse_args()
    if args.install is not None:
        return _installed(args.install)
    report = Report("Adapters against the real packages", "the same rollouts without a cache")
    measured = False
    for package, check, line in (
        ("skyrl_gym.envs.sql.env", sql_env, "SkyRL-gym SQLEnv: rollouts whose observations or rewards differ"),
        ("verl.tools.base_tool", verl_tool, "verl BaseTool: rollouts out of order or different"),
    ):
        try:
            importlib.import_module(package)
        except ImportError as error:
            report.void(line, str(error))
            continue
        check(report)
        measured = True
    if not measured:
        return not_measured(report.title, "neither skyrl-gym nor verl is installed: give --install DIR")
    return report.finish()


def _installed(folder: Path) -> int:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "skyrl-gym"], check=True)
        subprocess.run([*pip, "--no-deps", "verl"], check=True)
        subprocess.run([*pip, *VERL_NEEDS], check=True)
    return subprocess.run([str(python), __file__], check=False).returncode


def actions(rollout: int) -> list[str]:
    """Model outputs: a common beginning, then one of four continuations."""
    ask = "<think>look</think><sql>{}</sql>".format
    way = rollout % 4
    return [
        ask("select name from sqlite_master"),
        ask("select count(*) from singer"),
        ask(f"select name from singer where age > {20 + 10 * way} order by name"),
        ask("select nothing from nowhere") if way == 3 else ask("select max(age) from singer"),
        f"<think>done</think><solution>select count(*) from singer where age > {30 if way < 2 else 99}</solution>",
    ]


def sql_env(report: Report) -> None:
    from skyrl_gym.envs.sql.env import SQLEnv, Text2SQLEnvConfig

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "spider" / "database" / "concert"
        place.mkdir(parents=True)
        database = sqlite3.connect(place / "concert.sqlite")
        database.execute("create table singer (name text, age int)")
        database.executemany("insert into singer values (?, ?)", [(f"singer {n}", 18 + n) for n in range(40)])
        database.commit()
        database.close()
        extras = {
            "db_id": "concert",
            "data": "spider",
            "max_turns": 6,
            "reward_spec": {"ground_truth": "select count(*) from singer where age > 30"},
        }

        def play(rollout: int, cache: Cache | None) -> tuple[list[Any], int]:
            env = SQLEnv(Text2SQLEnvConfig(db_path=folder), extras)
            env.init([{"role": "user", "content": "How many singers are older than 30?"}])
            wrapped = None
            if cache is not None:
                wrapped = skyrl.wrap(
                    env.tool_group, cache, task="spider/concert/1", reads={"sql"}, accept=skyrl.is_value
                )
            steps = [env.step(action) for action in actions(rollout)]
            return [
                (step["observations"], step["reward"], step["done"]) for step in steps
            ], wrapped.hits if wrapped else 0

        cache = Cache(audit=0.25, seed=1)
        plain = [play(rollout, None)[0] for rollout in range(ROLLOUTS)]
        found = [play(rollout, cache) for rollout in range(ROLLOUTS)]
    different = sum(steps != expected for (steps, _), expected in zip(found, plain, strict=True))
    rewards = {steps[-1][1] for steps, _ in found}
    report.figure("SkyRL-gym SQLEnv: rollouts whose observations or rewards differ", different, "", at_most=0)
    report.figure("SkyRL-gym SQLEnv: different rewards seen", len(rewards), "", at_least=2)
    report.figure("SkyRL-gym SQLEnv: hits of 32 calls", sum(hits for _, hits in found), "", at_least=16)
    report.figure("SkyRL-gym SQLEnv: hits executed again", cache.counters.audits, "", at_least=1)
    report.figure("SkyRL-gym SQLEnv: of them different", sum(cache.counters.differences.values()), "", at_most=0)


def verl_tool(report: Report) -> None:
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    call_tool, new_agent_data = _agent_loop()
    executed: list[str] = []

    class Ledger(BaseTool):
        """Its state is in `agent_data.extra_fields`, as verl recommends."""

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            ledger = kwargs["agent_data"].extra_fields.setdefault("ledger", [])
            await asyncio.sleep(0.002 if parameters["entry"].startswith("slow") else 0)
            ledger.append(parameters["entry"])
            executed.append(parameters["entry"])
            return ToolResponse(text=", ".join(ledger)), float(len(ledger)), {"entries": len(ledger)}

    schema = OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": "ledger",
                "description": "append an entry",
                "parameters": {"type": "object", "properties": {"entry": {"type": "string"}}, "required": ["entry"]},
            },
        }
    )

    async def play(rollout: int, tool: Any) -> list[Any]:
        agent_data = new_agent_data(f"request-{rollout}")
        found = []
        for turn in (("slow 1", "2"), ("3", f"way {rollout % 2}")):
            calls = [SimpleNamespace(name="ledger", arguments=json.dumps({"entry": entry})) for entry in turn]
            found += await asyncio.gather(*(call_tool({"ledger": tool}, call, agent_data) for call in calls))
        return [(response.text, reward, metrics) for response, reward, metrics in found]

    def in_order(rollout: int) -> list[Any]:
        """The outputs of the calls in order."""
        entries = ["slow 1", "2", "3", f"way {rollout % 2}"]
        return [(", ".join(entries[:n]), float(n), {"entries": n}) for n in range(1, 5)]

    sessions = Sessions(Cache(audit=0.0))
    tool = cached(Ledger, sessions=sessions)(config={}, tool_schema=schema)
    found = [asyncio.run(play(rollout, tool)) for rollout in range(ROLLOUTS)]
    different = sum(one != in_order(rollout) for rollout, one in enumerate(found))
    report.figure("verl BaseTool: rollouts out of order or different", different, "", at_most=0)
    report.figure("verl BaseTool: hits of 32 calls", sessions.cache.counters.hits, "", at_least=26)
    report.figure("verl BaseTool: calls executed", len(executed), "", at_most=9)


def _agent_loop() -> tuple[Any, Any]:
    """The `_call_tool` and AgentData of verl if its agent loop can be imported; otherwise the same few lines, which
    need no engine."""
    try:
        from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
    except ImportError as error:
        print(json.dumps({"name": "verl's agent loop", "skipped": str(error)}), flush=True)
        return _call_like_verl, lambda name: _AgentData(name)
    settings = SimpleNamespace(max_tool_response_length=10_000, tool_response_truncate_side="right")

    async def call(tools: dict[str, Any], called: Any, agent_data: Any) -> Any:
        settings.tools = tools
        return await ToolAgentLoop._call_tool(settings, called, {}, agent_data)

    return call, lambda name: AgentData([], [], [], None, None, {}, name, {})


class _AgentData:
    def __init__(self, request_id: str) -> None:
        self.request_id, self.tools_kwargs, self.extra_fields = request_id, dict[str, Any](), dict[str, Any]()


async def _call_like_verl(tools: dict[str, Any], called: Any, agent_data: Any) -> Any:
    tool = tools[called.name]
    instance_id, _ = await tool.create(create_kwargs={})
    try:
        return await tool.execute(instance_id, json.loads(called.arguments), agent_data=agent_data)
    finally:
        await tool.release(instance_id)


if __name__ == "__main__":
    sys.exit(main())
