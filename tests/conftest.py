"""Options and fixtures of all tests."""

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write golden files anew instead of comparing.")


def pytest_configure() -> None:
    # A shell that runs us in the background has us ignore Ctrl-C, and what tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
