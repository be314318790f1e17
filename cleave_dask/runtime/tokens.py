"""Who may join, and who no longer may: tokens and the devices that used them. Policy only: no clock, no files.

A token is `id.secret.pin`. The register keeps a digest of the secret, never the secret. The pin is the fingerprint of
the certificate that answers at the enrolment address, so that a device tells its secret to nobody else. A token serves
any number of devices until it expires or is revoked; revoking it revokes every device that joined with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from hmac import compare_digest
from typing import Any, Self

from cleave_dask.errors import AccessError, NameTakenError
from cleave_dask.runtime.roles import NAME

LENGTHS = (8, 32, 64)
"""Hexadecimal digits of a token's id, secret and pin."""


KEPT = 7 * 86400.0
"""Seconds for which an expired token is remembered, so that whoever uses it hears why it fails."""


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation."""

    id: str
    digest: str  # SHA-256 of its secret
    expires: float  # seconds since the epoch
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """A device that has joined."""

    name: str
    serial: str  # of its certificate
    token: str  # id of the token that it joined with
    joined: float  # seconds since the epoch
    expires: float  # ... until when its certificate holds
    revoked: bool = False
    quarantined: str = ""  # why it gets no tiles any more; empty: it does


@dataclass(frozen=True, slots=True)
class Register:
    """All tokens and members of a cluster."""

    tokens: tuple[Token, ...] = ()
    members: tuple[Member, ...] = ()

    def issue(self, text: str, *, now: float, lifetime: float) -> Self:
        """Let a token be used for so many seconds; tokens that are long over are forgotten."""
        number, secret, _ = parse_token(text)
        used = {member.token for member in self.members}
        kept = tuple(token for token in self.tokens if token.id in used or now < token.expires + KEPT)
        return replace(self, tokens=(*kept, Token(number, _digest(secret), now + lifetime)))

    def check(self, text: str, name: str, *, now: float) -> Token:
        """The token behind a request to join under a name; raises AccessError with the reason."""
        number, secret, _ = parse_token(text)
        token = next((token for token in self.tokens if token.id == number), None)
        if token is None or not compare_digest(token.digest, _digest(secret)):
            raise AccessError("this token is not known here; ask for a new one (`cleave serve` prints one)")
        if token.revoked:
            raise AccessError(f"token {number} was revoked; ask for a new one")
        if now >= token.expires:
            raise AccessError(f"token {number} expired {now - token.expires:.0f} s ago; ask for a new one")
        if not NAME.fullmatch(name):
            raise AccessError(f"the name {name!r} cannot be used; take letters, digits, '.', '_' and '-', at most 63")
        if any(member.name == name and not member.revoked and now < member.expires for member in self.members):
            raise NameTakenError(f"a device called {name} has joined before; choose another name with --name")
        return token

    def admit(self, member: Member) -> Self:
        """Remember a device that has joined."""
        return replace(self, members=(*self.members, member))

    def revoke(self, which: str) -> Self:
        """Revoke a device by its name, or a token by its id and with it all devices that joined with it."""
        if not any(which in (member.name, member.token) for member in self.members) and not any(
            token.id == which for token in self.tokens
        ):
            known = sorted({member.name for member in self.members if not member.revoked})
            raise AccessError(f"no device and no token is called {which!r}; devices: {', '.join(known) or 'none'}")
        tokens = tuple(replace(t, revoked=True) if t.id == which else t for t in self.tokens)
        members = tuple(replace(m, revoked=True) if which in (m.name, m.token) else m for m in self.members)
        return replace(self, tokens=tokens, members=members)

    def quarantine(self, name: str, why: str) -> Self:
        """Give a device no more tiles, for this reason; the first one stays."""
        members = (replace(m, quarantined=m.quarantined or why) if m.name == name else m for m in self.members)
        return replace(self, members=tuple(members))

    @property
    def quarantined(self) -> dict[str, str]:
        """Devices that get no tiles any more, and why; a name is free again once it was revoked."""
        return {m.name: m.quarantined for m in self.members if m.quarantined and not m.revoked}

    def allows(self, serial: str) -> bool:
        """Whether the certificate with this serial number was given out here and not revoked."""
        return any(member.serial == serial and not member.revoked for member in self.members)

    def to_dict(self) -> dict[str, Any]:
        """As it is written down."""
        return {"tokens": [asdict(token) for token in self.tokens], "members": [asdict(m) for m in self.members]}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Self:
        """As it was written down."""
        return cls(
            tuple(Token(**token) for token in told["tokens"]), tuple(Member(**member) for member in told["members"])
        )


def make_token(pin: str, random: Callable[[int], str]) -> str:
    """A new token; `random` gives so many random bytes in hexadecimal digits."""
    return f"{random(4)}.{random(16)}.{pin}"


def parse_token(text: str) -> tuple[str, str, str]:
    """Id, secret and pin of a token."""
    parts = text.split(".")
    if tuple(map(len, parts)) != LENGTHS or set("".join(parts)) - set("0123456789abcdef"):
        raise AccessError("this is no token; copy the whole line that `cleave serve` printed")
    return parts[0], parts[1], parts[2]


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
