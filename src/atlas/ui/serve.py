"""Serves the page of a run until it is closed: follower, what-if and HTTP server put together.

with ServedPage(source, host, port) as page: ...        a run's folder, a timeline, a job or plan file, or a URL
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from atlas.addresses import LOOPBACK, is_loopback
from atlas.errors import AtlasError
from atlas.lifetime import Closing
from atlas.spec.plan import load_job_or_plan
from atlas.ui.live_run import LiveRun
from atlas.ui.remote import RemoteFollower
from atlas.ui.run_files import FACTS, JOB, FolderFollower, PageFacts, read_service
from atlas.ui.run_model import RunModel
from atlas.ui.server import PageServer, PostHandler
from atlas.ui.service import ServiceFollower
from atlas.ui.whatif import WhatIfDesk
from atlas.view.page import asset, empty_header, filled, json_element, page_script

POLL_S, SERVICE_S = 1.0, 1.0
"""Between two looks at a run, and at its service. Each look analyses the last pass and takes CPU time."""
TOKEN_BYTES = 24
"""Random bytes of a token that is made here: 192 bits."""


class ServedPage(Closing):
    """The page of one run. `url` is what a browser opens, with the token where there is one."""

    def __init__(self, source: str, host: str = LOOPBACK, port: int = 0, token: str = "") -> None:
        self.run = LiveRun()
        self._desk: WhatIfDesk | None = None
        self._desk_lock, self._closed = threading.Lock(), threading.Event()
        self._no_question, self._num_questions = threading.Condition(), 0
        self._file = source
        self._remote: RemoteFollower | None = None
        follower: FolderFollower | None = None
        if source.startswith(("http://", "https://")):
            self._remote = RemoteFollower(source, self.run)
            self._remote.start()
        else:
            follower = self._follower(Path(source))
        token = token or ("" if is_loopback(host) else secrets.token_urlsafe(TOKEN_BYTES))
        self.server = PageServer(self.run, page_html, self._answers(), host, port, token)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server.port}/" + (f"?token={token}" if token else "")
        if follower is None and self._remote is None:
            threading.Thread(target=self._search, daemon=True, name="search").start()
        if follower is not None:
            threading.Thread(target=self._follow, args=(follower,), daemon=True, name="run files").start()
        if follower is not None and Path(source).is_dir():
            threading.Thread(target=self._serve_cards, args=(Path(source),), daemon=True, name="service cards").start()

    def _follower(self, path: Path) -> FolderFollower | None:
        """None for a job or plan file: it is shown as it is simulated."""
        if path.suffix in (".yaml", ".yml") and path.is_file():
            job, plan = load_job_or_plan(path)
            schedule = plan.schedule.name if plan is not None else "atlas"
            tcp = plan.schedule.tcp if plan is not None else "many"
            self.run.begin(job.name, asdict(PageFacts(job.name, schedule, tcp)), job)
            return None
        follower = FolderFollower(path, self.run)
        if path.is_dir():
            self._file = str(path / JOB)
        follower.poll()
        return follower

    def close(self) -> None:
        self._closed.set()
        if self._remote is not None:
            self._remote.close()
        self.server.close()

    # ---- threads -----------------------------------------------------------------------------------------------------
    def _follow(self, follower: FolderFollower) -> None:
        while not self._closed.wait(POLL_S):
            try:
                follower.poll()
            except AtlasError as error:
                self.run.add(events=[{"kind": "warning", "text": str(error), "time": time.time()}])
                return

    def _search(self) -> None:
        """A job is shown at once in the order that it would start with, then in the one of `atlas simulate`."""

        def pause() -> None:
            """A user's question goes first: threads share one interpreter."""
            with self._no_question:
                self._no_question.wait_for(lambda: not self._num_questions)

        model = self.run.search(pause)
        with self._desk_lock:
            if model is not None and self._desk is not None:
                self._desk.set_now(model)

    def _serve_cards(self, folder: Path) -> None:
        """Services come and go beside training."""
        service = ServiceFollower({})
        while not self._closed.wait(SERVICE_S):
            facts = read_service(folder)
            if facts.get("metrics", "") != service.url:
                service = ServiceFollower(facts)
            self.run.set_service(service.poll() if service.url else None)

    # ---- what-if -----------------------------------------------------------------------------------------------------
    def _answers(self) -> dict[str, PostHandler]:
        paths = {"sliders": "sliders", "quick": "quick", "search": "search", "job": "job_file"}
        return {f"/api/whatif/{path}": partial(self._answer, name) for path, name in paths.items()}

    def _answer(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._count_question(1)
        try:
            found: dict[str, Any] = getattr(self._desk_of(), name)(body)
        finally:
            self._count_question(-1)
        return found

    def _count_question(self, change: int) -> None:
        with self._no_question:
            self._num_questions += change
            self._no_question.notify_all()

    def _desk_of(self) -> WhatIfDesk:
        """Made when it is first asked for."""
        with self._desk_lock:
            if self._desk is None:
                model: RunModel | None = self.run.model
                if model is None:
                    raise AtlasError(f"what-if needs the job of the run: there is no {JOB} beside {FACTS}")
                self._desk = WhatIfDesk(model, self._file)
            return self._desk


@cache
def page_html() -> str:
    """The page as text; its data comes from the API."""
    own = "atlas.ui"
    parts = {
        "STYLE": asset("page.css") + asset("mapsvg.css") + asset("live.css", own),
        "HEADER": json_element(empty_header("Atlas")),
        "SCRIPT": page_script() + asset("live.js", own) + asset("whatif.js", own),
    }
    return filled(asset("live.html", own), parts)
