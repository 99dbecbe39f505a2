"""Cells: every byte arrives, in turn order, and slices of a broken path are sent on the others."""

from __future__ import annotations

import itertools
import os
import time

import pytest
from cells import joined_cells

from atlas.wan.cell_relay.relay import hops_of
from atlas.wan.transport.base import Key

pytestmark = pytest.mark.filterwarnings("error")


def test_paths_go_through_every_node_and_no_name_comes_twice_in_a_row() -> None:
    pairs = {"e/0": "w/0", "e/1": "w/1"}
    assert hops_of("e/0", "w/0", pairs) == [("e/0", "w/0"), ("e/0", "e/1", "w/1", "w/0")]
    assert hops_of("e/1", "w/0", pairs) == [("e/1", "w/1", "w/0"), ("e/1", "e/0", "w/0")]


def test_nodes_of_a_cell_send_each_others_slices() -> None:
    with joined_cells(2, [40e6, 40e6]) as (here, there, _):
        data = [os.urandom(2 << 20) for _ in range(2)]
        end = time.monotonic() + 90
        for round in itertools.count():
            gets = [there[i].recv(Key(f"dc1/{i}", 0, (round, i, 0, 0))) for i in range(2)]
            began_ns = time.monotonic_ns()
            sends = [here[i].send(Key(f"dc2/{i}", 0, (round, i, 0, 0)), data[i], turn=2 * round + i) for i in range(2)]
            assert [get.wait(60) for get in gets] == data
            for send in sends:
                send.wait(60)
            first_ns, last_ns = (get.end_ns - began_ns for get in gets)
            if first_ns < 0.85 * last_ns:  # sent alone, each over its own path, both take as long
                break
            assert time.monotonic() < end, (first_ns, last_ns)  # a busy host gets more rounds
        assert all(path.delivered_bytes > 0.2 * (2 << 20) for path in here[0].paths("dc2/0"))


def test_slices_of_a_cut_path_are_sent_on_the_others() -> None:
    with joined_cells(3, [40e6] * 3) as (here, there, net):
        data = os.urandom(3 << 20)
        got = there[0].recv(Key("dc1/0"))
        sent = here[0].send(Key("dc2/0"), data)
        time.sleep(0.15)
        net.cut("dc1/1", "dc2/1", refuse=True)
        assert got.wait(60) == data
        sent.wait(60)


def test_messages_without_a_receive_are_staged_within_bounds() -> None:
    with joined_cells(2, [200e6] * 2) as (here, there, _):
        data = os.urandom(500_000)
        for i in range(4):
            here[1].send(Key("dc2/0", 0, (i, 0, 0, 0)), data, turn=i).wait(60)
        for i in range(4):
            assert there[0].recv(Key("dc1/1", 0, (i, 0, 0, 0))).wait(60) == data
