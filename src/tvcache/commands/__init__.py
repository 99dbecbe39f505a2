"""The commands of `tvcache`, one module each, and the flags that several share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from tvcache.endpoint import Certificates
from tvcache.errors import TvcacheError

TOKEN_VARIABLE = "TVCACHE_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8765"


def connection_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"a file with the token (default: the value of ${TOKEN_VARIABLE})",
    )
    add("--ca", type=Path, metavar="PEM", help="CA that signed the certificates of the other hosts")
    add("--cert", type=Path, metavar="PEM", help="certificate of this host")
    add("--key", type=Path, metavar="PEM", help="private key of --cert")


def token_of(args: argparse.Namespace) -> str:
    """The token, never from the command line, where other users of the machine could see it."""
    if args.token_file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        found = args.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise TvcacheError(f"{args.token_file}: {error.strerror or error}. Check --token-file") from None
    if not found:
        raise TvcacheError(f"{args.token_file} is empty: write a token into it, for instance by `openssl rand -hex 24`")
    return str(found)


def certificates_of(args: argparse.Namespace) -> Certificates:
    if (args.cert is None) != (args.key is None):
        raise TvcacheError("--cert and --key belong together: give both or neither")
    for path in (args.ca, args.cert, args.key):
        if path is not None and not path.is_file():
            raise TvcacheError(f"{path}: no such file. Give a PEM file")
    return Certificates(args.ca, args.cert, args.key)


def number(low: float, high: float, name: str = "a number") -> Callable[[str], float]:
    """A type for argparse."""

    def value_of(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} from {low:g} to {high:g}")
        return value

    return value_of
