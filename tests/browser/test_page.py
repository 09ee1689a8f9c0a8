"""The page at `/` in a real browser, over a real service: what it shows follows what happens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium import Browser, installed

from meshwright.control.api import page

needs_browser = pytest.mark.skipif(not installed(), reason="there is no chromium here")

FOLDER = Path(page.__file__).parent.parent / "page"
JOB: dict[str, Any] = {
    "job": {"name": "curve", "steps": 100_000},
    "model": {"preset": "tiny"},
    "data": {"source": "python-stdlib", "seq_len": 32, "global_batch": 1},
    "cluster": {"ref": "local:1"},
    "checkpoint": {"every": 100_000},
}


class Service:
    """A process of `meshwright up`."""

    def __init__(self, home: Path) -> None:
        command = [sys.executable, "-m", "meshwright.cli.main", "up", "--home", str(home)]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        lines = iter(self.process.stdout.readline, "")
        said = ""
        for line in lines:
            said += line
            if line.startswith("}"):
                break
        self.url = str(json.loads(said)["url"])

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, f"{self.url}/v1{path}", json=body, timeout=30)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def cluster(self, name: str) -> None:
        words = {"engine": "simulated", "nodes": 2, "spares": 0}
        self.ask("POST", "/clusters", {"name": name, **words})

    def close(self) -> None:
        """Stop all jobs, so that nothing of them goes on, and the service."""
        if self.process.poll() is None:
            for job in self.ask("GET", "/jobs")["items"]:
                if job["status"] not in ("SUCCEEDED", "STOPPED", "FAILED"):
                    self.ask("POST", f"/jobs/{job['id']}/stop")
                    _until_ended(self, job["id"])
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        assert self.process.stdout
        self.process.stdout.close()


def _until_ended(service: Service, job: str) -> None:
    with httpx.stream(
        "GET", f"{service.url}/v1/events/stream?after=0&job={job}", timeout=30
    ) as told:
        for line in told.iter_lines():
            if line.startswith("data: "):
                status = json.loads(line[6:])["data"].get("status")
                if status in ("SUCCEEDED", "STOPPED", "FAILED"):
                    return


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    found = Service(tmp_path_factory.mktemp("service"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def browser(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        found.look(1440, 1000)
        found.open(f"{service.url}/")
        found.wait("document.querySelector('#line')?.dataset.state === 'live'")
        yield found
        assert not found.complaints


@pytest.fixture(scope="module")
def lab(service: Service, browser: Browser) -> Browser:
    """The page, with a cluster `lab` that is ready."""
    service.cluster("lab")
    browser.ask("location.hash = '#cluster=lab'")
    ready = "document.querySelector('#cluster-title').textContent === 'lab'"
    browser.wait(f"{ready} && {cell('0.0')} === 'idle'", 60)
    return browser


def cell(place: str) -> str:
    return f"document.querySelector('#nodes .cell[data-key=\"{place}\"]')?.dataset.look"


@needs_browser
def test_a_cluster_appears_and_its_chips_change_colour(service: Service, browser: Browser) -> None:
    browser.ask("window.same = true")
    service.cluster("fresh")
    browser.wait("document.querySelector('#cluster-list').textContent.includes('fresh')")
    browser.ask("location.hash = '#cluster=fresh'")
    browser.wait("document.querySelectorAll('#nodes .cell').length === 32")
    browser.wait("document.querySelector('#cluster-title').textContent === 'fresh'")
    browser.wait(f"{cell('1.1')} === 'idle'")
    service.ask("POST", "/clusters/fresh/nodes/1/action", {"action": "drain"})
    browser.wait(f"{cell('1.1')} === 'drained' && {cell('0.0')} === 'idle'")
    label = browser.ask("document.querySelector('.cell[data-key=\"1.1\"]').ariaLabel")
    assert label == "fresh-1 chip 1: drained"
    service.ask("POST", "/clusters/fresh/faults", {"kind": "chip_dead", "node": 0, "chip": 1})
    browser.wait(f"{cell('0.1')} === 'failed'")
    browser.wait(
        "document.querySelector('#cluster-facts').textContent.includes('31 of 32 healthy')"
    )
    assert browser.ask("window.same"), "the page was loaded anew"


@needs_browser
def test_a_loss_curve_grows(service: Service, lab: Browser) -> None:
    browser = lab
    job = service.ask("POST", "/jobs", {"cluster": "lab", "job": JOB})["id"]
    browser.ask(f"location.hash = '#cluster=lab&job={job}'")
    points = "Number(document.querySelector('#job-curve svg')?.dataset.points ?? 0)"
    first = browser.wait(points, 60)
    browser.wait(f"{points} > {first} + 5", 60)
    browser.wait(f"{cell('0.0')} === 'busy'")
    browser.wait("document.querySelectorAll('#job-rows svg').length === 1")
    # Why one waits is said, too.
    all_chips = JOB | {"job": {"name": "waits", "steps": 5}, "cluster": {"ref": "local:32"}}
    all_chips |= {"layout": {"dp_replicate": 32}, "data": JOB["data"] | {"global_batch": 32}}
    waits = service.ask("POST", "/jobs", {"cluster": "lab", "job": all_chips})["id"]
    browser.ask(f"location.hash = '#cluster=lab&job={waits}'")
    browser.wait("document.querySelector('#job-message').textContent.includes('needs 32 chips')")
    service.ask("POST", f"/jobs/{waits}/stop")
    browser.wait("document.querySelector('#job-status').dataset.status === 'STOPPED'")


@needs_browser
def test_keys_reach_the_chips(lab: Browser) -> None:
    browser = lab
    browser.ask("document.querySelector('#nodes .cell[tabindex=\"0\"]').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    assert browser.ask("document.activeElement.dataset.key") == "1.1"
    browser.ask("document.activeElement.click()")
    browser.wait("document.querySelector('#chip-title').textContent === 'lab-1 chip 1'")
    assert "chip=1.1" in browser.ask("location.hash")


@needs_browser
def test_it_fits_a_phone(lab: Browser) -> None:
    browser = lab
    browser.look(360, 800, "dark")
    assert browser.wait("document.documentElement.scrollWidth <= 360 ? 'fits' : ''") == "fits"
    browser.look(1440, 1000)


@needs_browser
def test_it_says_since_when_nothing_answers(tmp_path: Path) -> None:
    own = Service(tmp_path / "home")
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{own.url}/")
        browser.wait("document.querySelector('#line')?.dataset.state === 'live'")
        own.process.kill()
        own.process.communicate(timeout=10)
        browser.wait("document.querySelector('#line').dataset.state === 'no answer'")
        first = browser.ask("document.querySelector('#line-since').textContent")
        assert re.fullmatch(r"since \d+ s", first)
        browser.wait(f"document.querySelector('#line-since').textContent !== '{first}'")


def test_files_are_asked_for_anew_and_kept_apart_from_others(service: Service) -> None:
    first = httpx.get(f"{service.url}/")
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["content-security-policy"].startswith("default-src 'self';")
    again = httpx.get(f"{service.url}/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{service.url}/page/..%2Fviews.py").status_code == 404
    assert httpx.get(f"{service.url}/page/none.js").status_code == 404
    for name in re.findall(r'(?:src|href)="(/page/[^"]+)"', first.text):
        assert httpx.get(service.url + name).status_code == 200, name


def test_names_are_never_markup() -> None:
    for path in FOLDER.glob("*.js"):
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text()
        )
        assert not found, f"{path.name}: {found}"
    assert "<script>" not in (FOLDER / "index.html").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    blocks = re.findall(r":root \{(.*?)\}", (FOLDER / "page.css").read_text(), re.S)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[scheme == "dark"]))
    inks = [(name, name.removesuffix("-ink")) for name in colours if name.endswith("-ink")]
    text = [("ink", "ground"), ("ink", "panel"), ("soft", "ground"), ("soft", "panel")]
    for ink, ground in (*inks, *text, ("accent", "panel")):
        assert _contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    # Of cells to what they stand on (WCAG 1.4.11).
    edges = {"idle-edge", "busy", "failed", "unknown", "drained"}
    edges |= {"degraded"} if scheme == "dark" else {"degraded-edge"}
    for name in edges:
        assert _contrast(colours[name], colours["panel"]) >= 3, name


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
