"""List checkpoints, verify every byte of one, export one for transformers or torch.distributed.checkpoint, or import
weights from there.

A folder may be a datacenter's own, or a parent of several: all stores below it are used together, replicas too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.console import Meter, print_json, say, show
from atlas.errors import AtlasError
from atlas.runtime.checkpoint.manifest import ids, missing_layers, parts_of
from atlas.view.table import plain_table, right

if TYPE_CHECKING:
    from atlas.runtime.checkpoint.load import Checkpoint
    from atlas.runtime.checkpoint.store import BlobStore


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, help="list, verify, export or import"
    )
    listed = actions.add_parser("list", help="list the saves", description="List all saves, including incomplete ones.")
    verify = actions.add_parser("verify", help="check every file", description="Compare every file with its hash.")
    export = actions.add_parser(
        "export",
        help="export for transformers or PyTorch",
        description="Write a Hugging Face folder that transformers loads, or a folder of torch.distributed.checkpoint.",
    )
    _configure_import(actions.add_parser("import", help="import weights", description=IMPORTS))
    for action in (listed, verify, export):
        action.add_argument(
            "folders", nargs="+", metavar="FOLDER", help="folder with checkpoints, or s3://BUCKET/PREFIX"
        )
    for action in (verify, export):
        action.add_argument("--step", type=int, metavar="N", help="step of the save (default: the newest complete one)")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    export.add_argument(
        "--format", choices=("hf", "dcp"), default="hf", help="hf (default), or dcp with optimizer state"
    )
    for action in (listed, verify):
        action.add_argument("--json", action="store_true", help="print JSON")


IMPORTS = """Import weights of another format.

hf: write a checkpoint of step 0, for `atlas train --checkpoints`, from a Hugging Face folder.
dcp: write a Hugging Face folder, for `atlas train --model`, from a folder of torch.distributed.checkpoint with weights
named model.NAME, as in Hugging Face. Its metadata is a pickle: import only folders that you trust.
"""


def _configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to import")
    parser.add_argument("--format", choices=("hf", "dcp"), default="dcp", help="format of FOLDER")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the model's config.json, for dcp")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create; for hf also s3://BUCKET/PREFIX")


def run(args: argparse.Namespace) -> int:
    if args.action == "import":
        return _import_hf(args) if args.format == "hf" else _import_dcp(args)
    stores = stores_under(args.folders)
    if args.action == "list":
        _list(stores, args.json)
        return 0
    found = _chosen(stores, args.step)
    if args.action == "verify":
        return _verify(found, args.json)
    return _export_dcp(found, args.out) if args.format == "dcp" else _export(found, args.out)


def stores_under(places: Sequence[str]) -> list[BlobStore]:
    """Every store with saves in it, at or below these places."""
    from atlas.runtime.checkpoint.place import saves_under  # pydantic: 0.1 s

    found: list[BlobStore] = [store for place in places for store in saves_under(place)]
    if not found:
        raise AtlasError(f"{', '.join(places)}: no checkpoint in it. Name the folder with step-… folders")
    return found


def _list(stores: Sequence[BlobStore], in_json: bool) -> None:
    rows = [_row(stores, id) for id in sorted(set().union(*(ids(store) for store in stores)))]
    if in_json:
        print_json(rows)
        return
    table = plain_table(*right("step", "attempt", "parts", "layers", "MB"), "complete", "in")
    for row in rows:
        state = "yes" if row["complete"] else f"no: {', '.join(row['missing'][:3]) or 'a part'} missing"
        layers = f"{row['num_layers'] - len(row['missing'])} of {row['num_layers']}"
        figures = (row["step"], row["attempt"], row["parts"], layers, f"{row['bytes'] / 1e6:,.1f}")
        table.add_row(*map(str, figures), state, ", ".join(row["stores"]))
    show(table)


def _row(stores: Sequence[BlobStore], id: Any) -> dict[str, Any]:
    """One save. Bytes of replicas count; their layers count once."""
    held = parts_of(stores, id)
    parts = [part for _, part in held]
    missing = missing_layers(parts) if parts else []
    return {
        "step": id.step,
        "attempt": id.attempt,
        "complete": bool(parts) and not missing,
        "parts": len({part.writer for part in parts}),
        "num_layers": len(parts[0].model_layers) if parts else 0,
        "missing": missing,
        "bytes": sum(blob.num_bytes for part in parts for blob in part.blobs),
        "stores": list(dict.fromkeys(str(store) for store, _ in held)),
    }


def _chosen(stores: Sequence[BlobStore], step: int | None) -> Checkpoint:
    from atlas.runtime.checkpoint.load import choose  # torch: 1.9 s

    found = choose(stores, step=step, report=say)
    if found is None:
        raise AtlasError("no save is complete: `atlas checkpoint list` shows what is missing")
    return found


def _verify(found: Checkpoint, in_json: bool) -> int:
    from atlas.runtime.checkpoint.load import verify  # torch: 1.9 s

    problems = verify(found)
    if in_json:
        print_json({"step": found.step, "attempt": found.id.attempt, "problems": problems})
        return 2 if problems else 0
    if problems:
        raise AtlasError("\n".join(problems))
    print(f"checkpoint of {found.id}: all {len(found.layers)} layers are undamaged")
    return 0


def _export(found: Checkpoint, folder: Path) -> int:
    from atlas.runtime.checkpoint.export import export_checkpoint  # torch: 1.9 s

    with Meter() as meter:
        num_shards = export_checkpoint(found, folder, progress=meter)
    print(f"{folder}: the model after step {found.step}, in {num_shards} safetensors file(s), for transformers")
    return 0


def _export_dcp(found: Checkpoint, folder: Path) -> int:
    from atlas.runtime.checkpoint.dcp import export_dcp  # torch: 1.9 s

    num_tensors = export_dcp(found, folder)
    print(f"{folder}: step {found.step}, {num_tensors} tensors, for torch.distributed.checkpoint")
    return 0


def _import_dcp(args: argparse.Namespace) -> int:
    from atlas.runtime.checkpoint.dcp import import_dcp  # torch: 1.9 s

    if args.config is None:
        raise AtlasError("--format dcp: the folder does not describe its model. Give --config FILE, its config.json")
    num_tensors = import_dcp(args.folder, args.config, Path(args.out))
    print(f"{args.out}: {num_tensors} tensors, for `atlas train --model {args.out}`")
    return 0


def _import_hf(args: argparse.Namespace) -> int:
    from atlas.runtime.checkpoint.import_hf import import_hf  # torch: 1.9 s

    if args.config is not None:
        raise AtlasError(f"--config {args.config}: with --format hf, the config.json in FOLDER is used. Leave it out")
    with Meter() as meter:
        num_layers = import_hf(args.folder, args.out, progress=meter)
    print(f"{args.out}: {num_layers} layers at step 0, for `atlas train --checkpoints {args.out}`")
    return 0
