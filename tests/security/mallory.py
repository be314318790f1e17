"""Preload of a device that lies: after `cleave_dask.runtime.device`, it changes what its worker says.

It claims ten times its speed, signs its tiles with another's name, pushes each tile twice and old ones again, and puts
pickles and other workers' keys into its stream. `MALLORY_MARKER` names what its pickles would make.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distributed import Worker
from distributed.protocol.serialize import ToPickle

from tests.security.attackers import Exploit


async def dask_setup(worker: Worker) -> None:
    exploit = Exploit(Path(os.environ["MALLORY_MARKER"]))
    facts = worker.startup_information["cleave"](worker)
    facts["flops"] *= 10
    send = worker.batched_stream.send
    pushes: list[dict[str, Any]] = []

    def lie(*messages: dict[str, Any]) -> None:
        for message in messages:
            if message.get("op") == "task-finished":
                message = {**message, "type": exploit.pickled, "metadata": ToPickle(exploit), "worker": "tls://x:1"}
                message["startstops"] = ({"action": "compute", "start": -1e308, "stop": 1e308},)
                run = str(message["key"][0]).removeprefix("parcel-")
                for key in (f"finish-{run}", (f"round-{run}", 0), (f"parcel-{run}", 0, 0)):
                    send({**message, "key": key})
            send(message)

    runtime: Any = worker.extensions["cleave"]
    call = runtime.pushing.call

    async def push(server: str, op: str, **fields: Any) -> Any:
        fields["device"] = "honest"
        fields["moved"] = {"down": "nothing", "up": (5e-324, 9e18), "flops": (1e-300, 1e6)}
        answer = await call(server, op, **fields)
        await call(server, op, **fields)
        pushes.append(fields)
        for old in pushes[:2]:
            await call(server, op, **old)
        return answer

    worker.batched_stream.send = lie  # type: ignore[method-assign]
    runtime.pushing.call = push
