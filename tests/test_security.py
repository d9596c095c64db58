"""Addresses, and which of them may be used while there are no keys."""

from __future__ import annotations

import os

import pytest

from transport.address import Address, parse_address
from transport.errors import AddressError, AuthError
from transport.links import PeerCredentials
from transport.security import check_connect, check_credentials, check_listen

ALLOWED = [
    "tcp://127.0.0.1:7700",
    "tcp://127.255.255.254:1",
    "tcp://[::1]:65535",
    "ipc:///run/user/worker.sock",
    "unix:///run/user/worker.sock",
]
NOT_LOOPBACK = [
    "tcp://10.0.0.1:7700",
    "tcp://192.168.1.7:7700",
    "tcp://128.0.0.1:7700",
    "tcp://126.255.255.255:7700",
    "tcp://255.255.255.255:7700",
    "tcp://[fe80::1]:7700",
    "tcp://[::2]:7700",
    "tcp://[2001:db8::1]:7700",
    "tcp://[::ffff:127.0.0.1]:7700",
    "tcp://[::ffff:10.0.0.1]:7700",
    "tcp://example.com:7700",
    "tcp://localhost.example.com:7700",
    "tcp://LOCALHOST.:7700",
    "tcp://127.1:7700",
    "tcp://2130706433:7700",
    "tcp://0x7f.0.0.1:7700",
    "tcp://127.0.0.01:7700",
    "tcp://eth0:7700",
]
WILDCARDS = ["tcp://*:7700", "tcp://0.0.0.0:7700", "tcp://[::]:7700"]
MALFORMED = [
    "",
    "127.0.0.1:7700",
    "tcp:127.0.0.1:7700",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:",
    "tcp://:7700",
    "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:-1",
    "tcp://127.0.0.1:77x",
    "tcp://127.0.0.1:*",
    "tcp://::1:7700",
    "tcp://[::1%lo]:7700",
    "tcp://127.0.0.1:7700/path",
    "tcp://user@127.0.0.1:7700",
    "tcp://10.0.0.1:5;127.0.0.1:7700",
    "tcp://127.0.0.1:7700\n",
    "http://127.0.0.1:7700",
    "inproc://name",
    "unix://relative.sock",
    "unix://@abstract",
    "unix://",
    "unix:///" + "x" * 107,
    "unix:///a\0b",
]


@pytest.mark.parametrize("text", ALLOWED)
def test_addresses_of_this_host_pass_and_are_written_as_they_were(text: str) -> None:
    assert str(check_listen(text)) == text
    assert str(check_connect(text)) == text
    assert parse_address(parse_address(text)) == parse_address(text)


def test_localhost_is_ipv4_loopback_without_asking_anybody() -> None:
    assert check_listen("tcp://localhost:7700") == Address("tcp", "127.0.0.1", 7700)
    assert check_connect("tcp://localhost:7700") == Address("tcp", "127.0.0.1", 7700)


@pytest.mark.parametrize("check", [check_listen, check_connect])
@pytest.mark.parametrize("text", NOT_LOOPBACK)
def test_other_hosts_and_names_are_refused(check, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AuthError, match="keys yet") as caught:
        check(text)
    assert "tcp://127.0.0.1:7700" in str(caught.value)


@pytest.mark.parametrize("check", [check_listen, check_connect])
@pytest.mark.parametrize("text", WILDCARDS)
def test_wildcards_are_refused(check, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AuthError, match="every interface"):
        check(text)


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_addresses_are_another_error(text: str) -> None:
    with pytest.raises(AddressError):
        check_listen(text)


def test_port_zero_is_for_listeners() -> None:
    assert check_listen("tcp://127.0.0.1:0").with_port(7) == Address("tcp", "127.0.0.1", 7)
    with pytest.raises(AddressError, match="listeners"):
        check_connect("tcp://127.0.0.1:0")


def test_only_our_own_user_passes() -> None:
    check_credentials(None)
    check_credentials(PeerCredentials(1, os.getuid(), 0))
    check_credentials(PeerCredentials(1, 0, 0))
    with pytest.raises(AuthError, match="same user"):
        check_credentials(PeerCredentials(77, os.getuid() + 1, 0))
