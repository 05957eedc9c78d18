"""Entry point of ``envkit`` and ``python -m envkit``."""


def main() -> None:
    """Run the command line. Ctrl-C while modules are imported ends it without a traceback."""
    try:
        from envkit.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
