"""Helpers shared by the tests of the jaxpp command. Each test runs as FILE COMMAND GRAPHS."""

import os
import pathlib
import subprocess
import sys
import unittest

GRAPHS = pathlib.Path(sys.argv.pop())
COMMAND = sys.argv.pop()
ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(
    *args: str, text: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to completion with additional environment variables."""
    return subprocess.run(
        [COMMAND, *args],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
    )


def graph(name: str) -> str:
    """The path of a graph file."""
    return str(GRAPHS / f"{name}.jpp")


class CommandTest(unittest.TestCase):
    """Base class of the tests of the command."""

    def assert_refused(self, code: int, message: str, *args: str, text: str = "") -> None:
        """Asserts that the command fails with one message, on standard error only."""
        done = run(*args, text=text)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertTrue(done.stderr.startswith("jaxpp: error: "), done.stderr)
        self.assertEqual(done.stderr.count("jaxpp: error: "), 1)
        self.assertIn(message, done.stderr)
