"""The entry of every child: dies with its parent, then runs the role that it was started for."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback

from bench.litmus.processes import Channel, die_with_parent


def main() -> None:
    """Runs ``bench.litmus.<module>.<function>``; an error is sent to the parent as ``{"error": ...}``."""
    role, passed, config = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    die_with_parent(config["parent"])
    channel = Channel(socket.socket(fileno=passed[0]))
    module, _, function = role.partition(".")
    try:
        getattr(importlib.import_module(f"bench.litmus.{module}"), function)(channel, config, passed[1:])
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
        channel.send({"error": traceback.format_exc(limit=-3)})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no library's exit handlers: some of them synchronise with the device


if __name__ == "__main__":
    main()
