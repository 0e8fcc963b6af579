"""The command `llama-server`, as far as the tests need it, over the llama.cpp that a wheel brings.

usage: llama-server --model FILE --alias NAME --host HOST --port PORT --parallel N --ctx-size TOKENS ...

The server, its HTTP and its metrics are llama.cpp's own; only the reading of flags is done here, since the
wheel has no program. Flags that it does not know end it, as they do the real one.
"""

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    for name in ("--model", "--alias", "--host"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--parallel", "--ctx-size"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--threads", "--n-gpu-layers", "--batch-size"):
        parser.add_argument(name, type=int)
    for name in ("--metrics", "--no-slots", "--no-webui", "--cache-prompt", "--no-cache-prompt"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.hostnames = [given.host]
    params.port = given.port
    params.n_parallel = given.parallel
    params.n_ctx = given.ctx_size
    params.endpoint_metrics = given.metrics
    params.endpoint_slots = not given.no_slots
    params.ui = not given.no_webui
    params.cache_prompt = not given.no_cache_prompt
    params.warmup = False
    if given.threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    if given.batch_size:
        params.n_batch = given.batch_size
    # Signals go to this thread; the server has its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
