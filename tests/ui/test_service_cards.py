"""Figures of a service beside training, on the page of the run."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from ui_samples import saved_run

from atlas.ui.run_files import announced_service
from atlas.ui.serve import ServedPage
from atlas.ui.service import ServiceFollower

TEXT = """# HELP s:wait_seconds of requests
s:wait_seconds_sum{model="a"} 3.0
s:wait_seconds_count{model="a"} 4
s:queue 2
s:ratio 0.25
s:tokens_total{worker="0"} 10
s:tokens_total{worker="1"} 20
broken line
"""
CARDS = [
    {"label": "wait", "unit": "s", "kind": "mean", "series": "s:wait_seconds"},
    {"label": "queue", "kind": "value", "series": "s:queue"},
    {"label": "filled", "unit": "%", "scale": 100, "series": "s:ratio"},
    {"label": "rate", "kind": "rate", "series": "s:tokens_total"},
    {"label": "none", "series": "s:unknown"},
]


def test_cards_are_read_from_metrics() -> None:
    follower = ServiceFollower({"metrics": "http://x", "cards": CARDS})
    assert [card["value"] for card in follower.cards(TEXT, 1.0)] == [0.75, 2, 25, None, None]
    later = TEXT.replace('_sum{model="a"} 3.0', '_sum{model="a"} 5.0').replace(
        'count{model="a"} 4', 'count{model="a"} 5'
    )
    later = later.replace('worker="1"} 20', 'worker="1"} 40')
    assert [card["value"] for card in follower.cards(later, 3.0)][:4] == [2.0, 2, 25, 10]


def test_a_service_is_on_the_page_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas.ui.serve.SERVICE_S", 0.02)

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    saved_run(tmp_path, 1)
    with HTTPServer(("127.0.0.1", 0), Metrics) as server, ServedPage(str(tmp_path)) as page:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def shown(wanted: bool) -> None:
            seen = -1
            while (page.run.state()["service"] is not None) != wanted:
                seen = page.run.wait(seen, 10)

        with announced_service(tmp_path, {"metrics": f"http://127.0.0.1:{server.server_port}/m", "cards": CARDS}):
            shown(True)
            assert page.run.state()["service"][1] == {"label": "queue", "unit": "", "value": 2}
        shown(False)
        server.shutdown()


def test_the_cards_of_bubbletea_name_series_that_it_has() -> None:
    page = pytest.importorskip("bubbletea.serve.page", reason="needs the extra `serve`")
    metrics = pytest.importorskip("bubbletea.serve.metrics", reason="needs the extra `serve`").ServiceMetrics("m")
    metrics.first_token_s.observe(0.2)
    found = ServiceFollower({"metrics": "http://x", "cards": page.CARDS})
    text = metrics.text().decode()
    found.cards(text, 0.0)
    assert [card["value"] for card in found.cards(text, 1.0)] == [0.2, 0.0, 0.0, 0.0]
