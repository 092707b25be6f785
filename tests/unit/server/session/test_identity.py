"""The identity of a client."""

from __future__ import annotations

import os

import pytest

from tierd.errors import ConfigError, NotPermitted
from tierd.server.session.identity import IdentityRules, Peer, identify, load_rules

SECRET = "0123456789abcdef"
DOMAINS = {"search": 7, "uid-1234": 8, "ads": 9, "uid-0": 10, "uid-77": 11, "nobody": 12}


def who(uid, *, credential=None, **rules):
    return identify(
        Peer(pid=42, uid=uid, start_time=1),
        credential=credential,
        rules=IdentityRules(**({"owner": 77, "foreign_uid": 65534} | rules)),
        domain_of=DOMAINS.__getitem__,
    )


def test_tenant_of_an_unlisted_uid():
    """A uid that is not listed is its own tenant."""
    assert (who(1234).tenant, who(1234).domain, who(1234).pid) == ("uid-1234", 8, 42)


def test_tenant_of_a_listed_uid():
    """A listed uid belongs to the tenant that the configuration names."""
    assert who(1234, tenants={1234: "search"}).tenant == "search"


def test_credential_overrules_the_uid():
    """A credential names the tenant even if every client has the same uid."""
    found = who(0, credential=SECRET, tenants={0: "search"}, credentials={"ads": SECRET})
    assert (found.tenant, found.domain) == ("ads", 9)


@pytest.mark.parametrize("credential", ["", "wrong", SECRET[:-1], SECRET + "0", "héllo"])
def test_wrong_credential(credential):
    """A wrong credential is refused, and never treated as no credential."""
    with pytest.raises(NotPermitted, match="credential"):
        who(1234, credential=credential, credentials={"ads": SECRET})


def test_only_root_and_the_owner_are_operators():
    """Root and the daemon's own user are operators; a credential makes no client an operator."""
    assert who(0).is_admin
    assert who(77).is_admin
    assert not who(1234).is_admin
    assert not who(0, credential=SECRET, credentials={"ads": SECRET}).is_admin


def test_unmapped_uid():
    """The uid that stands for every unmapped user has no tenant, unless the configuration names one."""
    with pytest.raises(NotPermitted, match="user namespace"):
        who(65534)
    assert who(65534, tenants={65534: "nobody"}).tenant == "nobody"


def test_credential_file(tmp_path):
    """The file has one credential a line and may hold comments."""
    path = tmp_path / "credentials"
    path.write_text(f"# ours\n\nads {SECRET}  # rotated\nsearch {SECRET[::-1]}\n")
    rules = load_rules({5: "five"}, str(path))
    assert rules.credentials == {"ads": SECRET, "search": SECRET[::-1]}
    assert (rules.tenants, rules.owner) == ({5: "five"}, os.geteuid())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ads", "two words"),
        (f"ads {SECRET} x", "two words"),
        ("ads short", "openssl"),
        (f"ads {SECRET}\nads {SECRET[::-1]}", "line 2"),
        (f"ads {SECRET}\nsearch {SECRET}", "is repeated"),
        ("a" * 65 + " " + SECRET, "65 bytes"),
    ],
)
def test_faults_of_the_credential_file(tmp_path, text, fault):
    """A faulty line is named with its number and its remedy, without the secret."""
    path = tmp_path / "credentials"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault) as caught:
        load_rules({}, str(path))
    assert SECRET not in str(caught.value)


def test_missing_credential_file(tmp_path):
    """An unreadable file raises ConfigError."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rules({}, str(tmp_path / "none"))


def test_tenant_names_fit_the_session_table():
    """A tenant whose name is too long for the session table is refused."""
    with pytest.raises(ConfigError, match="65 bytes"):
        load_rules({1: "x" * 65})
