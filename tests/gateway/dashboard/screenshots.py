"""Makes the pictures of docs/dashboard.md: a real fleet on simulated GPUs, with work, a sick device and dead letters.

    python -m tests.gateway.dashboard.screenshots

Needs chromium. Takes two minutes, for the charts of the last hour.
"""

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import multigpu
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.gateway.conftest import GatewayProcess
from tests.gateway.dashboard.test_browser import FLAGS
from tests.gateway.openai_api.conftest import minilm

OUT = Path(__file__).resolve().parents[3] / "docs" / "images" / "dashboard"
WORK_S = 100.0


def work(address: str, stop: threading.Event) -> None:
    """Interactive calls and a night's batch, until `stop`."""
    with multigpu.Client(address) as client:
        client.submit_many("sleep", [b"0.2"] * 4000, queue="night", priority=5)
        while not stop.wait(0.05):
            client.embed(["A cat sat on the mat.", "The feline rested."], model="all-MiniLM-L6-v2", priority=1)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="dashboard-"))
    gpus = SimulatedGpus(folder / "gpus", n=4)
    for number in range(4):
        gpus.power(number, 180.0 + 60 * number, 700.0)
        gpus.use(number, 0.35 + 0.1 * number)
        gpus.heat(number, 48 + 4 * number)
    flags = ["--models", f"all-MiniLM-L6-v2={minilm()}", "--threads", "1"]
    stop = threading.Event()
    with (
        Fleet(folder, workers=0, env=gpus.env(), handlers=["trial_handlers"], worker_flags=flags) as fleet,
        GatewayProcess(folder, fleet.address) as gateway,
    ):
        for number in range(4):
            fleet.start_worker(f"gpu-host-1-{number}", "--device", f"cuda:{number}")
        fleet.wait_for_workers()
        worker = threading.Thread(target=work, args=(fleet.address, stop))
        worker.start()
        with fleet.client() as client:
            for _ in range(3):
                client.submit("fail", b"", queue="reports", attempts_max=2, priority=2)
            again = client.submit("fail", b"", queue="reports", attempts_max=3, backoff_initial_s=1.0, priority=1)
        time.sleep(WORK_S / 2)
        gpus.ecc(3, uncorrected=1)
        gpus.xid(3, 48)
        time.sleep(WORK_S / 2)
        again_id = again.id
        until(lambda: fleet.stats().dead_lettered >= 4)
        pages = {
            "fleet": "/", "device": "/ui/devices/gpu-host-1-3", "queues": "/ui/queues",
            "tasks": "/ui/tasks?state=leased", "task": f"/ui/tasks/{again_id}",
            "dead-letters": "/ui/dead-letters", "models": "/ui/models", "usage": "/ui/usage",
        }  # fmt: skip
        take(gateway.url, pages)
        stop.set()
        worker.join()
    shutil.rmtree(folder)


def take(url: str, pages: dict[str, str]) -> None:
    chromium = shutil.which("chromium")
    assert chromium is not None, "apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, path in pages.items():
            scheme: Any = "dark" if name == "device" else "light"
            page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
            page.goto(url + path)
            page.wait_for_timeout(2500)
            target = OUT / f"{name}.png"
            page.screenshot(path=target, full_page=name != "tasks")
            Image.open(target).convert("RGB").quantize(64).save(target, optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
