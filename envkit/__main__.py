"""``python -m envkit`` is the command line."""

from envkit.cli import main

if __name__ == "__main__":
    main()
