"""Open the live page of a run in a browser: map, links, timelines of the last iterations, figures, events, and
what-if.

    atlas ui runs/NAME            a current or a saved run (`atlas train --ui` writes the folder)
    atlas ui run.timeline         a timeline file alone
    atlas ui job.yaml             a job or plan that is not running: its prediction, and what-if
    atlas ui http://HOST:PORT     the page of another host, shown here

Serves on 127.0.0.1. On another address the page needs the token that is printed with it.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from atlas.console import remark, secret_in
from atlas.errors import AtlasError

AT = "127.0.0.1:0"
"""Any free port of this machine."""
MAX_TOKEN_LENGTH = 200


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN|URL", help="a run's folder, a timeline, a job or plan file, or a page's address")
    add("--at", default=AT, metavar="[HOST:]PORT", help="where to serve it (default: any port of 127.0.0.1)")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="require the token in this file (default: none on loopback, a new one elsewhere)",
    )


def run(args: argparse.Namespace) -> int:
    from atlas.ui.serve import ServedPage  # the planner: 0.4 s
    from atlas.ui.server import page_address  # 0.4 s

    host, port = page_address(args.at, "--at")
    with ServedPage(args.run, host, port, token_of(args.token_file)) as page:
        remark(f"the page is at {page.url} (Ctrl-C ends it)")
        threading.Event().wait()
    return 0


def token_of(file: Path | None) -> str:
    """The token in a file; "" without one."""
    if file is None:
        return ""
    token = secret_in(file, "--token-file")
    if not token or not token.isascii() or any(c in token for c in ' ;,"\\') or len(token) > MAX_TOKEN_LENGTH:
        raise AtlasError(
            f"--token-file {file}: must have one line of up to {MAX_TOKEN_LENGTH} letters and digits. Write a new one"
        )
    return token
