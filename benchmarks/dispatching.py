"""What a parcel costs the dispatcher, from ready to done, on small and on large fleets.

    python benchmarks/dispatching.py [--devices 8 1000 8000] [--json out.json]

A fleet of devices whose speeds differ up to fourfold works through levels of parcels that are planned evenly, so that
the quick ones idle and offer to help; one device in ten takes twenty times as long as its figures say, one in fifty
stops for good. Time is virtual, only the CPU is real: each finished parcel is followed by a look at what can be sent,
every 0.2 s by signs of life and a look at who is late, as in the scheduler's plugin.
"""

from __future__ import annotations

import argparse
import json
import random
from heapq import heappop, heappush
from pathlib import Path
from time import process_time

from rich.console import Console
from rich.table import Table

from cleave_dask.planning.dispatch import Dispatcher
from cleave_dask.planning.parcels import Figures, Work

WINDOW = 3
TICK = 0.2
PARCELS = 24_000


def run(devices: int, least: int = PARCELS, seed: int = 0) -> dict[str, float]:
    """One fleet's row of the table."""
    chance = random.Random(seed)
    dispatcher = Dispatcher(WINDOW)
    names = [f"device-{number}" for number in range(devices)]
    speed = {name: chance.uniform(1e9, 4e9) for name in names}
    factor = {name: chance.choice([20.0] + [1.0] * 9) for name in names}
    stopped = {name for name in names[1:] if chance.random() < 0.02}
    for name in names:
        dispatcher.device_joined(name, Figures(speed[name], 1e8, 1e8, 1e-3), 0.0)
    work = Work(flops=1e9)
    events: list[tuple[float, int, int, str]] = []  # (when it ends, number, parcel, who has it)
    free_at = dict.fromkeys(names, 0.0)
    spent = ticking = now = 0.0
    todo: set[int] = set()
    count = ticks = parcels = 0

    def sent(parcel: int, device: str) -> None:
        nonlocal count
        count += 1
        free_at[device] = max(free_at[device], now) + factor[device] * 1e9 / speed[device]
        if device not in stopped:
            heappush(events, (free_at[device], count, parcel, device))

    def ready(parcel: int, start: float) -> None:
        device = dispatcher.parcel_ready(parcel, parcel, names[parcel % devices], work, now)
        nonlocal spent
        spent += process_time() - start
        if device is not None:
            sent(parcel, device)

    def settle() -> None:
        nonlocal spent
        start = process_time()
        placed = dispatcher.settle(now)
        spent += process_time() - start
        for parcel, device in placed:
            sent(parcel, device)

    next_tick = TICK
    while parcels < least or todo:
        if not todo:  # the next level
            level = range(parcels, parcels + max(4 * devices, least // 4))
            parcels, todo = level.stop, set(level)
            for parcel in level:
                ready(parcel, process_time())
            settle()
        if events and events[0][0] <= next_tick:
            now, _, parcel, device = heappop(events)
            if parcel in todo and dispatcher.holder(parcel) == device:
                start = process_time()
                dispatcher.parcel_ended(parcel, now)
                spent += process_time() - start
                todo.discard(parcel)
                settle()
            continue
        now, next_tick, ticks = next_tick, next_tick + TICK, ticks + 1
        start = process_time()
        for name in names:
            if name not in stopped:
                dispatcher.device_heard(name, now)
        late = dispatcher.tick(now)
        ticking += process_time() - start
        for handover in late:
            ready(handover.parcel, process_time())
        settle()
    return {
        "devices": devices,
        "parcels": parcels,
        "us_per_parcel": 1e6 * spent / parcels,
        "ticks": ticks,
        "ms_per_tick": 1e3 * ticking / max(ticks, 1),
    }


def main() -> None:
    """Print the table; with --json write it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 1000, 8000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [run(devices) for devices in options.devices]
    table = Table(title="CPU of the dispatcher")
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
