"""Command line of a simulated engine: `python -m dataplane.engines.simulated --port 8000 --model
NAME`.
"""

import argparse
import asyncio
import logging
import socket
import sys

import msgspec
import uvicorn
import uvloop

from dataplane.engines.base import EngineError
from dataplane.engines.kv_wire import KvEndpoints
from dataplane.engines.simulated.kv_events import KvPublisher
from dataplane.engines.simulated.loop import Engine
from dataplane.engines.simulated.options import SimulatedOptions, check_options
from dataplane.engines.simulated.server import EngineProtocol, Server

# Beyond the time that running requests get, for their last bytes to leave.
CLOSE_MARGIN_S = 2
# Of a load, the part in which weights are read; the rest compiles and warms up.
LOADING_RATIO = 0.8
SHARDS = 4


class _DrainingServer(uvicorn.Server):
    """On SIGTERM lets running requests finish for a while, then ends them with `abort`, as vLLM
    does.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_s, self._engine.abort_all)
        await super().shutdown(sockets)


async def _load(seconds: float, model: str) -> None:
    """Take the time of a load, and say how far it is in vLLM's words."""
    if not seconds:
        return
    _say(f"Starting to load model {model}...")
    for shard in range(SHARDS + 1):
        bar = f"{shard * 100 // SHARDS}% Completed | {shard}/{SHARDS}"
        _say(f"Loading safetensors checkpoint shards: {bar}")
        await asyncio.sleep(seconds * LOADING_RATIO / SHARDS if shard < SHARDS else 0.0)
    _say(f"Loading weights took {seconds * LOADING_RATIO:.2f} seconds")
    await asyncio.sleep(seconds * (1.0 - LOADING_RATIO))


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


async def _serve(
    options: SimulatedOptions,
    model: str,
    gpus: int,
    host: str,
    port: int,
    endpoints: KvEndpoints | None,
) -> None:
    # As with vLLM, nothing listens until the weights are there.
    await _load(options.load_ms / 1000 / options.speedup, model)
    with socket.create_server((host, port), backlog=2048) as listener:
        bound = listener.getsockname()
        publisher = None if endpoints is None else KvPublisher(endpoints)
        engine = Engine(options, gpus=gpus, model=model, kv_publisher=publisher)
        config = uvicorn.Config(
            Server(engine, bound[0], bound[1]),
            http=EngineProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(options.shutdown_timeout_s) + CLOSE_MARGIN_S,
        )
        server = _DrainingServer(config, engine, options.shutdown_timeout_s)
        logging.getLogger("uvicorn.error").info("serving %s on port %d", model, bound[1])
        loop = asyncio.ensure_future(engine.run())
        loop.add_done_callback(lambda _: setattr(server, "should_exit", True))
        replaying = None if publisher is None else asyncio.ensure_future(publisher.replay())
        try:
            await server.serve(sockets=[listener])
        finally:
            if replaying is not None:
                replaying.cancel()
                await asyncio.wait({replaying})
            if publisher is not None:
                publisher.close()
            if loop.done() and not loop.cancelled():
                loop.result()
            loop.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(prog="simulated-engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--options", default="{}", help="JSON object of SimulatedOptions")
    parser.add_argument("--kv-events", default="", help="ZeroMQ address to publish KV events at")
    parser.add_argument("--kv-replay", default="", help="ZeroMQ address to replay them at")
    arguments = parser.parse_args()
    endpoints = None
    if arguments.kv_events and arguments.kv_replay:
        endpoints = KvEndpoints(events=arguments.kv_events, replay=arguments.kv_replay)
    try:
        options = msgspec.json.decode(arguments.options, type=SimulatedOptions)
        check_options(options, arguments.gpus)
    except (msgspec.MsgspecError, EngineError) as error:
        sys.exit(f"simulated engine: {error}")
    uvloop.run(
        _serve(options, arguments.model, arguments.gpus, arguments.host, arguments.port, endpoints)
    )


if __name__ == "__main__":
    main()
