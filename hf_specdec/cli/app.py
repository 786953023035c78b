"""The command line: what it is started by, and the commands by name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import SpeculationError
from . import heads, measuring, train

_WRONG_CALL, _INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status.

    0: done. 1: an output that ought to be plain decoding's was not. 2: the call was wrong, or no mode could run.
    130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser(argv).parse_args(argv)
        return arguments.run(arguments)
    except SpeculationError as error:
        print(f"hf-specdec: error: {error}", file=sys.stderr)
        return _WRONG_CALL
    except KeyboardInterrupt:
        print("hf-specdec: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-specdec", description="Exact speculative decoding inside transformers' generate()."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    measuring.add_commands(commands)
    train.add_command(commands, argv)
    heads.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
