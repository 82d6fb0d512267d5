"""`python -m runahead`: the same as the command `runahead`."""

from runahead.service.main import main

if __name__ == "__main__":
    raise SystemExit(main())
