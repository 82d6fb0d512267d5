"""`python -m service`: the same as `runahead`."""

from service.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
