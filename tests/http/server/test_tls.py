"""TLS: a server with a certificate, and clients with and without trust in it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from envkit import clock
from envkit.errors import UnreachableError, UsageError
from envkit.http.api.app import create_app
from envkit.http.client.env_client import EnvClient
from envkit.http.server.server import serve
from envkit.types import Task
from tests.http.envs import listening, slots


class Pair(NamedTuple):
    certificate: Path
    key: Path


def make_pair(folder: Path, *more: str) -> Pair:
    pair = Pair(folder / "certificate.pem", folder / "key.pem")
    name = ("-subj", "/CN=envkit-test", "-addext", "subjectAltName=IP:127.0.0.1")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", str(pair.key))
    words = [
        "openssl",
        "req",
        "-x509",
        "-days",
        "2",
        *key,
        "-out",
        str(pair.certificate),
        *name,
        *(more or ("-nodes",)),
    ]
    subprocess.run(words, check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@asynccontextmanager
async def secure(certificate: Path, key: Path | None) -> AsyncIterator[str]:
    async with slots() as host, listening(create_app(host), certificate=certificate, key=key) as address:
        with anyio.fail_after(20):
            yield address


async def play(address: str, ca: Path | None) -> str:
    async with EnvClient(address, ca=ca, timeout_s=10) as client, client.lease(Task("Count-v0", 7)) as episode:
        return (await episode.reset()).observation.text


@pytest.mark.parametrize("in_one_file", [False, True])
def test_a_client_that_trusts_the_certificate_plays_over_tls(pair: Pair, tmp_path: Path, in_one_file: bool) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())

    async def main() -> str:
        async with secure(both if in_one_file else pair.certificate, None if in_one_file else pair.key) as address:
            assert address.startswith("https://127.0.0.1:")
            return await play(address, pair.certificate)

    assert clock.run(main) == "seed 7"


def test_a_client_without_trust_or_tls_fails_with_the_reason(pair: Pair, tmp_path: Path) -> None:
    other = make_pair(tmp_path)

    async def main() -> None:
        async with secure(*pair) as address:
            for ca in (None, other.certificate):
                with pytest.raises(UnreachableError, match=r"CERTIFICATE_VERIFY_FAILED \(self-signed.*pass ca, a PEM"):
                    await play(address, ca)
            with pytest.raises(UnreachableError, match="does not answer"):
                await play(address.replace("https", "http"), None)
            with pytest.raises(UnreachableError, match=r"CERTIFICATE_VERIFY_FAILED|does not answer"):
                await play(address.replace("127.0.0.1", "localhost"), pair.certificate)

    clock.run(main)


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_listens(pair: Pair, tmp_path: Path) -> None:
    locked = make_pair(tmp_path, "-passout", "pass:secret")
    missing = tmp_path / "missing.pem"
    for certificate, key, message in (
        (missing, pair.key, "No such file"),
        (pair.key, pair.key, "cannot use the certificate"),
        (pair.certificate, None, "cannot use the certificate"),
        (pair.certificate, locked.key, "cannot use the certificate"),
        (locked.certificate, locked.key, "cannot use the certificate"),
        (None, pair.key, "needs a certificate; pass the certificate too"),
    ):
        with pytest.raises(UsageError, match=message):
            clock.run(partial(serve, create_app(slots()), port=0, certificate=certificate, key=key))


def test_a_client_refuses_an_invalid_certificate_file(pair: Pair, tmp_path: Path) -> None:
    for url, ca, message in (
        ("https://127.0.0.1:1", tmp_path / "missing.pem", "No such file"),
        ("https://127.0.0.1:1", pair.key, "it contains no certificate"),
        ("http://127.0.0.1:1", pair.certificate, "needs an https:// address"),
    ):
        with pytest.raises(UsageError, match=message):
            EnvClient(url, ca=ca)
