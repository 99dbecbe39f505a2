"""TCP of a stock Linux kernel: its largest buffers, and the window that they give one connection."""

STOCK_RMEM_BYTES, STOCK_WMEM_BYTES = 6 << 20, 4 << 20
"""The largest receive and send buffer, the last figures of `net.ipv4.tcp_rmem` and `tcp_wmem`."""
WINDOW_BYTES = 3_000_000
"""What one connection carries per round trip with them, measured at 20 to 80 ms: the default of cluster files and of
the emulator. The papers' 1220 / 600 / 396 / 293 Mbit/s at 10 / 20 / 30 / 40 ms are about the same over the round
trip."""
