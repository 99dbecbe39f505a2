"""Write the files that start a plan under a scheduler: one job for each datacenter. The jobs connect to the address in
--rendezvous or --coordinator (docs/operating.md). Starts nothing.

The folder gets the jobs, the plan, the recipe, a Dockerfile (not built here) and a README with the commands.
Certificates are not copied. Files that an earlier `atlas launch` wrote are overwritten, no others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.commands.network_flags import rendezvous_of
from atlas.console import make_folder, require_folder
from atlas.evaluate import find_schedule
from atlas.launch.job_files import PORTS, TARGETS, LaunchChoice, write_files
from atlas.launch.preflight import require_executable
from atlas.launch.site_network import PortRange
from atlas.spec.document import read_text
from atlas.spec.plan import job_text, load_job_or_plan, require_runnable
from atlas.spec.recipe import OBJECT_STORE, WORDS, Recipe, load_recipe


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN.yaml", help="a plan, or a job")
    add("--recipe", type=Path, required=True, metavar="FILE", help="how to train (docs/recipes.md)")
    add("--target", choices=sorted(TARGETS), required=True, help="the scheduler")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder to write to")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="an address of the first host of the plan's first datacenter"
    )
    place.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where `atlas coordinator` runs, on a machine of its own"
    )
    add("--image", default="atlas:latest", metavar="NAME", help="image of the container")
    add("--ports", metavar="LO-HI", help=f"ports of workers and checkpoint servers (default: the recipe's, or {PORTS})")
    add("--device", default="cuda", metavar="NAME", help="cuda or cpu")
    add("--no-certs", action="store_true", help="train without certificates; works on loopback only")


def run(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe)
    job, plan = load_job_or_plan(args.plan, recipe.job_overrides)
    require_executable(job)
    if plan is not None:
        require_runnable(plan)
        find_schedule(plan.schedule.name, f"{args.plan}: schedule.name")
    rendezvous_of(args)
    if args.ports is not None:
        PortRange.of(args.ports)
    require_folder(args.out, "--out")
    make_folder(args.out)
    is_one_file = plan is not None or job.files == (job.where,)
    text = read_text(args.plan, key="plan") if is_one_file else job_text(job)
    named = [file for file in job.files if file != job.where and file in text]
    choice = LaunchChoice(
        job,
        text,
        read_text(args.recipe, key="recipe"),
        args.coordinator or args.rendezvous,
        args.image,
        args.ports,
        args.device,
        not args.no_certs,
        (recipe.checkpoints.folder or "").startswith(OBJECT_STORE),
        args.coordinator is not None,
        recipe.network,
        (*_folders(recipe, args.recipe), *named),
    )
    for path in write_files(choice, args.target, args.out):
        print(path)
    return 0


def _folders(recipe: Recipe, path: Path) -> list[str]:
    """Data and model, as the recipe names them."""
    named = {recipe.data.shards, recipe.model} - {None, *WORDS.values()}
    here = path.absolute().parent
    found = sorted(Path(name) for name in named if name)
    return [str(place.relative_to(here) if place.is_relative_to(here) else place) for place in found]
