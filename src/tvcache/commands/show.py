"""Write a page with the tree of calls of every task, hits and seconds saved.

SOURCE is a server's address, or a log file. Open the page in a browser.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from pathlib import Path
from typing import Any

from tvcache.commands import DEFAULT_URL, certificates_of, connection_flags, token_of
from tvcache.endpoint import HttpEndpoint
from tvcache.errors import TvcacheError, words_of
from tvcache.log import LogStore
from tvcache.show import duration, page, summary


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        default=DEFAULT_URL,
        metavar="SOURCE",
        help=f"address of a server, or a log file (default {DEFAULT_URL})",
    )
    add("--out", type=Path, default=Path("tvcache.html"), metavar="FILE", help="page to write (default tvcache.html)")
    add("--json", action="store_true", help="print the summary as JSON instead")
    connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    found = _summary(args)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    if args.out.exists() and args.out.resolve() == Path(args.source).resolve():
        raise TvcacheError(f"--out {args.out} is the log itself: choose another file")
    args.out.write_text(page(found), encoding="utf-8")
    print(
        f"{found['values']:,} values of {found['num_tasks']:,} tasks, {found['hits']:,} hits "
        f"({100 * found['hit_rate']:.0f} %), {duration(found['saved_s'])} of tool time saved"
    )
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _summary(args: argparse.Namespace) -> dict[str, Any]:
    if "://" not in args.source:
        path = Path(args.source)
        if not path.is_file():
            raise TvcacheError(f"{path}: no such log. Give a log file, or a server's address such as {DEFAULT_URL}")
        log = LogStore(path, read_only=True)
        try:
            return summary(log.records(), log.num_dropped, path.name)
        finally:
            log.close()
    endpoint = HttpEndpoint(args.source, token_of(args), certificates_of(args))
    try:
        status, _, data = endpoint.request("GET", "/v1/summary", None, 120.0)
        found: dict[str, Any] = json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise TvcacheError(f"no server at {args.source} ({words_of(error)}). Start one: tvcache serve") from None
    except ValueError:
        raise TvcacheError(
            f"{args.source} is not a server of tvcache: it did not answer JSON. Check the address"
        ) from None
    if status != 200:
        raise TvcacheError(f"{args.source} answered {status}: {found.get('error', '')}")
    return found
