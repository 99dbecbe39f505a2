"""The learnt model of a path: a small GRU estimates cross traffic from what a sender saw in windows of 0.1 s, through
the packet cell, which is differentiable without a loop over packets. torch is needed for fitting only; the result is a
`PathModel` like any other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from atlas.weather.fit import learn, require_usable
from atlas.weather.packets import PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel

HIDDEN, EPOCHS, RATE = 16, 60, 0.02
"""Width of the GRU, passes over the table, and learning rate."""
MAX_PACKETS = 250_000
"""Of a longer table the newest are fitted."""
QUANTILES = (0.1, 0.5, 0.9)
"""Of the pinball loss."""
LEAST_PRIOR, MOST_PRIOR = 1e-3, 0.995
"""Bounds of the conservation estimate before its logit is taken."""
HUBER_MS = 5.0
"""From this error of a packet's delay on, the loss grows linearly."""
WINDOW_WEIGHT, LOST_WEIGHT, PRIOR_WEIGHT, SCALE_WEIGHT = 0.3, 0.5, 20.0, 100.0
"""Of the parts of the loss, beside 1 for packets' delays in ms: the pinball loss of windows, the cross-entropy of lost
packets, the distance to the conservation estimate, and that to the base model's capacity and delay. Unchanged
since the network was written; it is not the default (docs/weather.md)."""
BUFFER_UNIT = 0.1
"""Of the buffer: the unit in which the pressure on it enters the cross-entropy."""
IDLE_DELAY = 0.02
"""Of the buffer: a shorter delay counts as an idle queue."""


class CrossTraffic(nn.Module):
    """Window features -> share of the capacity that cross traffic takes, beside the conservation estimate."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gru = nn.GRU(num_features, HIDDEN, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * HIDDEN, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor, prior: Tensor) -> Tensor:
        hidden, _ = self.gru(features[None])
        return torch.sigmoid(torch.logit(prior.clamp(LEAST_PRIOR, MOST_PRIOR)) + self.out(hidden)[0, :, 0])


def fit_gru(table: PacketTable, epochs: int = EPOCHS) -> PathModel:
    """The default model with its cross traffic and capacity fitted to packets' delays, on one core."""
    require_usable(table)
    base = learn(table, "pairs").model
    if base.capacity_is_bound:
        return base
    first = int(np.searchsorted(table.sent_ns, base.start_ns))  # after a route change the model starts later
    table = table.part(max(first, len(table.sent_ns) - MAX_PACKETS), len(table.sent_ns))
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _fitted(table, base, epochs)
    finally:
        torch.set_num_threads(threads)


def _fitted(table: PacketTable, base: PathModel, epochs: int) -> PathModel:
    arrived = ~table.lost
    window = (table.sent_ns - base.start_ns) // WINDOW_NS
    cell = _PacketCell(table, base, window)
    features = torch.tensor(_features(table, base, window), dtype=torch.float32)
    prior = torch.tensor(base.cross_bps / base.capacity_bps, dtype=torch.float32)
    known = torch.tensor(base.known)
    net = CrossTraffic(features.shape[1])
    scale = nn.Parameter(torch.zeros(2))
    steps = torch.optim.Adam([*net.parameters(), scale], lr=RATE)
    true = torch.tensor((table.rtt_ns[arrived] - base.rtt_ns) / 1e6, dtype=torch.float32)
    seen = torch.tensor(window[arrived])
    best, kept = float("inf"), (prior.clone(), scale.detach().clone())
    for _ in range(epochs):
        share = net(features, prior)
        delay, pressure = cell(share, scale)
        loss = nn.functional.huber_loss(delay[arrived], true, delta=HUBER_MS)
        loss = loss + WINDOW_WEIGHT * _pinball(delay[arrived], true, seen, len(prior))
        loss = loss + LOST_WEIGHT * nn.functional.binary_cross_entropy_with_logits(
            pressure, torch.tensor(table.lost, dtype=torch.float32)
        )
        loss = loss + PRIOR_WEIGHT * ((share - prior)[known] ** 2).mean() + SCALE_WEIGHT * (scale**2).mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        if (now := float(loss.detach())) < best:
            best, kept = now, (share.detach().clone(), scale.detach().clone())
    share, scale_found = kept
    capacity = base.capacity_bps * float(torch.exp(scale_found[0]))
    cross = share.numpy().astype(np.float64) * capacity
    found = {"capacity_bps": capacity, "cross_bps": cross, "method": "gru"}
    return PathModel(**{**vars(base), **found})


class _PacketCell:
    """Delays of all packets at once: q = S - min(0, cummin S) over S = cumsum(x), without the upper clip."""

    def __init__(self, table: PacketTable, base: PathModel, window: np.ndarray) -> None:
        self.base = base
        gap = np.diff(table.sent_ns, prepend=table.sent_ns[0])
        size = np.where(table.lost, 0, table.num_bytes)
        before = np.concatenate([[0], size[:-1]])
        self.gap_ms = torch.tensor(gap / 1e6, dtype=torch.float64)
        self.before_ms = torch.tensor(before * 8e3 / base.capacity_bps, dtype=torch.float64)
        self.own_ms = torch.tensor(table.num_bytes * 8e3 / base.capacity_bps, dtype=torch.float64)
        self.window = torch.tensor(window)
        self.deep_ms = base.buffer_bytes * 8e3 / base.capacity_bps

    def __call__(self, share: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(queueing delay in ms, how far beyond the buffer, in BUFFER_UNIT of it). Work is in ms of the link."""
        slower = torch.exp(-scale[0]).double()
        inflow = (share.double()[self.window] - 1.0) * self.gap_ms
        total = torch.cumsum(self.before_ms * slower + inflow, 0)
        queue = total - torch.clamp(torch.cummin(total, 0).values, max=0.0)
        delay = queue + self.own_ms * slower + scale[1].double()
        return delay.float(), ((delay - self.deep_ms) / (BUFFER_UNIT * self.deep_ms)).float()


def _pinball(found: Tensor, true: Tensor, window: Tensor, num: int) -> Tensor:
    """Of the mean delay of each window, against quantiles of what was seen."""
    count = torch.zeros(num).index_add_(0, window, torch.ones_like(true)).clamp(min=1)
    means = [torch.zeros(num).index_add_(0, window, values) / count for values in (found, true)]
    off = means[1] - means[0]
    return sum(torch.maximum(q * off, (q - 1) * off).mean() for q in QUANTILES) / len(QUANTILES)  # type: ignore[return-value]


def _features(table: PacketTable, base: PathModel, window: np.ndarray) -> np.ndarray:
    """[window, feature]: bytes sent, acknowledged, lost; least, mean, largest delay; idle share; hour; conservation."""
    num, arrived = len(base.cross_bps), ~table.lost
    full = base.capacity_bps * WINDOW_NS / 8e9
    deep_ns = base.buffer_bytes * 8e9 / base.capacity_bps
    delay = (table.rtt_ns[arrived] - base.rtt_ns) / deep_ns
    acked = np.minimum((table.sent_ns + table.rtt_ns - base.start_ns)[arrived] // WINDOW_NS, num - 1)
    least, most = np.full(num, 1.0), np.zeros(num)
    np.minimum.at(least, window[arrived], delay)
    np.maximum.at(most, window[arrived], delay)
    count = np.maximum(1, np.bincount(window[arrived], minlength=num))
    mean = np.bincount(window[arrived], delay, minlength=num) / count
    idle = np.bincount(window[arrived], delay < IDLE_DELAY, minlength=num) / count
    hour = (base.start_ns / 3.6e12 + np.arange(num) * WINDOW_NS / 3.6e12) % 24 / 24
    sent = np.bincount(window, table.num_bytes, minlength=num) / full
    lost = np.bincount(window, table.lost * table.num_bytes, minlength=num) / full
    carried = np.bincount(acked, table.num_bytes[arrived], minlength=num) / full
    columns = (sent, carried, lost, least, mean, most, idle, hour, base.cross_bps / base.capacity_bps, base.known)
    return np.stack([np.asarray(column, np.float64) for column in columns], 1)
