"""Training under constant churn, for as long as you like: every run must give the calm run's losses, bit for bit.

    python benchmarks/soak.py [--minutes 60] [--devices 6] [--every 1.2] [--seed 0]

Real processes are killed, stopped, slowed and started again, `--every` seconds on average. One device is left alone, so
that there is always somebody. Prints a line for each run of twelve steps; exits with 1 at the first loss that differs.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from time import monotonic

import psutil
import torch
from distributed import Client

from benchmarks.models import Llama
from cleave_dask.fleet.churn import Churn
from cleave_dask.fleet.devices import Fleet
from cleave_dask.formatting import duration
from cleave_dask.planning.planner import plan
from cleave_dask.runtime.cluster import facts_of
from cleave_dask.runtime.trainer import Trainer
from cleave_dask.simulation.local import LocalFleet

STEPS = 12
LLAMA = Llama(hidden=64, intermediate=176, layers=2, heads=4, vocabulary=128, batch=8, length=32)


def train(client: Client) -> list[float]:
    """Losses of a short run on a fixed grid."""
    module = LLAMA.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    with Trainer(module, optimizer, client, plan=partial(plan, min_flops=0, grid=(2, 2, 2))) as trainer:
        for step in range(STEPS):
            losses.append(trainer.step(**LLAMA.tokens(step)))
    return losses


def main() -> int:
    """Run until the time is up; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--every", type=float, default=1.2, help="seconds between two mishaps, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = 60 * options.minutes
    with LocalFleet(options.devices) as fleet, fleet.get_client() as client:
        calm = train(client)
        victims = Fleet(fleet.fleet.server, fleet.fleet.devices[1:])
        rate = 3600 / (options.every * len(victims))
        churn = Churn.sample(victims, rate, options.seed, seconds=seconds, away=2.0)
        start, runs = monotonic(), 0
        with fleet.under(churn) as happened:
            while monotonic() - start < seconds:
                losses = train(client)
                runs += 1
                resident = psutil.Process(fleet.server_pid).memory_info().rss
                told = ", ".join(f"{count} {kind}" for kind, count in happened.items())
                facts = facts_of(client)
                print(
                    f"{duration(monotonic() - start)}: {runs} runs equal so far; {told}; "
                    f"{facts['handovers']} handovers; server {resident / 1e6:.0f} MB",
                    flush=True,
                )
                if losses != calm:
                    print(f"run {runs} differs:\n{losses}\n{calm}", file=sys.stderr)
                    return 1
    print(f"{runs} runs of {STEPS} steps, all equal to the calm one, through {happened['leave']} kills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
