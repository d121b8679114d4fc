"""One rank of a task: `python -m support.worker TASK JSON`. See `support.launch`."""

from __future__ import annotations

import importlib
import json
import os
import sys

from support.launch import MARK


def main() -> None:
    """Run the task and print its value."""
    task, options = sys.argv[1:]
    value = importlib.import_module(f"support.{task}").run(json.loads(options))
    print(f"\n{MARK}{json.dumps(value)}", flush=True)
    # What a library has left running (threads, process groups) must not keep the measurement waiting.
    os._exit(0)


if __name__ == "__main__":
    main()
