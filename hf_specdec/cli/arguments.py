"""Arguments that the commands share: how values are read, and how defaults are shown."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigurationError


class Help(argparse.HelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        shows = action.option_strings and not any(default is silent for silent in (None, False, argparse.SUPPRESS))
        return f"{action.help} (default: %(default)s)" if shows else action.help


def whole(text: str) -> int:
    """A whole number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def temperature(text: str) -> float:
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}; leave it out to decode greedily")
    return number


def fraction(text: str) -> float:
    """A number above 0, at most 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return number


# argparse names the type in its message where the text is no number at all
whole.__name__ = positive.__name__ = "whole number"
temperature.__name__ = fraction.__name__ = "number"


def check_writable(*paths: Path | None) -> None:
    """Raise `ConfigurationError` unless the folders of these files are there."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"Cannot write {path}: there is no folder {path.absolute().parent}.")
