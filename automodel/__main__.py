"""`python -m automodel` is the command `automodel`."""

from automodel.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
