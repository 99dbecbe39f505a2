"""What each rank of a tensor-parallel group holds of a parameter, and of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from atlas.errors import WorkerError
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.tensor_parallel.group import ParameterShards, place_of
from atlas.runtime.tensor_parallel.leader import Followers

FOLLOWER = """
import io, os, sys
from types import SimpleNamespace
from atlas.runtime.tensor_parallel import follower

class Stages:
    def __init__(self, *args):
        self.task = self.group = None

    def __del__(self):
        os.abort()

def group(*args):
    group = Stages()
    raise RuntimeError("not connected")

follower.make_device = lambda device: SimpleNamespace(place="cpu")
follower.TensorGroup, follower.ShardedStageSet = group if sys.argv[1] == "no group" else lambda *args: None, Stages
assignment = SimpleNamespace(role=None, nccl_on_shared_gpu=False, device="cpu", tp=2, patience_s=1.0, save=None)
follower.follow(assignment, 1, None, io.StringIO(sys.argv[1]), sys.stdout)
"""
"""A follower whose process group aborts the process when it is destroyed."""


class Placed:
    """All that is asked of a sharded parameter."""

    def __init__(self, *placements: object) -> None:
        self.placements = placements


PARAMETERS = {"rows": Placed(Shard(0)), "columns": Placed(Shard(1)), "norm": Placed(Replicate()), "bias": Placed()}


def shares(rank: int) -> ParameterShards:
    return ParameterShards(rank, 2, PARAMETERS.items())  # type: ignore[arg-type]


def test_parts_make_the_whole() -> None:
    whole = torch.arange(16.0).view(4, 4)
    assert torch.equal(shares(1).of("rows", whole), whole[2:])
    assert torch.equal(shares(1).of("columns", whole), whole[:, 2:])
    for name in ("norm", "bias"):
        assert torch.equal(shares(1).of(name, whole), whole)
    for name in PARAMETERS:
        assert torch.equal(shares(0).join(name, [shares(rank).of(name, whole) for rank in range(2)]), whole)


def test_a_saved_layer_is_sharded_with_its_optimizer_state() -> None:
    whole = torch.arange(16.0).view(4, 4)
    state = LayerState({"rows": whole, "elsewhere": whole}, {"rows": {"exp_avg": whole + 1, "step": torch.tensor(3.0)}})
    mine = shares(1).of_state(state)
    assert torch.equal(mine.parameters["rows"], whole[2:])
    assert torch.equal(mine.parameters["elsewhere"], whole), "of another worker"
    assert torch.equal(mine.optimizer["rows"]["exp_avg"], whole[2:] + 1)
    assert mine.optimizer["rows"]["step"] == 3.0, "a scalar belongs to all"


def test_gpus_of_a_group_are_neighbours() -> None:
    assert place_of("cuda:4", 3) == "cuda:7"
    assert place_of("paced", 3) == "paced"


def test_the_error_of_a_leader_whose_follower_has_died_is_in_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    followers = Followers.__new__(Followers)
    followers._error, followers._has_error = WorkerError("rank 1 was killed"), threading.Event()
    followers._has_error.set()
    with pytest.raises(WorkerError, match="rank 1 was killed"), followers.explaining():
        raise RuntimeError("connection closed by peer")
    assert "connection closed by peer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("order", "code", "reply"),
    [
        ("", 0, ""),
        ('{"call": "end"}', 0, ""),
        ('{"call": "fly", "stage": null, "args": [], "kwargs": {}}', 1, "fly"),
        ("no group", 1, "not connected"),
    ],
)
def test_a_follower_destroys_nothing_before_it_ends(order: str, code: int, reply: str) -> None:
    ended = subprocess.run([sys.executable, "-c", FOLLOWER, order], capture_output=True, text=True)
    assert (ended.returncode, reply in ended.stdout) == (code, True), ended.stderr
