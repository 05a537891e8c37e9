"""A self-signed certificate for the profile `tls`; and the generated messages, imported without their warnings."""

import datetime as dt
import ipaddress
import warnings
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

with warnings.catch_warnings():
    # As in `render`: pydantic's complaint about generated code, once, at import.
    warnings.simplefilter("ignore", DeprecationWarning)
    import extproc.envoy_config.listener  # noqa: F401


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Chain and key files for 127.0.0.1 and picker.example.com."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "picker")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("picker.example.com"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain_file, key_file = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain_file, key_file
