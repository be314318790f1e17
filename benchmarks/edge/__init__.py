"""One model, one batch, one seed on shaped links: this package beside its peers. `python -m benchmarks.edge`.

Its modules:

    settings    which devices, links and model
    rows        what is measured of a system on a setting; the JSON file
    timing      steps by the clock and by the counters of interfaces
    processes   processes in namespaces, which end with their block
    ours        cleave_dask: LocalFleet, Trainer; where a step's time goes
    peers       the other systems from outside: one process per device; rank is such a process, and what it computes is
                in data (DDP, FSDP), tensor (DTensor), pipeline (GPipe, 1F1B, data x pipeline), volunteers (hivemind)
    stock       the gemms of the same step as plain dask arrays
    systems     all of them by name
    report      tables, plot, the section of docs/results.md
"""
