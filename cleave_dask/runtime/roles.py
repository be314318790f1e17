"""Who is at the other end of a connection, as its certificate says: a role and a name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["scheduler", "server", "client", "device"]

ROLES: tuple[Role, ...] = ("scheduler", "server", "client", "device")
"""In a certificate the role is the organizational unit, the name is the common name."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a device may be called: safe in files, logs, pages and certificates."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection."""

    role: Role
    name: str
    serial: str  # of its certificate, in lower-case hexadecimal digits


def peer_of(certificate: Mapping[str, Any] | None) -> Peer | None:
    """The peer behind a certificate as `ssl` shows it; None if it says no role that there is."""
    if not certificate:
        return None
    subject: list[tuple[str, str]] = [pair for group in certificate.get("subject", ()) for pair in group]
    units = [value for key, value in subject if key == "organizationalUnitName"]
    names = [value for key, value in subject if key == "commonName"]
    if len(units) != 1 or len(names) != 1 or not NAME.fullmatch(names[0]):
        return None
    role = next((role for role in ROLES if role == units[0]), None)
    serial = str(certificate.get("serialNumber", "")).lower().lstrip("0")
    return None if role is None else Peer(role, names[0], serial)
