"""`python -m dataplane.engines.attached`: lives until it is told to end, and does nothing.

What an agent starts, watches and ends is then this process; the server is only asked.
"""

import signal


def main() -> None:
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
