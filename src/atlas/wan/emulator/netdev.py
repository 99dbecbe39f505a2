"""Network namespaces and TUN devices by system call: needs no `ip`, no `unshare` and no daemon. Both exist as long as
their descriptors are open, so nothing is left behind, even after a crash. Linux only; knows nothing of paths.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from atlas.errors import AtlasError

# From <sched.h>, <linux/if.h>, <linux/if_tun.h>, <linux/sockios.h> and <linux/rtnetlink.h>.
CLONE_NEWNET = 0x40000000
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR, IFF_UP = 0x1, 0x1000, 0x4000, 0x1
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x1, 0x2, 0x4
SIOCADDRT, SIOCSIFFLAGS, SIOCGIFFLAGS, SIOCSIFADDR = 0x890B, 0x8914, 0x8913, 0x8916
SIOCSIFMTU = 0x8922
RTM_NEWLINK, IFLA_TXQLEN, NLM_F_REQUEST_ACK = 16, 13, 0x5
VNET_HDR_BYTES = 10
"""Of `struct virtio_net_hdr` before each packet."""
QUEUE_PACKETS = 20_000
"""Transmit queue of the device: long enough that no burst of a sender is dropped before the forwarder reads it."""
DEVICE, MTU_BYTES = "wan0", 1500
"""Name and MTU of the TUN device in each namespace."""
FALLBACK = "Run it as root or inside `unshare --user --map-root-user --net`, or use the proxy grade"
_LIBC = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


class Namespace(NamedTuple):
    """Descriptors of a network namespace and of the TUN device in it. Closing both removes them."""

    fd: int
    tun_fd: int


def make_namespace(address: str, *, gso: bool, sysctls: Mapping[str, str]) -> Namespace:
    """Makes a namespace whose only device is a TUN device with this address. The calling thread does not enter it."""
    return in_thread(lambda: _make_here(address, gso=gso, sysctls=sysctls))


def in_thread(call: Callable[[], T], namespace_fd: int | None = None) -> T:
    """Calls it in a new thread, in a namespace: sockets and processes that it makes belong to the namespace."""
    with ThreadPoolExecutor(1) as pool:
        if namespace_fd is not None:
            pool.submit(enter, namespace_fd).result()
        return pool.submit(call).result()


def enter(namespace_fd: int) -> None:
    """Moves the calling thread to a namespace, with everything that it starts."""
    if _LIBC.setns(namespace_fd, CLONE_NEWNET):
        raise _refused("enter a network namespace")


def _make_here(address: str, *, gso: bool, sysctls: Mapping[str, str]) -> Namespace:
    if _LIBC.unshare(CLONE_NEWNET):
        raise _refused("make a network namespace")
    tun_fd = _open_tun(gso=gso)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            _set(sock, SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), MTU_BYTES))
            _set_queue(QUEUE_PACKETS)
            packed = socket.inet_aton(address)
            _set(sock, SIOCSIFADDR, struct.pack("16sHH4s16x", DEVICE.encode(), socket.AF_INET, 0, packed))
            for device in ("lo", DEVICE):
                flags = struct.unpack_from(
                    "H", fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16s24x", device.encode())), 16
                )
                _set(sock, SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags[0] | IFF_UP))
            _add_default_route(sock)
        for name, value in sysctls.items():
            _write_sysctl(name, value)
        return Namespace(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC), tun_fd)
    except BaseException:
        os.close(tun_fd)
        raise


def _open_tun(*, gso: bool) -> int:
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AtlasError(
            f"/dev/net/tun: {error.strerror}: the namespace emulator needs a TUN device. {FALLBACK}"
        ) from None
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", VNET_HDR_BYTES))
        fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 if gso else 0)
    except OSError as error:
        os.close(fd)
        raise _refused("set up a TUN device", error.errno) from None
    return fd


def _set_queue(num_packets: int) -> None:
    """Uses netlink: the ioctl needs rights over the whole machine, which a user namespace does not have."""
    link = struct.pack("BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(DEVICE), 0, 0)
    body = link + struct.pack("HHI", 8, IFLA_TXQLEN, num_packets)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.send(struct.pack("IHHII", 16 + len(body), RTM_NEWLINK, NLM_F_REQUEST_ACK, 1, 0) + body)
        (code,) = struct.unpack_from("i", sock.recv(4096), 16)
    if code:
        raise _refused("set the queue of a device", -code)


def _add_default_route(sock: socket.socket) -> None:
    """Routes everything to the device (`struct rtentry` of <linux/route.h>)."""
    anywhere = struct.pack("HH4s8x", socket.AF_INET, 0, bytes(4))
    name = ctypes.create_string_buffer(DEVICE.encode())
    entry = struct.pack(
        "@L16s16s16sHhLPhPLLH", 0, anywhere, anywhere, anywhere, 1, 0, 0, 0, 0, ctypes.addressof(name), 0, 0, 0
    )
    _set(sock, SIOCADDRT, entry + bytes(16))


def _write_sysctl(name: str, value: str) -> None:
    path = Path("/proc/sys/net/ipv4") / name
    try:
        path.write_text(value)
    except OSError as error:
        raise AtlasError(f"{path} = {value!r}: {error.strerror}. Set no sysctls, or mount /proc/sys writable") from None


def _set(sock: socket.socket, request: int, argument: bytes) -> None:
    try:
        fcntl.ioctl(sock, request, argument)
    except OSError as error:
        raise _refused(f"configure a device (ioctl {request:#x})", error.errno) from None


def _refused(what: str, code: int | None = None) -> AtlasError:
    code = ctypes.get_errno() if code is None else code
    name = errno.errorcode.get(code, str(code))
    return AtlasError(f"the kernel refused to {what} ({name}): {os.strerror(code)}. {FALLBACK}")
