"""How keys and values reached a decode engine before workers listened themselves: all of them through one process, on
its event loop, with a hash at each of the four ends. Kept as a reference for `bench/handoff_parts.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

_HEAD = struct.Struct("!II")
BLOCK_BYTES = 8 << 20


def digest(payload: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(payload).hexdigest()[:32]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


async def _frame(reader: asyncio.StreamReader) -> tuple[dict[str, object], bytes]:
    num_fields, num_payload = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return json.loads(await reader.readexactly(num_fields)), await reader.readexactly(num_payload)


def _packed(fields: dict[str, object], payload: memoryview | bytes) -> bytes:
    text = json.dumps(fields).encode()
    return _HEAD.pack(len(text), len(payload)) + text


class OneProcess:
    """Workers `put` blocks of layers; an engine gets all of them with `get`."""

    def __init__(self, shape: Sequence[int], num_layers: int) -> None:
        """`shape`: [2, K, tokens, E] of a layer, in bfloat16."""
        self.slabs = [torch.empty(*shape, dtype=torch.bfloat16) for _ in range(num_layers)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                fields, payload = await _frame(reader)
                if fields["what"] == "put":
                    self._put(fields, payload)
                elif fields["what"] == "sync":
                    writer.write(_packed({"what": "done"}, b""))
                else:
                    await self._send_all(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _put(self, fields: dict[str, object], payload: bytes) -> None:
        assert digest(payload) == fields["digest"]
        slab = self.slabs[int(str(fields["layer"]))]
        slab.copy_(torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(slab.shape))

    async def _send_all(self, writer: asyncio.StreamWriter) -> None:
        for layer, slab in enumerate(self.slabs):
            step = max(1, BLOCK_BYTES * slab.shape[2] // (slab.numel() * 2))
            for at in range(0, slab.shape[2], step):
                payload = _bytes(slab[:, :, at : at + step])
                writer.write(_packed({"what": "kv", "layer": layer, "digest": digest(payload)}, payload))
                writer.write(payload)
                await writer.drain()
        writer.write(_packed({"what": "done"}, b""))


def exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = sock.recv_into(view[done:])
        if not got:
            raise ConnectionError("closed")
        done += got
    return data


def put_all(address: tuple[str, int], layers: dict[int, Tensor]) -> None:
    """A worker's part; returns when the other side has it."""
    with socket.create_connection(address) as sock:
        for layer, kv in layers.items():
            payload = _bytes(kv)
            sock.sendall(_packed({"what": "put", "layer": layer, "digest": digest(payload)}, payload))
            sock.sendall(payload)
        sock.sendall(_packed({"what": "sync"}, b""))
        exactly(sock, _HEAD.size)


def get_all(address: tuple[str, int], shape: Sequence[int]) -> dict[int, Tensor]:
    """The engine's side."""
    found = dict[int, list[Tensor]]()
    with socket.create_connection(address) as sock:
        sock.sendall(_packed({"what": "get"}, b""))
        while True:
            num_fields, num_payload = _HEAD.unpack(exactly(sock, _HEAD.size))
            fields, payload = json.loads(exactly(sock, num_fields)), exactly(sock, num_payload)
            if fields["what"] == "done":
                break
            assert digest(payload) == fields["digest"]
            kv = torch.frombuffer(payload, dtype=torch.bfloat16).view(2, shape[1], -1, shape[3])
            found.setdefault(fields["layer"], []).append(kv)
    return {layer: some[0] if len(some) == 1 else torch.cat(some, dim=2) for layer, some in found.items()}
