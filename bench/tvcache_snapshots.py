"""When to copy an environment: our rule compared with always and never, on a directory with a real build of a C
project.

A project of a few files is built with gcc, patched, built again and tested by rollouts with common beginnings. Two
mixes: builds (seconds, small directory: snapshots pay) and small edits of a large directory (milliseconds: they do
not). Our rule must be within 5 % of the better one in both, with its bytes within the budget. The three alternate, and
the best of several rounds counts for each, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common.report import Report, not_measured

from tvcache import Cache, Snapshots, Tool
from tvcache.environments.directory import DirectoryEnvironment
from tvcache.snapshots import Policy

POLICIES: tuple[Policy, ...] = ("measured", "always", "never")
BUDGET_BYTES = 256 << 20
MODULES = 4
Call = tuple[str, dict[str, Any]]

MODULE = """#include "all.h"
static double table{n}[64][64];
{functions}
int part{n}(int seed) {{
  double sum = seed + {change};
  for (int i = 0; i < 64; i++) for (int j = 0; j < 64; j++) table{n}[i][j] = (i * {n} + j) % 7;
{calls}
  return (int)sum & 1023;
}}
"""
FUNCTION = """static double f{n}_{k}(double x) {{
  for (int i = 0; i < 64; i++) for (int j = 1; j < 64; j++) x += table{n}[i][j - 1] * table{n}[j][i] / (1 + {k});
  return x;
}}
"""


def module(n: int, change: int, functions: int = 60) -> str:
    return MODULE.format(
        n=n,
        change=change,
        functions="".join(FUNCTION.format(n=n, k=k) for k in range(functions)),
        calls="".join(f"  sum = f{n}_{k}(sum);\n" for k in range(functions)),
    )


def project(folder: Path, ballast_bytes: int) -> Path:
    folder.mkdir()
    parts = range(MODULES)
    (folder / "all.h").write_text("".join(f"int part{n}(int);\n" for n in parts))
    for n in parts:
        (folder / f"part{n}.c").write_text(module(n, 0))
    total = " + ".join(f"part{n}(1)" for n in parts)
    (folder / "main.c").write_text(
        f'#include <stdio.h>\n#include "all.h"\nint main() {{ printf("%d\\n", {total}); }}\n'
    )
    objects = " ".join(f"part{n}.o" for n in parts)
    rule = "%.o: %.c all.h\n\t@gcc -O2 -c $< -o $@\n"
    (folder / "Makefile").write_text(f"app: main.o {objects}\n\t@gcc $^ -o $@\n{rule}")
    if ballast_bytes:
        (folder / "data.bin").write_bytes(random.Random(1).randbytes(ballast_bytes))
    return folder


def builds(chance: random.Random, rollouts: int) -> list[list[Call]]:
    """Build, then patch one of two modules in one of two ways, build, test; some rollouts patch once more."""
    found = []
    for _ in range(rollouts):
        calls: list[Call] = [("make", {})]
        for _ in range(chance.choice((1, 1, 2))):
            n = chance.randrange(2)
            calls.append(("write_file", {"name": f"part{n}.c", "text": module(n, chance.choice((1, 2)))}))
            calls += [("make", {}), ("test", {})]
        found.append(calls)
    return found


def edits(chance: random.Random, rollouts: int) -> list[list[Call]]:
    """Short notes in a large directory."""
    names = ("a.txt", "b.txt", "c.txt")
    return [
        [
            ("write_file", {"name": names[step % 3], "text": f"{step} {chance.randrange(2) if step > 5 else 0}"})
            for step in range(12)
        ]
        for _ in range(rollouts)
    ]


def shell(command: str) -> Any:
    from tvcache.environments.directory import shell as run

    return lambda directory: run(directory, command)


def play(source: Path, place: Path, policy: Policy, calls: list[list[Call]]) -> tuple[float, Snapshots, list[Any]]:
    from tvcache.environments.directory import write_file

    tools = {"make": shell("make -s app"), "test": shell("./app"), "write_file": write_file}
    peak = [0]

    class Watched(Snapshots):
        def _keep(self, state: bytes, snapshot: Any) -> None:
            super()._keep(state, snapshot)
            peak[0] = max(peak[0], self.used_bytes)

    snapshots = Watched(policy=policy, max_bytes=BUDGET_BYTES)
    outputs = []
    with Cache(tools=[Tool("test", "reads")], snapshots=snapshots, audit=0.0) as cache:
        began_s = time.perf_counter()
        for rollout_calls in calls:
            with cache.rollout("t", lambda: DirectoryEnvironment.copy_of(source, place, tools)) as rollout:
                outputs += [rollout.call(*call) for call in rollout_calls]
        took_s = time.perf_counter() - began_s
    snapshots.peak_bytes = peak[0]  # type: ignore[attr-defined]
    return took_s, snapshots, outputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds, fewer rollouts")
    args = parser.parse_args()
    if shutil.which("gcc") is None or shutil.which("make") is None:
        return not_measured("snapshot policy", "gcc or make is missing")
    report = Report("When to copy an environment", "always and never, in turn")
    rounds = 3 if args.quick else 4
    for name, ballast, make, rollouts in (
        ("builds of a C project", 0, builds, 6 if args.quick else 10),
        ("edits of a large directory", 24 << 20, edits, 6 if args.quick else 12),
    ):
        calls = make(random.Random(5), rollouts)
        best: dict[str, float] = {}
        seen: list[Any] = []
        most = 0
        with tempfile.TemporaryDirectory() as folder:
            source = project(Path(folder) / "source", ballast)
            for _ in range(rounds):
                for policy in POLICIES:
                    took_s, snapshots, outputs = play(source, Path(folder), policy, calls)
                    best[policy] = min(best.get(policy, took_s), took_s)
                    seen.append(outputs)
                    most = max(most, snapshots.peak_bytes)  # type: ignore[attr-defined]
        for policy in POLICIES:
            report.figure(f"{name}: {policy}", best[policy], "s")
        better = min(best["always"], best["never"])
        report.figure(f"{name}: ours over the better", best["measured"] / better, "", at_most=1.05)
        report.figure(f"{name}: outputs that differ", sum(one != seen[0] for one in seen), "", at_most=0)
        report.figure(f"{name}: bytes kept, of the budget", most / BUDGET_BYTES, "", at_most=1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
