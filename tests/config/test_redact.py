import pytest

from automodel.config.redact import REDACTED, is_sensitive_key, redact_text


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "DB_PASSWORD",
        "passwd",
        "pwd",
        "secret",
        "client_secret",
        "api_key",
        "apiKey",
        "APIKey",
        "apikey",
        "OPENAI_API_KEY",
        "aws_access_key",
        "private-key",
        "credential",
        "auth",
        "authorization",
        "bearer",
        "token",
        "hf_token",
        "DATABRICKS_TOKEN",
        "access_token",
        "authToken",
    ],
)
def test_sensitive_keys(name):
    assert is_sensitive_key(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "num_tokens",
        "max_new_tokens",
        "author",
        "authors",
        "eos_token",
        "bos_token",
        "pad_token",
        "unk_token",
        "mask_token",
        "sep_token",
        "cls_token",
        "pad_token_id",
        "key",
        "keys",
        "lr",
        "monkey",
        "_",
    ],
)
def test_harmless_keys(name):
    assert not is_sensitive_key(name)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("https://me:pw@host/x", f"https://me:{REDACTED}@host/x"),
        ("postgresql+psycopg://me:p%20w@db:5432/x", f"postgresql+psycopg://me:{REDACTED}@db:5432/x"),
        ("from s3://a:b@c to s3://d:e@f", f"from s3://a:{REDACTED}@c to s3://d:{REDACTED}@f"),
        ("redis://:pw@host", f"redis://:{REDACTED}@host"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://me@host", "https://me@host"),
        ("plain: text @ all", "plain: text @ all"),
    ],
)
def test_passwords_inside_urls(text, safe):
    assert redact_text(text) == safe
