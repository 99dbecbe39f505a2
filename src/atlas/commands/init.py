"""Write a job file from a model's name and the cloud regions where you have GPUs.

    atlas init --model llama-3-8b --dc aws:us-east-1=64xH100 --dc gcp:europe-west4=32xA100-80GB --batch 1M --seq 8192

On a terminal it asks for what the flags leave out. Latency, throughput and prices come from the catalogue that
`atlas regions` shows; the file marks them as priors (not measured by you). Then: atlas plan job.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from atlas.catalogue.jobfile import dates, job_text, model, site, sites
from atlas.catalogue.models import shapes
from atlas.commands.regions import warn_of_old
from atlas.console import require_writable, say, show, whole
from atlas.errors import SpecError
from atlas.ir.replace import write_whole
from atlas.spec.batch import batch_sequences
from atlas.spec.document import parse_yaml
from atlas.spec.load import finished
from atlas.view.table import folded, plain_table, right, whole_words


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", help="a built-in model (--list-models), a Hugging Face folder or a config.json")
    add(
        "--dc",
        action="append",
        default=[],
        metavar="CLOUD:REGION=COUNTxGPU",
        help="GPUs in a region, such as aws:us-east-1=64xH100; append @2.5 for your own hourly price",
    )
    add("--batch", metavar="SIZE", help="batch of one iteration: tokens (1M: 2^20) or sequences ('512 sequences')")
    add("--seq", type=whole(1, 10**8), metavar="N", help="tokens of one sequence (default: the model's, at most 8192)")
    add("--out", type=Path, default=Path("job.yaml"), metavar="FILE", help="the job file")
    add("--force", action="store_true", help="replace the file if there is one")
    add("--list-models", action="store_true", help="print the built-in models with their sources")


def run(args: argparse.Namespace) -> int:
    if args.list_models:
        _show_models()
        return 0
    require_writable(args.out, "--out")
    if args.out.exists() and not args.force:
        remedy = "Choose another name, or give --force to replace it"
        raise SpecError(where="--out", key="file", value=str(args.out), rule="exists already", remedy=remedy)
    _require(args) if not sys.stdin.isatty() else _ask(args)
    chosen = model(args.model, args.seq)
    where = sites(args.dc)
    text = job_text(chosen, where, args.batch, str(args.out))
    finished(parse_yaml(text, str(args.out)), (), str(args.out), to_plan=True)
    write_whole(args.out, text.encode())
    warn_of_old(dates(where))
    say(f"wrote {args.out}. Next: atlas plan {args.out} --out plan.yaml --page plan.html")
    return 0


def _require(args: argparse.Namespace) -> None:
    examples = {"model": "llama-3-8b", "dc": "aws:us-east-1=64xH100", "batch": "1M"}
    missing = [flag for flag in examples if not getattr(args, flag)]
    if missing:
        remedy = "Add " + " ".join(f"--{flag} {examples[flag]}" for flag in missing) + ", or run it on a terminal"
        names = ", ".join(f"--{flag}" for flag in missing)
        rule = "are missing" if len(missing) > 1 else "is missing"
        raise SpecError(where="command line", key=names, rule=rule, remedy=remedy)


def _show_models() -> None:
    table = plain_table(*whole_words("model"), *right("parameters", "layers", "hidden"), *folded("source"))
    for one in shapes().values():
        table.add_row(one.name, f"{one.billions:g}B", str(one.keys["layers"]), str(one.keys["hidden"]), one.source)
    show(table)


# ---- questions ---------------------------------------------------------------------------------------------
def _ask(args: argparse.Namespace) -> None:
    """Ask for what is missing, again until it is right."""
    if not args.model:
        question = "Model (a name such as llama-3-8b, or a Hugging Face folder): "
        args.model = _answer(question, lambda text: model(text, args.seq))
    while not args.dc:
        say("GPUs you can have, one region a line, such as aws:us-east-1=64xH100. An empty line ends the list.")
        while text := _answer("  GPUs: ", lambda text: text and site(text)):
            args.dc.append(text)
    if not args.batch:
        length = model(args.model, args.seq).seq_len
        question = "Batch of one iteration (tokens such as 1M, which is 2^20, or '512 sequences'): "
        args.batch = _answer(question, lambda text: batch_sequences(text, length, where="batch"))


def _answer(question: str, check: Callable[[str], object]) -> str:
    """The first answer that `check` accepts."""
    while True:
        print(question, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            rule, remedy = "ended before all questions were answered", "Give the flags instead: atlas init --help"
            raise SpecError(where="atlas init", key="input", rule=rule, remedy=remedy)
        try:
            check(line.strip())
            return line.strip()
        except SpecError as error:
            say(f"  {error}")
