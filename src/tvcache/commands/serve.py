"""Serve a cache over HTTP.

It listens on this machine only, unless --host is another address; then every request needs a token (--token-file or
$TVCACHE_TOKEN), and --cert and --key enable HTTPS. Values are written to the log before they are acknowledged, so a
restarted server has them all. With --peer it also copies the values of other servers, in the background.
http://127.0.0.1:8765/ shows the tree of calls, /metrics the Prometheus metrics.
"""

from __future__ import annotations

import argparse
import gc
import logging
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

from tvcache.commands import certificates_of, connection_flags, number, token_of
from tvcache.endpoint import Certificates, HttpEndpoint, is_loopback
from tvcache.errors import TvcacheError
from tvcache.log import LogStore
from tvcache.peers import Peers

PORT = 8765
"""Unless --port gives another one."""
BACKLOG = 1024
"""Connections that wait to be accepted. The kernel may allow fewer."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=number(0, 65535, "a port"), default=PORT, metavar="N", help=f"port (default {PORT}; 0: any)")
    add(
        "--log",
        type=Path,
        default=Path("tvcache.log"),
        metavar="FILE",
        help="file that keeps the values (default ./tvcache.log)",
    )
    add("--fsync", action="store_true", help="values also survive a power failure (slower stores)")
    add(
        "--lease",
        type=number(1, 3600),
        default=10.0,
        metavar="S",
        help="if the client that runs a call dies, others wait this many seconds (default 10)",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="address of a server at another site; may be repeated",
    )
    connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from tvcache.server import CacheServer
    except ImportError as error:
        raise TvcacheError(f"`tvcache serve` needs {error.name}: pip install 'atlas-bubbletea[tvcache]'") from None
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    token, certificates = token_of(args), certificates_of(args)
    if not is_loopback(args.host):
        if not token:
            raise TvcacheError(
                f"--host {args.host} can be reached from other machines, so a token is needed: "
                "`openssl rand -hex 24 > token`, then --token-file token"
            )
        if certificates.cert is None:
            print("tvcache: without --cert and --key the token is sent unencrypted", file=sys.stderr)
    peers = Peers([HttpEndpoint(url, token, certificates) for url in args.peer])
    log = LogStore(args.log, fsync=args.fsync)
    gc.collect()
    gc.freeze()  # the garbage collector would stop the server for 100 ms to scan millions of long-lived entries
    try:
        listener = _listener(args.host, int(args.port))
    except BaseException:
        log.close()
        raise
    server = CacheServer(log, token, args.lease, peers)
    scheme = "http" if certificates.cert is None else "https"
    print(f"tvcache: {scheme}://{args.host}:{listener.getsockname()[1]}, {len(log):,} values in {args.log}", flush=True)
    config = uvicorn.Config(
        server.app(),
        http=server.protocol(),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        **_tls(certificates),
    )
    uvicorn.Server(config).run([listener])
    return 0


def _tls(certificates: Certificates) -> dict[str, Any]:
    """With --ca, only clients with a certificate of that authority are accepted."""
    if certificates.cert is None:
        return {}
    found: dict[str, Any] = {"ssl_certfile": str(certificates.cert), "ssl_keyfile": str(certificates.key)}
    if certificates.ca is not None:
        found |= {"ssl_ca_certs": str(certificates.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return found


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise TvcacheError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port"
        ) from None
