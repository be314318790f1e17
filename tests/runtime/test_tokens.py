"""Who may join, and what a certificate says: no files but a temporary folder, no cluster."""

from __future__ import annotations

import json
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path
from time import time

import pytest

from cleave_dask.errors import AccessError
from cleave_dask.runtime.certificates import Authority, fingerprint, make_request, serial_of
from cleave_dask.runtime.credentials import ServerFolder
from cleave_dask.runtime.roles import Peer, peer_of
from cleave_dask.runtime.tokens import Member, Register, make_token, parse_token

PIN = "ab" * 32
NOW = 1_000_000.0


def token(number: int = 1) -> str:
    return make_token(PIN, lambda count: f"{number:0{2 * count}x}")


def member(name: str, text: str, serial: str = "1") -> Member:
    return Member(name, serial, parse_token(text)[0], NOW, NOW + 1000)


def test_a_token_is_good_until_it_expires_or_is_revoked() -> None:
    register = Register().issue(token(), now=NOW, lifetime=60)
    assert register.check(token(), "phone", now=NOW + 59).id == "00000001"
    with pytest.raises(AccessError, match="expired 1 s ago; ask for a new one"):
        register.check(token(), "phone", now=NOW + 61)
    with pytest.raises(AccessError, match="was revoked"):
        register.revoke("00000001").check(token(), "phone", now=NOW)
    forged = f"00000001.{'f' * 32}.{PIN}"
    for wrong in (token(2), forged):
        with pytest.raises(AccessError, match="not known here"):
            register.check(wrong, "phone", now=NOW)


def test_a_quarantine_is_remembered_until_the_device_is_revoked() -> None:
    register = Register().admit(member("phone", token())).admit(member("tablet", token(2), serial="2"))
    caught = register.quarantine("phone", "a wrong tile").quarantine("phone", "another").quarantine("nobody", "x")
    assert Register.from_dict(caught.to_dict()).quarantined == {"phone": "a wrong tile"}
    again = caught.revoke("phone").admit(member("phone", token(), serial="3"))
    assert again.quarantined == {}


def test_names_are_taken_once_and_are_plain() -> None:
    register = Register().issue(token(), now=NOW, lifetime=60).admit(member("phone", token()))
    with pytest.raises(AccessError, match="called phone has joined before"):
        register.check(token(), "phone", now=NOW)
    assert register.revoke("phone").check(token(), "phone", now=NOW)
    for name in ("", "<b>", "../x", "a b", "é", "x" * 64, "-x", "x\n"):
        with pytest.raises(AccessError, match="cannot be used"):
            register.check(token(), name, now=NOW)


def test_revoking_a_token_revokes_who_joined_with_it_and_nobody_else() -> None:
    register = Register().issue(token(1), now=NOW, lifetime=60).issue(token(2), now=NOW, lifetime=60)
    for name, text, serial in (("a", token(1), "a"), ("b", token(1), "b"), ("c", token(2), "c")):
        register = register.admit(member(name, text, serial))
    one, both = register.revoke("a"), register.revoke("00000001")
    assert [one.allows(serial) for serial in "abcd"] == [False, True, True, False]
    assert [both.allows(serial) for serial in "abc"] == [False, False, True]
    assert Register.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    with pytest.raises(AccessError, match="called 'd'; devices: a, b, c"):
        register.revoke("d")


@pytest.mark.parametrize("text", ["", "a.b.c", token() + "0", token().replace("a", "A"), token()[:-1] + "g", "." * 106])
def test_what_is_no_token_is_said(text: str) -> None:
    with pytest.raises(AccessError, match="copy the whole line"):
        parse_token(text)


def test_a_folder_is_private_and_made_once(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path / "server")
    folder.create("cleave-server")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    folder.create("cleave-server")
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    secret = [path for path in folder.path.iterdir() if path.name != "lock"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


def test_a_device_gets_a_certificate_of_its_name_and_role_whatever_it_asks_for(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path / "server")
    folder.create("cleave-server")
    text = folder.issue_token(now=time(), lifetime=60)
    assert parse_token(text)[2] == fingerprint(folder.files("scheduler").certificate.read_bytes())
    key, request = make_request("scheduler")  # what it would like to be called
    assert b"PRIVATE KEY" in key
    certificate = folder.enrol(text, "phone", request, now=time(), days=1)
    assert folder.register().allows(serial_of(certificate))
    assert shown(certificate, tmp_path) == Peer("device", "phone", serial_of(certificate))
    with pytest.raises(AccessError, match="signing request"):
        folder.enrol(text, "tablet", b"nonsense", now=time(), days=1)
    assert [one.name for one in folder.register().members] == ["phone"]


def test_roles_of_certificates(tmp_path: Path) -> None:
    authority = Authority(*Authority.create(datetime.now(UTC)))
    for role in ("scheduler", "server", "client", "device"):
        certificate, _ = authority.issue(role, "x", datetime.now(UTC), 1)
        peer = shown(certificate, tmp_path)
        assert peer is not None
        assert peer.role == role
    for subject in ([], [("commonName", "x")], [("organizationalUnitName", "root"), ("commonName", "x")]):
        assert peer_of({"subject": [[pair] for pair in subject]}) is None
    twice = [("organizationalUnitName", "client"), ("organizationalUnitName", "device"), ("commonName", "x")]
    assert peer_of({"subject": [twice]}) is None
    assert peer_of(None) is None


def shown(certificate: bytes, folder: Path) -> Peer | None:
    """A certificate as `ssl` shows it to whoever it is presented to."""
    path = folder / "shown.pem"
    path.write_bytes(certificate)
    return peer_of(ssl._ssl._test_decode_cert(str(path)))  # type: ignore[attr-defined]
