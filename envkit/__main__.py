"""Entry point of ``envkit`` and ``python -m envkit``."""


def main() -> None:
    """Run the command line. An interrupt during the imports shows no traceback."""
    try:
        from envkit.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
