"""Training with BubbleTea in every worker: the same losses to the bit, and requests answered in its waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import httpx2 as httpx
import pytest
from prefill_samples import greedy_alone, whole
from serving import TINY

from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.launch.report.events import StepEvent
from atlas.launch.smoke import smoke_program
from atlas.runtime.assignment import FillerChoice, stand_in
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from bubbletea.costs import LayerTime
from bubbletea.serve.assemble import assemble
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.http import HttpServer
from bubbletea.serve.run import ListenSettings, run
from bubbletea.serve.worker_windows import of_training

MS = 1_000_000
PROGRAM = with_optimizer(one_f_one_b(Layout(2, 2, 4, ("us-east", "us-west"))))
MIN_STEPS, MAX_STEPS = 6, 2_000
"""Training runs until every worker has prefilled and a request was answered. How many steps that takes depends on how
busy the host is; the first three steps are always without prefill."""
CLIENTS = 3
"""More than one lane can answer at a time, so every lane is used."""
DEVICES = ["paced", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class _EnoughError(Exception):
    """Ends a training run from `on_step`."""


class InThread(AbstractContextManager[object]):
    """A training run whose workers use the service; ends when `is_enough()`, or after MAX_STEPS."""

    def __init__(self, address: str, token_file: str, device: str, is_enough: Callable[[], bool]) -> None:
        self.losses: list[float] = []
        names = [PROGRAM.worker_name(w) for w in range(PROGRAM.num_workers)]
        filler = FillerChoice("bubbletea", {"address": address, "token_file": token_file})
        setup = EmulationSettings(MAX_STEPS, device=device, fillers=dict.fromkeys(names, filler))

        def on_step(event: StepEvent, timeline: Timeline) -> None:
            self.losses.append(event["loss"])
            if len(self.losses) >= MIN_STEPS and is_enough():
                raise _EnoughError

        def train() -> None:
            with contextlib.suppress(_EnoughError):
                emulate(PROGRAM, smoke_program()[1], stand_in(), setup, on_step=on_step)

        self.thread = threading.Thread(target=train, daemon=True)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join(120)


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_in_the_waits_changes_no_loss(device: str) -> None:
    predicted = simulate(repeated(PROGRAM, 4), smoke_program()[1])
    pace = LayerTime(10 * MS, 0.0, 0.0, 0.0) if device == "paced" else None
    windows = of_training(predicted, TINY.arena_bytes, pace, 10 * MS)
    assert all(windows.window_of), "every worker has windows and knows at which op"
    parts = assemble(replace(TINY, budget=0.05), windows, ApiKeys.open_to_all())
    made, texts = list[InThread](), list[str]()
    pids: dict[int, int] = {}
    """Of the processes that prefilled for the first worker: answers before each."""
    names = {PROGRAM.worker_name(w) for w in range(PROGRAM.num_workers)}
    # A GPU is so quick that one lane may answer every request.
    least_used = len(names) if device == "paced" else 2

    def used() -> set[str]:
        registry = parts.service.metrics.registry
        labels = [{"model_name": "tiny", "worker": worker} for worker in names]
        return {one["worker"] for one in labels if registry.get_sample_value("bubbletea:slices_total", one)}

    def is_enough() -> bool:
        return bool(texts) and len(used()) >= least_used and parts.dispatcher.planner.forecast.learner.seen > 2

    def is_back() -> bool:
        """The first time, kills a process that prefills for a paced worker; then, whether it was started again and
        another request was answered since."""
        if not is_enough():
            return False
        if device != "paced":
            return True
        member = parts.connections.members.get(0)
        if member is None or not member.ready:
            return False
        if not pids:
            os.kill(member.pid, signal.SIGKILL)
        if member.pid not in pids:
            pids[member.pid] = len(texts)
        return len(pids) == 2 and len(texts) > pids[member.pid]

    def workers(address: str, token_file: str) -> InThread:
        made.append(InThread(address, token_file, device, is_back))
        return made[0]

    def ask(server: HttpServer) -> None:
        """Prompts until training is over."""
        url = f"http://127.0.0.1:{server.port}"
        prompt = list(range(100))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        while made[0].thread.is_alive():
            if parts.dispatcher.planner.num_lanes < 2:
                time.sleep(0.1)
                continue
            try:
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            except httpx.ConnectError:
                made[0].thread.join()  # the service closes when training is over
                return
            if answer.status_code == 200:
                texts.append(answer.json()["choices"][0]["text"])
            else:
                time.sleep(0.1)

    def end(server: HttpServer) -> None:
        """With training: what is not answered then has no worker to wait for."""
        made[0].thread.join()
        server.drain()

    def on_start(server: HttpServer) -> None:
        for what in (*[ask] * CLIENTS, end):
            threading.Thread(target=what, args=(server,), daemon=True).start()

    asyncio.run(run(parts, ListenSettings(port=0, drain_s=1), workers, on_start))
    filled = made[0].losses
    plain = emulate(PROGRAM, smoke_program()[1], stand_in(), EmulationSettings(len(filled), device=device))
    assert filled == plain.losses
    assert is_enough(), f"after {len(filled)} steps: {len(texts)} answers, prefill on {used()}"
    assert device != "paced" or (len(pids) == 2 and len(texts) > max(pids.values())), (
        f"after {len(filled)} steps and {len(texts)} answers, a lane was not back: {pids}"
    )
    expected = parts.service.text.decode(greedy_alone(whole(TINY.served), list(range(100)), 4))
    assert set(texts) == {expected}
