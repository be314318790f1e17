"""The authority of a cluster, and the certificates that it signs: each says one role.

Only the scheduler and the server may be connected to: certificates of clients and devices lack the key usage that a TLS
server needs, so that every TLS library refuses a device that poses as the scheduler.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cleave_dask.errors import AccessError
from cleave_dask.runtime.roles import NAME, Role

AUTHORITY_DAYS = 3650
"""Days for which the authority and the certificates of its own machine hold."""

_SKEW = timedelta(hours=1)  # clocks of devices differ
_USAGES = {
    "scheduler": [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    "server": [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
    "client": [ExtendedKeyUsageOID.CLIENT_AUTH],
    "device": [ExtendedKeyUsageOID.CLIENT_AUTH],
}


class Authority:
    """Signs certificates: whoever holds its key decides who takes part."""

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self.certificate = x509.load_pem_x509_certificate(certificate)
        loaded = serialization.load_pem_private_key(key, password=None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded

    @staticmethod
    def create(now: datetime) -> tuple[bytes, bytes]:
        """Certificate and key of a new authority, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("cleave authority", None)
        builder = _builder(key.public_key(), name, name, now, AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs=True), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), _private(key)

    def issue(self, role: Role, name: str, now: datetime, days: float = AUTHORITY_DAYS) -> tuple[bytes, bytes]:
        """Certificate and key for a process of this machine, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._certify(key.public_key(), role, name, now, days), _private(key)

    def sign(self, request: bytes, role: Role, name: str, now: datetime, days: float) -> bytes:
        """A certificate for the key in a signing request; of the request nothing but the key is used."""
        try:
            parsed = x509.load_pem_x509_csr(request)
            key = parsed.public_key()
            valid = parsed.is_signature_valid
        except Exception as error:  # its parser has many kinds of them, and the bytes are a stranger's
            raise AccessError(
                "the signing request cannot be read; join with the same version of cleave-dask"
            ) from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not valid:
            raise AccessError("the signing request has no P-256 key that it is signed with")
        return self._certify(key, role, name, now, days)

    def _certify(self, key: ec.EllipticCurvePublicKey, role: Role, name: str, now: datetime, days: float) -> bytes:
        if not NAME.fullmatch(name):
            raise AccessError(f"the name {name!r} cannot be used; take letters, digits, '.', '_' and '-', at most 63")
        builder = _builder(key, _name(name, role), self.certificate.subject, now, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(_USAGES[role]), critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM)


def make_request(name: str) -> tuple[bytes, bytes]:
    """A new key and a signing request for it, as PEM; the key stays where it was made."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name, "device")).sign(key, hashes.SHA256())
    return _private(key), request.public_bytes(serialization.Encoding.PEM)


def serial_of(certificate: bytes) -> str:
    """The serial number of a PEM certificate, written as `roles.Peer` does."""
    return f"{x509.load_pem_x509_certificate(certificate).serial_number:x}"


def name_of(certificate: bytes) -> str:
    """Whom a PEM certificate names."""
    (name,) = x509.load_pem_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def expiry_of(certificate: bytes) -> datetime:
    """Until when a PEM certificate holds."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate, in hexadecimal digits."""
    der = x509.load_pem_x509_certificate(certificate).public_bytes(serialization.Encoding.DER)
    return sha256(der).hexdigest()


def _name(name: str, role: Role | None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if role is not None:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name(attributes)


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, now: datetime, days: float
) -> x509.CertificateBuilder:
    now = now.astimezone(UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _SKEW,
        not_valid_after=now + timedelta(days=days),
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
