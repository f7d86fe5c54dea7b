"""`python -m gati` is the `gati` command."""

from gati.cli import main

if __name__ == "__main__":
    main()
