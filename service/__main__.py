"""`python -m runahead.service`: the same as `runahead`."""

from runahead.service.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
