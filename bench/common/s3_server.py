"""An S3 service on loopback, by `moto` (pip install 'moto[s3]' flask flask-cors). It keeps objects in memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

BUCKET = "atlas"


def missing() -> list[str]:
    """Packages without which there is no S3 here."""
    needed = ("obstore", "moto", "flask", "flask_cors")
    return [name for name in needed if importlib.util.find_spec(name) is None]


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment in which `s3://atlas` is this server's bucket."""
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = iter(server.stderr)
            url = next(found[0] for line in said if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
            urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30).close()
            keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
            yield {**os.environ, **keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        finally:
            server.kill()
            drain.wait()
