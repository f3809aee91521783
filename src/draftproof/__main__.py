"""The program `draftproof`; `python -m draftproof` for whoever starts programs by module (`accelerate launch -m draftproof train …`)."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .cli import run  # the commands' modules take a moment, in which Ctrl-C may come, too
    except KeyboardInterrupt:
        print("draftproof: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(run())


if __name__ == "__main__":
    main()
