"""Runs `headway`, and programs that use OpenAI's SDK, for a shell without starting Python anew for each.

`python -m tests.warm_headway SOCKET` imports the command line once and forks a child for each call, in the caller's
folder, with its environment and on its terminal. Run as a script with SOCKET and words, it is the caller.
"""

import array
import importlib
import json
import os
import runpy
import socket
import sys
import traceback

CHANNELS = (0, 1, 2)
HEAD_BYTES = 8
# Before the path of a program, in place of words of `headway`.
PROGRAM = "--program"
FAILED = 1


def call(path: str, words: list[str]) -> int:
    """Let the warm process run `headway WORDS…`; its exit code."""
    request = json.dumps([os.getcwd(), dict(os.environ), words]).encode()  # noqa: PTH109
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(path)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", CHANNELS))]
        link.sendmsg([len(request).to_bytes(HEAD_BYTES, "big")], rights)
        link.sendall(request)
        return (link.recv(1) or b"\x46")[0]


def serve(path: str) -> None:
    """Take calls until the process is ended."""
    import signal

    import cli.main

    # What commands and programs import when they run.
    for name in ("cli.policy.sources", "controlplane.store.migrate", "openai"):
        importlib.import_module(name)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        print("warm", flush=True)
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(link, cli.main.main)
            link.close()


def _run(link: socket.socket, main: object) -> None:
    """The call, in a child; never returns."""
    head, descriptors, _, _ = socket.recv_fds(link, HEAD_BYTES, len(CHANNELS))
    left, parts = int.from_bytes(head, "big"), []
    while left:
        parts.append(link.recv(left))
        left -= len(parts[-1])
    folder, environment, words = json.loads(b"".join(parts))
    for descriptor, channel in zip(descriptors, CHANNELS, strict=True):
        os.dup2(descriptor, channel)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        if words[:1] == [PROGRAM]:
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            sys.argv = ["headway", *words]
            main()  # type: ignore[operator]
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else FAILED
    except BaseException:  # noqa: BLE001  (outermost frame of a child)
        traceback.print_exc()
        code = FAILED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        link.sendall(bytes([code]))
        os._exit(code)


if __name__ == "__main__":
    if __spec__ is None:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
