"""`python -m cleave_dask` is `cleave`."""

from cleave_dask.cli import main

if __name__ == "__main__":
    main()
