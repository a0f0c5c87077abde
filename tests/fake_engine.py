"""An engine's Python that speaks the driver's protocol (`infer.served_driver`) and recites answers it was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -S
import json, pathlib, sys
place = pathlib.Path(__file__).parent.parent
if len(sys.argv) < 6:
    sys.exit(0)  # "is there an engine?"
orders = json.loads((place / "orders.json").read_text())
request = json.loads(pathlib.Path(sys.argv[-2]).read_text())
with (place / "requests.jsonl").open("a") as file:
    file.write(json.dumps(dict(request, python_options=sys.argv[1:3])) + chr(10))
print("a line of the engine's own")
print("first this\\nthen that: NUMA node is on fire", file=sys.stderr)
if request["speculative"] is not None:
    folder = pathlib.Path(request["speculative"]["model"])
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file(), folder
    if "dies" in orders:
        exec(orders["dies"])
side = "plain" if request["speculative"] is None else "drafted"
print("progress: " + str(len(request["prompts"])) + " prompts", flush=True)
result = dict(engine="fake 1.0", answers=orders[side])
pathlib.Path(sys.argv[-1]).write_text(json.dumps(result))
"""


def make_fake_engine(folder: Path, **orders: Any) -> Path:
    """An environment whose Python gives these answers. orders: plain, drafted (answers); dies: code to end with."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(_PROGRAM.replace("{python}", sys.executable))
    python.chmod(0o755)
    (folder / "orders.json").write_text(json.dumps(orders))
    return folder


def requests(folder: Path) -> list[dict[str, Any]]:
    """What the fake engine was asked, in order."""
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
