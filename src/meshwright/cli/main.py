"""The console script: as little as possible before an interrupt is caught."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit: 0 success, 1 what was checked does not hold or a run failed,
    2 wrong input, 130 interrupted. Errors are one line on stderr."""
    try:
        # Imported here, so that Ctrl-C during the imports is as quiet as any other.
        from meshwright.cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
