"""`python -m megatron_dynapipe` is the same as `megatron-dynapipe`."""

from megatron_dynapipe.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
