"""A headless Chromium for tests, spoken to over a pipe: no client library.

The DevTools protocol: JSON messages that end in a zero byte, commands read
from file descriptor 3 of the browser and answers written to 4.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess

import pytest

_FLAGS = (
  "--headless=new",
  "--remote-debugging-pipe",
  "--no-sandbox",  # containers, and root, cannot have it
  "--disable-gpu",
  "--disable-dev-shm-usage",
  "--disable-background-networking",
  "--disable-component-update",
  "--no-first-run",
)
_PATIENCE = 120  # seconds, so that a browser that hangs fails its test


class Browser:
  """One page of a browser; `events` holds all that it told unasked."""

  def __init__(self, profile, *, width=1000, height=900):
    path = shutil.which("chromium")
    if path is None:
      pytest.fail(
        "this test opens a page in Chromium, and there is none on PATH; "
        "install Debian's package chromium (apt-get install chromium)."
      )
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Out of the way of 3 and 4, which bash then gives them.
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
    flags = [*_FLAGS, f"--user-data-dir={profile}"]
    flags.append(f"--window-size={width},{height}")
    self._process = subprocess.Popen(
      [
        "bash",
        "-c",
        f'exec "$@" 3<&{fds[0]} 4>&{fds[1]}',
        "bash",
        path,
        *flags,
      ],
      pass_fds=fds,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    for fd in (theirs_in, theirs_out, *fds):
      os.close(fd)
    self._write, self._read = (
      os.fdopen(ours_out, "wb"),
      os.fdopen(ours_in, "rb"),
    )
    self._count, self._rest, self._session = 0, b"", None
    self.events = []
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    self._session = self.call(
      "Target.attachToTarget", targetId=target, flatten=True
    )["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.call(f"{domain}.enable")

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._session = None
    try:
      self.call("Browser.close")
      self._process.wait(30)
    finally:
      self._process.kill()
      self._process.wait()
      self._write.close()
      self._read.close()

  def _message(self):
    while b"\0" not in self._rest:
      ready, _, _ = select.select([self._read], [], [], _PATIENCE)
      assert ready, f"Chromium has said nothing for {_PATIENCE} seconds"
      more = os.read(self._read.fileno(), 1 << 16)
      assert more, f"Chromium went away: {self._process.poll()}"
      self._rest += more
    message, self._rest = self._rest.split(b"\0", 1)
    return json.loads(message)

  def call(self, method, **params):
    """Sends a command and waits for its answer."""
    self._count += 1
    message = {"id": self._count, "method": method, "params": params}
    if self._session:
      message["sessionId"] = self._session
    self._write.write(json.dumps(message).encode() + b"\0")
    self._write.flush()
    while (answer := self._message()).get("id") != self._count:
      self.events.append(answer)
    assert "error" not in answer, (method, answer)
    return answer["result"]

  def open(self, path):
    """Opens a file and waits until it is loaded."""
    self.call("Page.navigate", url=path.as_uri())
    while not any(e["method"] == "Page.loadEventFired" for e in self.events):
      self.events.append(self._message())

  def value(self, expression):
    """The value of a JavaScript expression, two drawn frames later."""
    frames = "new Promise(r => requestAnimationFrame(() => "
    frames += "requestAnimationFrame(r)))"
    answer = self.call(
      "Runtime.evaluate",
      expression=f"{frames}.then(() => ({expression}))",
      awaitPromise=True,
      returnByValue=True,
    )
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  def _middle(self, expression):
    return self.value(
      f"(e => {{ e.scrollIntoView({{block: 'center'}});"
      " const b = e.getBoundingClientRect();"
      " return [b.x + b.width / 2, b.y + b.height / 2]})"
      f"({expression})"
    )

  def hover(self, expression, dx=0, dy=0):
    """Moves the mouse over an element, or beside its middle."""
    x, y = self._middle(expression)
    where = {"x": x + dx, "y": y + dy}
    self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)

  def click(self, expression):
    """Presses and releases the mouse on an element."""
    x, y = self._middle(expression)
    for kind in ("mousePressed", "mouseReleased"):
      self.call(
        "Input.dispatchMouseEvent",
        **{"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1},
      )

  def press(self, key):
    """A key, to whatever has the focus."""
    text = {"text": "\r"} if key == "Enter" else {}
    text |= {"text": " "} if key == " " else {}
    code = {"Enter": 13, " ": 32, "Tab": 9}.get(key, 0)
    for kind in ("keyDown", "keyUp"):
      self.call(
        "Input.dispatchKeyEvent",
        **{"type": kind, "key": key, "windowsVirtualKeyCode": code},
        **(text if kind == "keyDown" else {}),
      )

  def requests(self):
    """The addresses that the page asked for."""
    return [
      event["params"]["request"]["url"]
      for event in self.events
      if event["method"] == "Network.requestWillBeSent"
    ]

  def complaints(self):
    """What the page wrote to the console, and errors that nobody caught."""
    kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
    kinds.add("Log.entryAdded")
    return [event for event in self.events if event["method"] in kinds]
