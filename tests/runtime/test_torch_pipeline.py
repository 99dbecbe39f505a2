"""The example for users of torch's own pipelining: same losses by either backend, and by an order of ours."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from free_ports import free_port

from atlas.errors import AtlasError
from atlas.ir.program import Layout, Program
from atlas.ir.text import from_text, to_torch_csv
from atlas.schedules.classic import gpipe, interleaved
from atlas.wan.emulator.netdev import make_namespace

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps", "2", "--microbatches", "4", "--microbatch", "4", "--width", "32"]
SPLIT = from_text("""# atlas program 1
name: split
pipelines: 1
stages: 2
microbatches: 4
datacenters: east west

p0.s0 @east: 0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3
p0.s1 @west: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
""")
TIMEOUT_S = 60.0


RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch.distributed.pipelining", "atlas.runtime.process_group"])
"""Imports them once: they take seconds, and there are six ranks."""


def run(*words: str) -> list[str]:
    """The output of the last of two ranks, each on loopback."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(2)]
        ranks = [RANKS.Process(target=_rank, args=(rank, port, words, outputs[rank])) for rank in range(2)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(TIMEOUT_S)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        assert [process.exitcode for process in ranks] == [0, 0], [output.read_text() for output in outputs]
        return outputs[1].read_text().splitlines()


def _rank(rank: int, port: int, words: tuple[str, ...], output: Path) -> None:
    """The example as torchrun starts it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    example = EXAMPLES / "torch_pipeline.py"
    sys.argv = [str(example), *SMALL, *words]
    with output.open("w") as sys.stdout:
        sys.stderr = sys.stdout
        runpy.run_path(str(example), run_name="__main__")


def losses(lines: list[str]) -> list[str]:
    found = [re.fullmatch(r"step \d+  loss (\S+)  iteration \S+ ms", line) for line in lines]
    return [match[1] for match in found if match]


@pytest.fixture(scope="module")
def by_gloo() -> list[str]:
    found = losses(run("--backend", "gloo"))
    assert len(found) == 2
    return found


def test_the_backends_name_changes_no_loss(by_gloo: list[str]) -> None:
    said = run("--backend", "atlas")
    assert losses(said) == by_gloo
    assert re.fullmatch(r"atlas: median iteration [\d.]+ ms", said[-1])


@pytest.mark.gpu
def test_tensors_of_a_gpu_travel_too(by_gloo: list[str]) -> None:
    found = losses(run("--backend", "atlas", "--device", "cuda:0"))
    assert [float(loss) for loss in found] == pytest.approx([float(loss) for loss in by_gloo], rel=1e-5)


def test_torch_runs_an_order_of_ours(by_gloo: list[str], tmp_path: Path) -> None:
    """With backwards split in two, which torch does not choose by itself."""
    path = tmp_path / "order.csv"
    path.write_text(to_torch_csv(SPLIT))
    assert losses(run("--backend", "atlas", "--csv", str(path))) == by_gloo


@pytest.mark.parametrize(
    "program",
    [gpipe(Layout(2, 4, 6, ("a", "b", "c", "d"))), interleaved(Layout(1, 4, 6, ("a", "b")))],
    ids=["several pipelines", "interleaved"],
)
def test_torchs_own_reader_takes_our_csv(program: Program, tmp_path: Path) -> None:
    """`_load_csv` checks the order and adds torch's sends and receives; only the group is left out."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path = tmp_path / "order.csv"
    path.write_text(to_torch_csv(program))
    runtime = object.__new__(_PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = program.num_ranks, program.num_stages, 6
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == dict(enumerate(program.stage_rank))
    order = {
        rank: [str(action) for action in actions if str(action)[1] in "FB"]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    assert order == {rank: [str(op) for op in program.ops(rank)] for rank in range(program.num_ranks)}
    assert "0SEND_F0" in map(str, runtime.pipeline_order_with_comms[0])


def _may_make_namespaces() -> bool:
    try:
        namespace = make_namespace("10.99.0.1", gso=True, sysctls={})
    except AtlasError:
        return False
    os.close(namespace.fd)
    os.close(namespace.tun_fd)
    return True


@pytest.mark.slow
@pytest.mark.skipif(not _may_make_namespaces(), reason="network namespaces and TUN need root")
def test_between_two_emulated_datacenters_it_is_faster_by_the_name_alone() -> None:
    """A path on which one connection gets a quarter of what there is."""
    command = [sys.executable, str(EXAMPLES / "torch_pipeline_wan.py"), "--steps", "4", "--width", "512"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    ratio = re.search(r"over atlas: ([\d.]+) times as fast", found.stdout)
    assert ratio, found.stdout
    assert float(ratio[1]) > 1.2, found.stdout
