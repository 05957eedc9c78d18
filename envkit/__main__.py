"""Where the program ``envkit`` begins, which is ``python -m envkit`` too."""


def main() -> None:
    """Run the command line; who stops the program while that is still loaded sees no traceback."""
    try:
        from envkit.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
