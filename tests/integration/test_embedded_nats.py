"""The embedded NATS: who may say what, users that come and go, and a store that survives the server."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

from controlplane.domain.errors import ConfigurationError
from controlplane.embedded.nats import EmbeddedNats, NatsUser, agent_user, control_user
from dataplane.protocol.subjects import (
    COMMAND_STREAM,
    COMMAND_SUBJECTS,
    CONTROL_POLICIES,
    ROLL_CALL,
    inbox_prefix,
    node_subject,
)

WAIT_S = 1.0


class Peer:
    """A connection and what the server refused it."""

    def __init__(self, client: Client, refused: list[str]) -> None:
        self.client = client
        self.refused = refused

    async def settle(self) -> None:
        """The server has taken everything in, refusals included."""
        await self.client.flush(timeout=5)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def connected(url: str, user: NatsUser) -> AsyncIterator[Peer]:
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error).lower())

    client = await nats.connect(
        url,
        user=user.name,
        password=user.password,
        inbox_prefix=inbox_prefix(user.name).encode(),
        error_cb=on_error,
        allow_reconnect=False,
    )
    try:
        yield Peer(client, refused)
    finally:
        await client.close()


async def refusal(url: str, user: str | None = None, password: str | None = None) -> str:
    """What the server says to a client of this name, which is nothing when it lets it in."""
    host, port = url.removeprefix("nats://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        assert (await reader.readline()).startswith(b"INFO ")
        login = {"user": user, "pass": password} if user is not None else {}
        writer.write(f"CONNECT {json.dumps({'verbose': False, **login})}\r\nPING\r\n".encode())
        answer = (await reader.readline()).decode().strip().lower()
        return "" if answer == "pong" else answer
    finally:
        writer.close()
        await writer.wait_closed()


async def test_who_is_not_listed_is_refused(nats_url: str, nats_users: dict[str, NatsUser]) -> None:
    assert await refusal(nats_url, user="n1", password=nats_users["n1"].password) == ""
    assert "authorization" in await refusal(nats_url)
    assert "authorization" in await refusal(nats_url, user="n1", password="guess")
    assert "authorization" in await refusal(nats_url, user="n9", password="")


async def test_an_agent_speaks_for_its_own_node_only(
    nats_url: str, nats_users: dict[str, NatsUser]
) -> None:
    async with (
        connected(nats_url, nats_users["control"]) as control,
        connected(nats_url, nats_users["n1"]) as agent,
    ):
        heard = await control.client.subscribe("hw.v1.node.>")
        await control.settle()
        for subject in (
            node_subject("n2", "beat"),
            node_subject("n2", "ack"),
            ROLL_CALL,
            CONTROL_POLICIES,
            "hw.v1.control.plan",
            f"{inbox_prefix('control')}.x",
            "$JS.API.STREAM.DELETE.HW_COMMANDS",
            "$JS.API.CONSUMER.MSG.NEXT.HW_COMMANDS.n2",
            "$JS.ACK.HW_COMMANDS.n2.1.1.1.1.1",
        ):
            await agent.client.publish(subject, b"forged")
            await agent.settle()
            assert agent.refused, subject
            assert "permissions violation for publish" in agent.refused.pop()
        await agent.client.publish(node_subject("n1", "beat"), b"mine")
        await agent.settle()
        assert not agent.refused
        message = await heard.next_msg(timeout=WAIT_S)
        assert (message.subject, message.data) == ("hw.v1.node.n1.beat", b"mine")
        with pytest.raises(nats.errors.TimeoutError):
            await heard.next_msg(timeout=0.1)


async def test_an_agent_hears_its_own_node_only(
    nats_url: str, nats_users: dict[str, NatsUser]
) -> None:
    async with connected(nats_url, nats_users["n1"]) as agent:
        for subject in (
            node_subject("n2", "credits"),
            node_subject("n2", "cmd"),
            node_subject("*", "cmd"),
            CONTROL_POLICIES,
            f"{inbox_prefix('n2')}.>",
            f"{inbox_prefix('control')}.>",
            "_INBOX.>",
            "$JS.>",
            ">",
        ):
            await agent.client.subscribe(subject)
            await agent.settle()
            assert agent.refused, subject
            assert "permissions violation for subscription" in agent.refused.pop()
        for subject in (node_subject("n1", "credits"), node_subject("n1", "cmd"), ROLL_CALL):
            await agent.client.subscribe(subject)
        await agent.settle()
        assert not agent.refused


async def test_an_agent_answers_what_it_is_asked(
    nats_url: str, nats_users: dict[str, NatsUser]
) -> None:
    async with (
        connected(nats_url, nats_users["control"]) as control,
        connected(nats_url, nats_users["n1"]) as agent,
    ):
        asked = await agent.client.subscribe(node_subject("n1", "credits"))
        await agent.settle()
        request = asyncio.create_task(
            control.client.request(node_subject("n1", "credits"), b"?", timeout=5)
        )
        question = await asked.next_msg(timeout=5)
        await question.respond(b"!")
        assert (await request).data == b"!"
        # Once: the permission to answer is used up.
        await question.respond(b"again")
        await agent.settle()
        assert "permissions violation for publish" in agent.refused.pop()


async def make_commands(client: Client, node: str) -> None:
    stream = client.jetstream()
    await stream.add_stream(
        StreamConfig(
            name=COMMAND_STREAM, subjects=[COMMAND_SUBJECTS], retention=RetentionPolicy.WORK_QUEUE
        )
    )
    await stream.add_consumer(
        COMMAND_STREAM,
        ConsumerConfig(durable_name=node, filter_subject=node_subject(node, "cmd")),
    )


async def test_commands_are_taken_by_their_agent_and_survive_the_server(folder: Path) -> None:
    home = folder / "nats"
    users = [control_user(home), agent_user(home, "n1")]
    server = EmbeddedNats(home, users)
    url = await server.start()
    async with connected(url, users[0]) as control:
        await make_commands(control.client, "n1")
        for number in range(3):
            await control.client.jetstream().publish(
                node_subject("n1", "cmd"), str(number).encode()
            )
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    assert await server.start() == url
    async with connected(url, users[1]) as agent:
        pull = await agent.client.jetstream().pull_subscribe_bind("n1", COMMAND_STREAM)
        taken = await pull.fetch(3, timeout=5)
        assert [message.data for message in taken] == [b"0", b"1", b"2"]
        for message in taken:
            await message.ack()
        await agent.settle()
        assert not agent.refused
    async with connected(url, users[0]) as control:
        facts = await control.client.jetstream().stream_info(COMMAND_STREAM)
        assert facts.state.messages == 0
    await server.stop()


async def test_users_come_and_go_without_a_restart(folder: Path) -> None:
    home = folder / "nats"
    control, first, second = control_user(home), agent_user(home, "n1"), agent_user(home, "n2")
    server = EmbeddedNats(home, [control, first])
    url = await server.start()
    pid = server.pid
    async with connected(url, control) as kept, connected(url, first) as dropped:
        assert "authorization" in await refusal(url, user="n2", password=second.password)
        await server.reload([control, second])
        async with connected(url, second):
            pass
        assert "authorization" in await refusal(url, user="n1", password=first.password)
        async with asyncio.timeout(30):
            while not dropped.client.is_closed:
                await asyncio.sleep(0.02)
        await kept.settle()
        assert kept.client.is_connected
    assert server.pid == pid
    await server.stop()


async def test_secrets_are_kept_and_for_the_owner_only(folder: Path) -> None:
    home = folder / "nats"
    users = [control_user(home), agent_user(home, "n1")]
    assert users == [control_user(home), agent_user(home, "n1")]
    assert len({user.password for user in users}) == 2
    server = EmbeddedNats(home, users)
    await server.start()
    for path in (home / "nats.conf", *(home / "passwords").iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    assert (home / "passwords").stat().st_mode & 0o077 == 0
    other = EmbeddedNats(home, users)
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        await other.start()
    await server.stop()


@pytest.mark.parametrize("node", ["", "a.b", "a b", "*", ">", "control", "x" * 64, "ü", "../x"])
def test_a_node_id_that_is_no_subject_token_is_refused(folder: Path, node: str) -> None:
    with pytest.raises(ConfigurationError, match="node id"):
        agent_user(folder, node)
