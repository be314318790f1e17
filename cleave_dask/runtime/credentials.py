"""The folders in which keys, certificates and the register lie: one for a server, one per cluster on a device.

All files are readable by their owner only. `cleave.security.folder` says where they are.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from distributed.security import Security

from cleave_dask.errors import AccessError, NameTakenError
from cleave_dask.runtime.roles import Role
from cleave_dask.runtime.tokens import Member, Register, make_token

LOCAL_ROLES: tuple[Role, ...] = ("scheduler", "server", "client")
"""Roles whose keys are made on the server's machine."""

_REGISTER = "register.json"


@dataclass(frozen=True, slots=True)
class Files:
    """The authority's certificate, and a certificate and its key, as every TLS command takes them."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Options of `dask scheduler` and `dask worker`."""
        files = ("--tls-ca-file", self.authority, "--tls-cert", self.certificate, "--tls-key", self.key)
        return tuple(str(part) for part in files)

    def security(self) -> Security:
        """What a Dask client connects with."""
        return Security(
            require_encryption=True,
            tls_ca_file=str(self.authority),
            tls_client_cert=str(self.certificate),
            tls_client_key=str(self.key),
        )


class ServerFolder:
    """What `cleave serve` keeps: the authority, keys of its own processes, tokens and members."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether `cleave serve` has been here."""
        return (self.path / _REGISTER).exists()

    def files(self, role: Role) -> Files:
        """Certificate and key of a process of this machine."""
        return Files(self.path / "ca.pem", self.path / f"{role}.pem", self.path / f"{role}.key")

    def create(self, server_name: str) -> None:
        """Make the authority and the keys unless they are here."""
        from cleave_dask.runtime.certificates import Authority  # what it imports is of no use to anybody else

        make_private(self.path)
        now = datetime.now(UTC)
        with self._locked():
            if self.exists:
                return
            certificate, key = Authority.create(now)
            write_private(self.path / "ca.pem", certificate)
            write_private(self.path / "ca.key", key)
            authority = Authority(certificate, key)
            for role in LOCAL_ROLES:
                files = self.files(role)
                certificate, key = authority.issue(role, server_name if role == "server" else role, now)
                write_private(files.certificate, certificate)
                write_private(files.key, key)
            self._write(Register())

    def register(self) -> Register:
        """Tokens and members as they are now."""
        try:
            return Register.from_dict(json.loads((self.path / _REGISTER).read_text()))
        except FileNotFoundError:
            raise AccessError(f"nobody has served from {self.path}; start `cleave serve --host ...` first") from None
        except (ValueError, TypeError, KeyError) as error:
            raise AccessError(f"{self.path / _REGISTER} cannot be read ({error!r}); restore it or remove it") from error

    def stamp(self) -> int:
        """Changes whenever the register does."""
        try:
            return (self.path / _REGISTER).stat().st_mtime_ns
        except OSError:
            return 0

    def change(self, change: Callable[[Register], Register]) -> Register:
        """Change the register; nobody else does so at the same time."""
        self.register()  # says so if nobody has served here: then there is nothing to lock either
        with self._locked():
            changed = change(self.register())
            self._write(changed)
        return changed

    def issue_token(self, *, now: float, lifetime: float) -> str:
        """A new token for devices."""
        from cleave_dask.runtime.certificates import fingerprint

        self.register()  # as above: no certificate either
        pin = fingerprint(self.files("scheduler").certificate.read_bytes())
        token = make_token(pin, secrets.token_hex)
        self.change(lambda register: register.issue(token, now=now, lifetime=lifetime))
        return token

    def enrol(self, token: str, name: str, request: bytes, *, now: float, days: float) -> bytes:
        """The certificate of a device that has a valid token."""
        from cleave_dask.runtime.certificates import Authority, expiry_of, name_of, serial_of

        used = self.register().check(token, name, now=now)  # who has no token costs no signature
        if name in {name_of(self.files(role).certificate.read_bytes()) for role in LOCAL_ROLES}:
            raise NameTakenError(f"{name} is what the cluster calls itself; choose another name with --name")
        authority = Authority((self.path / "ca.pem").read_bytes(), (self.path / "ca.key").read_bytes())
        certificate = authority.sign(request, "device", name, datetime.fromtimestamp(now, UTC), days)
        member = Member(name, serial_of(certificate), used.id, now, expiry_of(certificate).timestamp())

        def admit(register: Register) -> Register:
            register.check(token, name, now=now)  # again: somebody may have taken the name meanwhile
            return register.admit(member)

        self.change(admit)
        return certificate

    def _write(self, register: Register) -> None:
        new = self.path / f".{_REGISTER}.new"
        write_private(new, json.dumps(register.to_dict(), indent=1).encode())
        new.replace(self.path / _REGISTER)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # Windows has none; a device may run there, a server does not

        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class DeviceFolder:
    """What a device keeps of a cluster that it has joined; of several on one machine, each under its own name."""

    def __init__(self, root: Path, host: str, port: int, name: str | None = None) -> None:
        self.path = root / "devices" / f"{host.replace(':', '_')}-{port}{f'-{name}' if name else ''}"
        self.files = Files(self.path / "ca.pem", self.path / "device.pem", self.path / "device.key")

    def write(self, *, key: bytes, certificate: bytes, authority: bytes, facts: dict[str, str]) -> None:
        """Keep what enrolment gave."""
        make_private(self.path)
        write_private(self.files.key, key)
        write_private(self.files.certificate, certificate)
        write_private(self.files.authority, authority)
        write_private(self.path / "joined.json", json.dumps(facts).encode())

    def facts(self) -> dict[str, str] | None:
        """Name and scheduler's address, if this device has joined before."""
        try:
            facts: dict[str, str] = json.loads((self.path / "joined.json").read_text())
        except (OSError, ValueError):
            return None
        return facts


def make_private(folder: Path) -> None:
    """A folder that only its owner can look into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_private(path: Path, content: bytes) -> None:
    """A file that only its owner can read, never for a moment anybody else."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
