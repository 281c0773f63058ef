"""A headless Chromium, driven over its own debugging pipe: opens a page at any width and says what a reader would see.

Needs a Chromium on the path and nothing else: the protocol is JSON, ended by a zero byte, on descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
ALL_FIGURES = "document.documentElement.dataset.drawn === 'all'"
"""When a page of `coterie.report.page` is drawn."""
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_DRAWN = """new Promise(done => {
  const painted = () => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
  const wait = () => (CONDITION) ? painted() : setTimeout(wait, 10);
  wait();
})"""
_SHOWN = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def find_browser() -> str | None:
    """Where a Chromium is, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Opened:
    """A page that has been drawn.

    Attributes:
        shown_ms: from the start of navigation until something could be read, milliseconds.
        drawn_ms: the same to the first frame in which everything is drawn.
        errors: what its scripts threw, and what it wrote to the console as errors or warnings.
    """

    shown_ms: float
    drawn_ms: float
    errors: list[str]
    _browser: Browser
    _session: str

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._browser.evaluate(self._session, expression)

    def screenshot(self, path: Path) -> None:
        """A picture of the whole page, .png."""
        size = self._browser.call("Page.getLayoutMetrics", self._session)["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._browser.call("Page.captureScreenshot", self._session, clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@dataclass
class Browser:
    """A running browser; see `headless`.

    Attributes:
        timeout: seconds that any one answer may take.
    """

    timeout: float
    _to: int
    _from: int
    _sent: int = 0
    _rest: bytes = b""
    _events: list[dict[str, Any]] = field(default_factory=list)

    def open(
        self, path: Path, width: int = 1280, height: int = 900, phone: bool = False, drawn: str = "true"
    ) -> Opened:
        """A file in a tab of its own, this wide, as phones do with `phone`; `drawn`: JavaScript that says when."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        self.call("Emulation.setDeviceMetricsOverride", session, width=width, height=height,
                  deviceScaleFactor=2 if phone else 1, mobile=phone)  # fmt: skip
        self._events.clear()
        self.call("Page.navigate", session, url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        drawn_ms = float(self.evaluate(session, _DRAWN.replace("CONDITION", drawn)))
        shown_ms = float(self.evaluate(session, _SHOWN))
        return Opened(
            shown_ms, drawn_ms, [said for event in self._events if (said := _complaint(event))], self, session
        )

    def evaluate(self, session: str, expression: str) -> Any:
        """The value of an expression in a tab, awaited."""
        answer = self.call("Runtime.evaluate", session, expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come in between are kept."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._sent:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + self.timeout
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            got = os.read(self._from, 1 << 20) if ready else b""
            if not got:
                raise TimeoutError(f"the browser {'ended' if ready else f'said nothing for {self.timeout:g} s'}")
            self._rest += got
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))


@contextmanager
def headless(browser: str, timeout: float = 60) -> Iterator[Browser]:
    """A browser with a new profile, ended at the end."""
    to_child, to_us = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(to_child[0]), str(to_us[1]), browser, *_QUIET,
             f"--user-data-dir={profile}"],
            pass_fds=(to_child[0], to_us[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child[0])
        os.close(to_us[1])
        try:
            yield Browser(timeout, to_child[1], to_us[0])
        finally:
            os.close(to_child[1])  # which it takes as its end
            os.close(to_us[0])
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _complaint(event: dict[str, Any]) -> str | None:
    """What an event says went wrong, if it does."""
    params = event.get("params", {})
    if event["method"] == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        return str(details.get("exception", {}).get("description", details["text"]))
    if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        return " ".join(str(each.get("value", each.get("description"))) for each in params["args"])
    if event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        return str(params["entry"]["text"])
    return None
