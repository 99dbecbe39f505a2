"""The contents of a log as a summary (JSON) and as a page: by tool, and the tree of every task with hits and seconds
saved.

The page is one file without scripts. Everything that comes from calls is escaped, because an agent wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

MAX_TASKS = 200
"""On a page: those that saved most time."""
MAX_NODES = 400
"""Nodes of one task on a page; the rest is only counted."""
MAX_TEXT = 140
"""Characters of a call."""
LEGEND = (
    "<p class=legend>Each line is a call whose output is stored; the number is how often it was hit. "
    "<b class=m>●</b> changes the state: what is indented below it was called after it. "
    "<b class=r>○</b> only reads.</p>"
)


@dataclass
class CallSums:
    """Over the stored values of a tool, a task or the log."""

    values: int = 0
    hits: int = 0
    executed_s: float = 0.0
    saved_s: float = 0.0

    def add(self, hits: int, seconds: float) -> None:
        self.values += 1
        self.hits += hits
        self.executed_s += seconds
        self.saved_s += hits * seconds

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "hit_rate": self.hits / (self.hits + self.values) if self.values else 0.0}


@dataclass
class TaskTree:
    """Of one task: the values of every state, by the state before the call."""

    name: str
    image: str
    sums: CallSums = field(default_factory=CallSums)
    after: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)


def summary(
    records: Iterable[tuple[Mapping[str, Any], int]], dropped: Mapping[str, int], title: str = ""
) -> dict[str, Any]:
    """JSON-able."""
    trees: dict[tuple[str, str], TaskTree] = {}
    tools: dict[str, CallSums] = {}
    whole = CallSums()
    for record, hits in records:
        name, image = record["task"]
        tree = trees.setdefault((name, image), TaskTree(name, image))
        call, seconds = record["call"], record["seconds"]
        for sums in (whole, tree.sums, tools.setdefault(_tool(call), CallSums())):
            sums.add(hits, seconds)
        node = {
            "call": _text(call),
            "mutates": record["mutates"],
            "hits": hits,
            "seconds": seconds,
            "key": record["key"],
        }
        tree.after.setdefault(record["state"], []).append(node)
        tree.keys.add(record["key"])
    ranked = sorted(trees.values(), key=lambda tree: (-tree.sums.saved_s, -tree.sums.hits, tree.name))
    return {
        "title": title,
        **whole.figures(),
        "dropped": dict(dropped),
        "tools": {
            name: sums.figures() for name, sums in sorted(tools.items(), key=lambda item: (-item[1].saved_s, item[0]))
        },
        "num_tasks": len(ranked),
        "tasks": [
            {"name": tree.name, "image": tree.image, **tree.sums.figures(), **_nodes(tree)}
            for tree in ranked[:MAX_TASKS]
        ],
    }


def _nodes(tree: TaskTree) -> dict[str, Any]:
    """The tree in depth-first order with depths; states whose path is not stored start at depth 0."""
    roots = [state for state in tree.after if state not in tree.keys]
    nodes: list[dict[str, Any]] = []
    waiting = [(0, node) for state in roots for node in _ranked(tree.after[state])][::-1]
    while waiting and len(nodes) < MAX_NODES:
        depth, node = waiting.pop()
        nodes.append({name: value for name, value in node.items() if name != "key"} | {"depth": depth})
        if node["mutates"]:
            waiting += [(depth + 1, child) for child in _ranked(tree.after.get(node["key"], []))][::-1]
    return {"nodes": nodes, "num_more": tree.sums.values - len(nodes)}


def _ranked(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reads before mutations, most hits first."""
    return sorted(nodes, key=lambda node: (node["mutates"], -node["hits"], node["call"]))


def _tool(call: Mapping[str, Any]) -> str:
    return str(call["name"]) if call["kind"] == "call" else f"reward: {call['name']}"


def _text(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    if isinstance(arguments, dict):
        inside = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    else:
        inside = json.dumps(arguments, ensure_ascii=False)
    return _short(f"{_tool(call)}({inside})")


def page(found: Mapping[str, Any]) -> str:
    """The summary as HTML."""
    style = files("tvcache").joinpath("show.css").read_text(encoding="utf-8")
    title = escape(found["title"] or "tvcache")
    cards = [
        ("hits", f"{found['hits']:,}"),
        ("hit rate", f"{100 * found['hit_rate']:.0f} %"),
        ("tool time saved", duration(found["saved_s"])),
        ("tool time executed", duration(found["executed_s"])),
        ("values", f"{found['values']:,}"),
        ("tasks", f"{found['num_tasks']:,}"),
    ]
    return "".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tvcache: {title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{style}</style></head><body><main><h1>tvcache <small>{title}</small></h1><dl class=cards>",
            *(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards),
            "</dl>",
            _warning(found["dropped"]),
            _tools(found["tools"]),
            f"<h2>Tasks</h2>{LEGEND if found['tasks'] else '<p class=legend>No values yet.</p>'}",
            *(_task(task, index == 0) for index, task in enumerate(found["tasks"])),
            _more(found["num_tasks"] - len(found["tasks"]), "tasks"),
            "</main></body></html>",
        )
    )


def duration(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _warning(dropped: Mapping[str, int]) -> str:
    if not dropped:
        return ""
    names = ", ".join(f"<code>{escape(name)}</code> ({count:,} dropped)" for name, count in sorted(dropped.items()))
    return (
        "<p class=warning>Executed again by the audit, these tools gave another output or changed the state although "
        f"declared <code>reads</code>: {names}. Declare them <code>mutates</code> or <code>volatile</code>.</p>"
    )


def _tools(tools: Mapping[str, Mapping[str, Any]]) -> str:
    if not tools:
        return ""
    most = max(one["saved_s"] for one in tools.values()) or 1.0
    rows = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code></th><td>{one['hits']:,}</td><td>{one['values']:,}</td>"
        f"<td>{100 * one['hit_rate']:.0f} %</td><td>{duration(one['saved_s']) if one['hits'] else '–'}</td>"
        f'<td class=bar><i style="width:{100 * one["saved_s"] / most:.1f}%"></i></td></tr>'
        for name, one in tools.items()
    )
    return (
        "<h2>Tools</h2><div class=wide><table><thead><tr><th>tool</th><th>hits</th><th>values</th><th>hit rate</th>"
        f"<th>saved</th><th></th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _task(task: Mapping[str, Any], is_open: bool) -> str:
    image = f" <small>{escape(_short(task['image']))}</small>" if task["image"] else ""
    nodes = "".join(
        f'<li style="--depth:{min(node["depth"], 24)}"><b class={"m>●" if node["mutates"] else "r>○"}</b>'
        f"<code>{escape(node['call'])}</code><span>{_hits(node)}</span></li>"
        for node in task["nodes"]
    )
    return (
        f"<details{' open' if is_open else ''}><summary><b>{escape(_short(task['name']) or '(no name)')}</b>{image}"
        f"<span>{task['hits']:,} hits · {100 * task['hit_rate']:.0f} % · {duration(task['saved_s'])} saved</span>"
        f"</summary><ol>{nodes}</ol>{_more(task['num_more'], 'values')}</details>"
    )


def _hits(node: Mapping[str, Any]) -> str:
    saved = f" · {duration(node['hits'] * node['seconds'])}" if node["hits"] else ""
    return f"<em>{node['hits']:,}</em>{saved}" if node["hits"] else "–"


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _more(count: int, what: str) -> str:
    return f"<p class=legend>and {count:,} more {what}</p>" if count > 0 else ""
