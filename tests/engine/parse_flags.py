"""Reads command lines of `vllm serve` (JSON, by name) on standard input and parses each by vLLM's own
parser and into its own engine arguments; prints what was refused, by name, as JSON.

usage: VENV/bin/python tests/engine/parse_flags.py      (VENV as made by install_vllm.py)
"""

import contextlib
import io
import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
refused = {}
for name, argv in json.load(sys.stdin).items():
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            given = parser.parse_args(argv)
        validate_parsed_serve_args(given)
        AsyncEngineArgs.from_cli_args(given)
    except SystemExit:
        refused[name] = words.getvalue()[-300:]
    except (TypeError, ValueError) as error:
        refused[name] = str(error)
print(json.dumps(refused))
