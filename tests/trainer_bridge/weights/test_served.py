"""Weights for engines on other machines: served over HTTP, fetched by the plug-in of vLLM, whole or as a delta."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from shutil import rmtree

import httpx
import numpy as np
import pytest
import torch
from starlette.responses import PlainTextResponse

from envkit import clock
from envkit.errors import UsageError
from envkit.trainer_bridge.engines.vllm.plugin import envkit_fetch
from envkit.trainer_bridge.engines.vllm.plugin.envkit_fetch import MANIFEST, PATH, FetchError, FetchRoute, Store
from envkit.trainer_bridge.weights.channel import WeightChannel
from envkit.trainer_bridge.weights.files import INDEX, save_weights
from envkit.trainer_bridge.weights.served import WeightServer
from envkit.types import Weights
from tests.trainer_bridge.engines.vllm.fake_server import FakeServer, fleet, params
from tests.trainer_bridge.fakes import ScriptedTrainer
from tests.trainer_bridge.models import open_model


@asynccontextmanager
async def serving() -> AsyncIterator[WeightServer]:
    server = WeightServer(f"http://127.0.0.1:{free_port()}")
    try:
        yield server
    finally:
        await server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_store(path: Path) -> Store:
    path.mkdir()
    return Store(path)


async def fetched(store: Store, server: WeightServer, weights: Weights) -> tuple[Path, int]:
    """Let a store fetch weights; return its folder and the number of bytes."""
    found = await clock.to_thread(store.fetch, await server.offer(weights, "http://127.0.0.1:1"))
    return Path(found["path"]), found["bytes"]


def content_of(weights: Weights) -> bytes:
    return Path(weights.location).read_bytes()


def held_by(folder: Path | str) -> Path:
    """The file of weights in the folder of a store."""
    return Path(folder) / "model.safetensors"


def write_words(path: Path, words: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> Path:
    path.write_bytes(words.tobytes())
    return path


def test_a_delta_restores_every_word_at_the_edges_of_blocks_and_leaves_out_what_is_equal(tmp_path: Path) -> None:
    size = 2 * envkit_fetch.BLOCK_WORDS + 9
    words = np.arange(size, dtype=np.uint32).astype(np.uint16)
    changed = words.copy()
    changed[[0, 1, 5, envkit_fetch.BLOCK_WORDS - 1, size - 1]] += np.array([1, 255, 256, 0x8001, 0xFFFF], np.uint16)
    old, new = write_words(tmp_path / "old", words), write_words(tmp_path / "new", changed)
    blocks = list(envkit_fetch.encode(old, new))
    assert blocks[1] == b"\0" * 8
    assert b"".join(envkit_fetch.decode(old, BytesIO(b"".join(blocks)))) == new.read_bytes()


def test_a_hundred_pushes_arrive_bit_for_bit_as_deltas(tiny_folder: Path, tmp_path: Path) -> None:
    model, store = open_model(tiny_folder), make_store(tmp_path / "server")
    random = torch.Generator().manual_seed(1)
    sent: list[int] = []

    def write(version: int) -> Path:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=random), alpha=1e-4)
        return save_weights(model, tmp_path / f"{version}.safetensors", torch.bfloat16, shard_bytes=10_000)

    def hashes(place: Path) -> dict[str, str]:
        return {one.name: sha256(one.read_bytes()).hexdigest() for one in place.iterdir()}

    async def main() -> None:
        async with serving() as server:
            for version in range(100):
                place = write(version)
                folder, size = await fetched(store, server, Weights(version, str(place)))
                sent.append(size)
                assert hashes(folder) == hashes(place)

    clock.run(main)
    assert max(sent[1:]) < sent[0] / 2


def test_a_server_that_lacks_the_last_version_or_has_a_damaged_file_gets_whole_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 16, 50_000, dtype=np.uint16)
    versions = []
    for version in range(4):
        words[version] += 1
        versions.append(Weights(version, str(write_words(tmp_path / f"{version}.safetensors", words))))

    async def main() -> None:
        always, sometimes = make_store(tmp_path / "always"), make_store(tmp_path / "sometimes")
        async with serving() as server:
            for number, weights in enumerate(versions[:3]):
                folder, size = await fetched(always, server, weights)
                assert (size == 100_000) == (number == 0)
                if number != 1:
                    assert (await fetched(sometimes, server, weights))[1] == 100_000
            frozen = make_store(tmp_path / "frozen")
            assert (await fetched(frozen, server, versions[1]))[1] == 100_000  # older than those that were offered last
            assert (await fetched(always, server, versions[2]))[1] == 0
            restarted = make_store(tmp_path / "restarted")
            assert (await fetched(restarted, server, versions[2]))[1] == 100_000

            held = held_by(folder)
            damaged = bytearray(held.read_bytes())
            damaged[5] ^= 1
            held.write_bytes(damaged)
            with pytest.raises(
                FetchError, match=r"from http://127.0.0.1:\d+: model.safetensors has the wrong checksum"
            ):
                await fetched(always, server, versions[3])
            assert held.read_bytes() == damaged
            assert (await fetched(always, server, versions[3]))[1] == 100_000
            assert held.read_bytes() == content_of(versions[3])

    clock.run(main)


def test_nothing_but_the_offered_files_is_served(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "adapter" / name).write_bytes(b"12")

    async def main() -> None:
        async with serving() as server, httpx.AsyncClient(trust_env=False) as client:
            url = await server.offer(Weights(1, str(tmp_path / "adapter"), adapter=True), "http://127.0.0.1:1")
            files = (await client.get(f"{url}/{MANIFEST}")).json()["files"]
            assert sorted(one["name"] for one in files) == ["adapter_config.json", "adapter_model.safetensors"]
            assert (await client.get(f"{url}/adapter_config.json")).content == b"12"
            root, _, number = url.rpartition("/")
            wrong = f"{root.rpartition('/')[0]}/token/{number}/{MANIFEST}"
            for other in (f"{url}/{INDEX}", f"{url}/../{number}/../../etc/passwd", f"{url}/", wrong):
                assert (await client.get(other)).status_code == 404

    clock.run(main)


class Publisher(ScriptedTrainer):
    """Publishes files of random words, which differ in one word from the file before."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._words = np.random.default_rng(1).integers(0, 1 << 16, 50_000, dtype=np.uint16)
        self.version = -1

    async def publish(self) -> Weights:
        self.version += 1
        self._words[self.version] += 1
        return Weights(self.version, str(write_words(self._folder / f"{self.version}.safetensors", self._words)))


def test_servers_fetch_while_they_generate_and_load_from_their_own_files(tmp_path: Path) -> None:
    trainer = Publisher(tmp_path)

    async def main() -> None:
        first, second = (FakeServer(store=make_store(tmp_path / name)) for name in ("one", "two"))
        async with fleet(first, second, weights_url=f"http://127.0.0.1:{free_port()}") as group:
            for version in range(3):
                if version == 2:
                    await first.kill()
                    first.store = make_store(tmp_path / "restarted")
                    await first.start(5.0)
                weights = await trainer.publish()
                await group.engine.fetch(weights)
                assert [len(one.loads) for one in (first, second)] == [version, version]
                await group.engine.load(weights)
                for one in (first, second):
                    assert len(one.fetches) == len(one.loads) == version + 1
                    assert one.store is not None
                    held = held_by(one.loads[-1])
                    assert held.parents[1] == one.store._parent
                    assert held.read_bytes() == content_of(weights)
        whole = 100_000
        assert [size == whole for size in first.fetches] == [True, False, True]
        assert [size == whole for size in second.fetches] == [True, False, False]

    clock.run(main)


def test_a_server_whose_fetch_fails_once_takes_the_whole_file_in_the_same_push(tmp_path: Path) -> None:
    trainer = Publisher(tmp_path)

    async def main() -> None:
        server = FakeServer(store=make_store(tmp_path / "store"))
        async with fleet(server, weights_url=f"http://127.0.0.1:{free_port()}") as group:
            channel = WeightChannel(trainer, group.engine)
            await channel.push()
            held_by(server.loads[0]).write_bytes(b"0" * 100_000)
            weights = (await channel.push()).weights
            assert (len(server.loads), server.fetches) == (2, [100_000, 100_000])
            assert held_by(server.loads[1]).read_bytes() == content_of(weights)

    clock.run(main)


def test_weights_that_cannot_be_fetched_are_an_error_and_the_old_ones_stay(tmp_path: Path) -> None:
    trainer = Publisher(tmp_path)

    async def main() -> None:
        server, old = FakeServer(store=make_store(tmp_path / "store")), FakeServer()
        async with fleet(server, weights_url=f"http://127.0.0.1:{free_port()}") as group:
            channel = WeightChannel(trainer, group.engine)
            await channel.push()
            rmtree(Path(server.loads[0]))
            with pytest.raises(UsageError, match=r"cannot fetch weights from \S*: .*No such file or directory: '\S*'$"):
                await channel.push()
            assert len(server.loads) == 1
            assert (await group.engine.generate([7], params(3))).versions == ((0, 3),)
        async with fleet(old, weights_url=f"http://127.0.0.1:{free_port()}") as group:
            with pytest.raises(UsageError, match="cannot fetch weights; start it with this version of `envkit vllm`"):
                await WeightChannel(trainer, group.engine).push()

    clock.run(main)


def test_the_route_of_the_plug_in_fetches_weights_and_leaves_all_other_requests_to_vllm(tmp_path: Path) -> None:
    weights = Weights(1, str(write_words(tmp_path / "1.safetensors", np.arange(99, dtype=np.uint16))))
    url = "http://127.0.0.1:1"

    async def main() -> None:
        transport = httpx.ASGITransport(FetchRoute(PlainTextResponse("vllm")))
        async with serving() as server, httpx.AsyncClient(transport=transport, base_url=url) as client:
            reply = await client.post(PATH, json={"url": await server.offer(weights, url)})
            assert held_by(reply.json()["path"]).read_bytes() == content_of(weights)
            assert (await client.get("/health")).text == "vllm"
            refused = await client.post(PATH, json={"url": f"{url}/secret"})
            assert refused.status_code == 500
            assert f"cannot fetch weights from {url}: " in refused.json()["error"]["message"]
            assert (await client.post(PATH, content=b"{")).status_code == 500
            assert (await client.get(PATH)).status_code == 405

    clock.run(main)
