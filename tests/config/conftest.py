import pytest


@pytest.fixture
def variables(monkeypatch):
    """Variables of several types for placeholders, and one that is not set."""
    monkeypatch.setenv("AM_TOKEN", "s3cr3t-value")
    monkeypatch.setenv("AM_PORT", "8080")
    monkeypatch.setenv("AM_FLAG", "true")
    monkeypatch.setenv("AM_LIST", "[1, 2]")
    monkeypatch.setenv("AM_DOLLAR", "pa$word")
    monkeypatch.delenv("AM_MISSING", raising=False)
    return monkeypatch
