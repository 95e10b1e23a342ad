"""Parses the command line; an error is one line, which suggests the nearest name that exists."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that ends the command with one line on stderr and exit code 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and end the process."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message = f"there is no {wrong[1]!r}{_near(wrong[1], re.findall(r'[a-z]+', wrong[2]))}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; let the subcommand refuse an unknown one, since it knows its options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is no {unknown[0]!r}{_near(unknown[0], list(self._option_string_actions))}")
        return parsed, unknown


def positive(text: str) -> int:
    """Convert the text of an argument to a number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return number


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else f" among {', '.join(known)}"
