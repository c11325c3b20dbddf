import pytest

from automodel.config.redact import (
    REDACTED,
    Secrecy,
    is_sensitive_key,
    key_secrecy,
    redact_text,
    redact_written,
    secret_parts,
)


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
        "dbpassword",
        "myapikey",
        "api_keys",
        "AccountKey",
        "SharedAccessKey",
        "AWS_SECRET_ACCESS_KEY",
        "ssh_passphrase",
        "DATABASE_PASSWD",
        "http.proxy.pwd",
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
        "",
        "secondary",
        "authored_by",
        "author_name",
        "tokenizer_name",
        "image_token",
        "token_ids",
        "access_mode",
        "private",
        "api_version",
        "key_private",
        "compass",
        "forward",
        "pass",
    ],
)
def test_harmless_keys(name):
    assert not is_sensitive_key(name)


@pytest.mark.parametrize(
    ("name", "secrecy"),
    [
        ("token", Secrecy.TEXT),
        ("hf_token", Secrecy.TEXT),
        ("auth_token", Secrecy.ALL),
        ("password", Secrecy.ALL),
        ("eos_token", Secrecy.NONE),
        (5, Secrecy.NONE),
        (None, Secrecy.NONE),
    ],
)
def test_what_a_key_hides(name, secrecy):
    assert key_secrecy(name) is secrecy


R = REDACTED


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("https://me:pw@host/x", f"https://me:{R}@host/x"),
        ("postgresql+psycopg://me:p%20w@db:5432/x", f"postgresql+psycopg://me:{R}@db:5432/x"),
        ("from s3://a:b@c to s3://d:e@f", f"from s3://a:{R}@c to s3://d:{R}@f"),
        ("redis://:pw@host", f"redis://:{R}@host"),
        ("https://me:p@w:x@host/a", f"https://me:{R}@host/a"),
        ("https://me:p/w@host/a", f"https://me:{R}@host/a"),
        ("https://me:p@w/x@host/a", f"https://me:{R}@host/a"),
        ("https://me:p/w@x@host/a", f"https://me:{R}@host/a"),
        ("https://me:12?x@host/a", f"https://me:{R}@host/a"),
        ("https://me:pw@host/a@b", f"https://me:{R}@b"),  # Its path might be the end of a password.
        ("a://me:pw@host,b://me:p@w/x@host", f"a://me:{R}@host,b://me:{R}@host"),
        ("me:pw@host:5432/db", f"me:{R}@host:5432/db"),
        ("dsn is me:p:w@10.0.0.1:5432", f"dsn is me:{R}@10.0.0.1:5432"),
        ("me:pw@host/db and x:y@z.org/db", f"me:{R}@host/db and x:{R}@z.org/db"),
        ("git@github.com:me/x image:tag@sha256:5f1c x:y@z", "git@github.com:me/x image:tag@sha256:5f1c x:y@z"),
        ("run --password abc --x 5", f"run --password {R} --x 5"),
        ("run --api-key 'a b' --eos-token x --token --x", f"run --api-key {R} --eos-token x --token --x"),
        (
            """{"password": "p'w", 'api_key':'x', "pad_token": "p"}""",
            f"""{{"password": "{R}", 'api_key':'{R}', "pad_token": "p"}}""",
        ),
        ("https://me:12/pw@host", "https://me:12/pw@host"),  # Reads as a port and a path.
        ("mongodb://me:pw@h1:1,h2:2/db", f"mongodb://me:{R}@h1:1,h2:2/db"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://me@host", "https://me@host"),
        ("abfss://training-data-2024@account.net/x", "abfss://training-data-2024@account.net/x"),
        ("https://ghp_abcdefghij0123456789@github.com/x", f"https://{R}@github.com/x"),
        ("https://a1B2c3D4e5F6g7H8@host", f"https://{R}@host"),
        ("https://h/x?token=abc&page=2", f"https://h/x?token={R}&page=2"),
        ("host=db user=me password=pw port=1", f"host=db user=me password={R} port=1"),
        ("host=db password='p w' port=1", f"host=db password={R} port=1"),
        ("Server=db;Pwd=my pass;UID=me", f"Server=db;Pwd={R};UID=me"),
        ("AccountName=x;AccountKey=ab/c==;Suffix=y", f"AccountName=x;AccountKey={R};Suffix=y"),
        ("PASSWORD = pw", f"PASSWORD = {R}"),
        ("pad_token=<pad> num_tokens=5", "pad_token=<pad> num_tokens=5"),
        ("Authorization: Bearer abc", f"Authorization: Bearer {R}"),
        ("authorization=abc", f"authorization={R}"),
        ("Bearer abcdef0123456789", f"Bearer {R}"),
        ("the bearer of news", "the bearer of news"),
        ("name hf_" + "a" * 30, f"name {R}"),
        ("plain: text @ all", "plain: text @ all"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("password", "password"),
        ("password=", "password="),
    ],
)
def test_secrets_that_a_text_shows_by_its_form(text, safe):
    assert redact_text(text) == safe
    assert redact_text(safe) == safe


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("${PW}", "${PW}"),
        ("$PW", "$PW"),
        ("${PW,}", "${PW,}"),
        ("${PW,hunter2}", f"${{PW,{R}}}"),
        ("${oc.env:PW,hunter2}", f"${{oc.env:PW,{R}}}"),
        ("hunter2${PW}", f"{R}${{PW}}"),
        ("a${X}b$Y.c", f"{R}${{X}}{R}$Y.c"),
        ("$5abc", R),
        ("", ""),
    ],
)
def test_under_a_sensitive_key_only_placeholders_stay(text, safe):
    assert redact_written(text, Secrecy.ALL) == safe
    assert redact_written(text, Secrecy.TEXT) == safe


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("${LR,0.1}", "${LR,0.1}"),
        ("${DB_PASSWORD,hunter2}", f"${{DB_PASSWORD,{R}}}"),
        ("https://me:${PW}@host/$X", "https://me:${PW}@host/$X"),
        ("https://me:a${PW}b@host", f"https://me:{R}${{PW}}{R}@host"),
        ("https://${TOKEN}@host", "https://${TOKEN}@host"),
        ("${DSN,postgres://me:pw@host}", f"${{DSN,postgres://me:{R}@host}}"),
        ("host=$HOST;password=${PW};x=1", "host=$HOST;password=${PW};x=1"),
        ("host=$HOST password=pw", f"host=$HOST password={R}"),
        # The setting reaches into the placeholder's end: nothing but the placeholder is kept.
        ("${DSN,host=db password=pw} x", f"${{DSN,{R}}}{R}"),
        ("{'password': 'pw', 'x': '${X}'}", f"{{'password': '{R}', 'x': '${{X}}'}}"),
        ("{'password': '${PW}'}", "{'password': '${PW}'}"),
        ("me:${PW}@host:5432/db", "me:${PW}@host:5432/db"),
        ("plain", "plain"),
    ],
)
def test_placeholders_stay_in_what_a_recipe_holds(text, safe):
    assert redact_written(text) == safe


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000 + "= ://",
        "a b=" * 50_000 + "://",
        "a://" * 50_000 + "=",
        "a://" + "b" * 200_000 + "@",
        "a://b:" * 30_000 + "@",
        "a://b:" + "@" * 100_000,
        "a://b:" + "c/" * 100_000,
        "a:b," * 50_000 + "@",
        "a:" * 100_000 + "@",
        "a:b@c" * 40_000,
        "a:b@" + "c" * 200_000,
        "--a " * 50_000,
        "--a" * 70_000 + " ",
        "'a':" * 50_000 + "'",
        "eyJ-" * 50_000,
        "bearer " * 30_000,
        "${a," * 50_000,
        "${a.b" * 50_000 + "}",
        "$" * 200_000 + "}",
        "${a,}" * 5_000 + "${a," * 50_000,
    ],
)
def test_long_texts_take_no_time(text):
    # Any of these would take minutes if the time grew with the square of the length.
    redact_written(text)
    redact_written(text, Secrecy.ALL)


def test_the_parts_of_a_text_that_are_secret():
    assert secret_parts("https://me:p%2Dw@host password='a b'") == ["p%2Dw", "p-w", "a b"]
    assert secret_parts("plain") == []
