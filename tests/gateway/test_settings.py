"""Settings: precedence, sources, and errors that point at the place to mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Settings, check_redis_url
from gateway.config.section import check_worker_url
from gateway.settings import ConfigError, describe, load
from gateway.unsupported import files_not_here, unsupported, variables_not_here

MINIMAL = """\
server: {port: 9000}
pools:
  - name: chat
    models: [m]
    workers:
      - {id: w0, url: "http://127.0.0.1:8101/"}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def test_a_flag_beats_the_environment_which_beats_the_file(write) -> None:
    path = write(MINIMAL)

    from_file, _ = load(path, environ={})
    from_env, _ = load(path, environ={"WARMLANE_SERVER__PORT": "9001"})
    from_flag, layered = load(
        path, environ={"WARMLANE_SERVER__PORT": "9001"}, flags={("server", "port"): 9002}
    )

    assert [s.server.port for s in (from_file, from_env, from_flag)] == [9000, 9001, 9002]
    sources = {key: source for key, _, source in describe(from_flag, layered)}
    assert sources["server.port"] == "flag --port"
    assert sources["server.drain_s"] == "default"
    assert sources["pools.0.name"] == f"{path}:3"


def test_a_trailing_slash_of_a_worker_url_does_not_matter(write) -> None:
    settings, _ = load(write(MINIMAL), environ={})

    assert settings.pools[0].workers[0].url == "http://127.0.0.1:8101"


BROKEN = {
    "unknown section": (MINIMAL + "colour: blue\n", ":7: colour: unknown key 'colour'"),
    "unknown nested key": (
        MINIMAL.replace("models: [m]", "models: [m]\n    modles: [x]"),
        ":5: pools.0.modles: unknown key 'modles'",
    ),
    "a typo": (
        MINIMAL.replace("models:", "modles:"),
        ":4: pools.0.modles: unknown key 'modles'; did you mean 'models'?",
    ),
    "a key of another kind of section": (
        MINIMAL.replace("models: [m]", "models: [m]\n    discovery: {type: file, file: w}"),
        ":5: pools.0.discovery.file: unknown key 'file'; expected one of path, type",
    ),
    "a list that is text": (
        MINIMAL.replace("[m]", "m"),
        ":4: pools.0.models: expected a list ([a, b], or lines that begin with -), got text",
    ),
    "a list that is nothing": ("pools:\n", ":1: pools: expected a list ([a, b], or lines that"),
    "a mapping that is nothing": (
        MINIMAL.replace(" {port: 9000}", ""),
        ":1: server: expected a mapping (key: value), got nothing",
    ),
    "an item that is nothing": (
        "pools:\n  -\n",
        ":2: pools.0: expected a mapping (key: value), got nothing",
    ),
    "a word that is none of the list": (
        MINIMAL + "routing: {mode: round_robin}\n",
        ":7: routing.mode: expected 'observe', 'cost' or 'least_load', got 'round_robin'",
    ),
    "a number with a unit": (
        MINIMAL.replace("port: 9000", "drain_s: 30s"),
        ":1: server.drain_s: expected a number, got '30s'",
    ),
    "a number out of bounds": (
        MINIMAL.replace("port: 9000", "max_body_mb: 0"),
        ":1: server.max_body_mb: expected more than 0, got 0",
    ),
    "a number without end": (
        MINIMAL.replace("port: 9000", "drain_s: .inf"),
        ":1: server.drain_s: expected a finite number, got inf",
    ),
    "a switch for a number": (
        MINIMAL.replace("port: 9000", "port: yes"),
        ":1: server.port: expected a number, got true (YAML reads yes, no, on and off so)",
    ),
    "a switch for a rank": (
        MINIMAL + "tenants: [{name: a, priority: on}]\n",
        ":7: tenants.0.priority: expected a number, got true",
    ),
    "a worker's name with a space": (
        MINIMAL.replace("w0", "w 0"),
        ":6: pools.0.workers.0.id: expected letters, digits and . _ : - only",
    ),
    "a worker's URL with the API's prefix": (
        MINIMAL.replace("8101/", "8101/v1"),
        ":6: pools.0.workers.0.url: expected the address without /v1, which is added",
    ),
    "a time zone that is none": (
        MINIMAL.replace("models: [m]", "models: [m]\n    timezone: Mars/Phobos"),
        ":5: pools.0.timezone: expected a time zone such as UTC or Europe/Berlin, got 'Mars/",
    ),
    "one port for two": (
        MINIMAL.replace("port: 9000", "port: 9000, admin_port: 9000"),
        ":1: server.admin_port: 9000 is server.port",
    ),
    "a tab": (
        "pools:\n\t- name: chat\n",
        ":2: not valid YAML: found character '\\t' that cannot start any token; YAML is indented "
        "by spaces",
    ),
    "an alias in itself": ("pools: &a [*a]\n", ": an alias (*) stands inside its own anchor (&)"),
    "nested without end": ("[" * 5000, ": nested too deeply"),
    "a key that is a number": (MINIMAL + "1: 2\n", ":7: 1: expected text as a key"),
    "a file that is text": ("hello\n", ":1: expected a mapping of sections, got str"),
    "an empty file": ("", "pools: is required"),
    "wrong type": (MINIMAL.replace("9000", "many"), ":1: server.port: "),
    "out of range": (MINIMAL.replace("9000", "90000"), ":1: server.port: "),
    "bare IPv6 worker": (
        MINIMAL.replace("http://127.0.0.1:8101/", "::1:18001"),
        ":6: pools.0.workers.0.url: expected http://HOST[:PORT] (an IPv6 host in brackets)",
    ),
    "a required key missing": (MINIMAL.replace("models: [m]\n    ", ""), "pools.0.models: is requ"),
    "no pools": ("server: {}\n", "pools: is required"),
    "not YAML": ("pools: [", ": not valid YAML"),
    "a list at the top": ("- 1\n", ":1: expected a mapping of sections, got list"),
    "a key twice": (MINIMAL + "server: {}\n", ":7: server: stands twice"),
    "an alias to nowhere": (
        MINIMAL.replace("models: [m]", "models: [m]\n    aliases: {a: other}"),
        "alias 'a' points to 'other', expected one of m",
    ),
    "the same worker id twice": (
        MINIMAL + '      - {id: w0, url: "http://h:1"}\n',
        "these stand twice: w0",
    ),
    "a model in two pools": (
        MINIMAL + "  - {name: other, models: [m]}\n",
        ":7: pools.1.models: 'm' is also served by chat: expected weights on both, or a route or a",
    ),
    "an odd event address": (
        MINIMAL.replace("8101/", '8101/", kv_events: "127.0.0.1:5'),
        "expected tcp://HOST:PORT or ipc://PATH",
    ),
    "another number of replay addresses": (
        MINIMAL.replace(
            '8101/"', '8101/", kv_events: ["tcp://h:1", "tcp://h:2"], kv_replay: "tcp://h:3"'
        ),
        ":6: pools.0.workers.0: kv_replay: expected 2 as in kv_events, got 1",
    ),
    "redis without its address": (
        MINIMAL + "index: {backend: redis}\n",
        ":7: index.backend: redis needs index.url, for example redis://",
    ),
    "an address that is no redis": (
        MINIMAL + "index: {backend: redis, url: 'http://h'}\n",
        ":7: index.url: expected redis://HOST",
    ),
    "several processes with nothing shared": (
        MINIMAL.replace("port: 9000", "processes: 4"),
        ":1: server.processes: 4 processes need a shared index: set index.backend to redis and",
    ),
    "a peer that is no network": (
        MINIMAL.replace("port: 9000", "access: {trusted_peers: [10.0.0.1/8]}"),
        ":1: server.access.trusted_peers: expected addresses or networks",
    ),
    "a tenant twice": (
        MINIMAL + "tenants: [{name: a}, {name: a}]\n",
        ":7: tenants.1.name: 'a' stands twice",
    ),
    "a fallback to nowhere": (
        MINIMAL.replace("models: [m]", "models: [m]\n    fallback: x"),
        ":5: pools.0.fallback: there is no pool 'x', expected one of chat",
    ),
    "a fallback with other models": (
        MINIMAL.replace("models: [m]", "models: [m]\n    fallback: o")
        + "  - {name: o, models: [n]}\n",
        ":5: pools.0.fallback: pool 'o' does not serve m",
    ),
    "a fallback to itself": (
        MINIMAL.replace("models: [m]", "models: [m]\n    fallback: chat"),
        ":5: pools.0.fallback: fallbacks go in a circle: chat -> chat",
    ),
    "fallbacks in a circle": (
        MINIMAL.replace("models: [m]", "models: [m]\n    fallback: o")
        + "  - {name: o, models: [m], fallback: chat}\n",
        "fallbacks go in a circle: chat -> o -> chat",
    ),
    "weights that are all zero": (
        MINIMAL.replace("models: [m]", "models: [m]\n    weight: 0")
        + "  - {name: o, models: [m], weight: 0}\n",
        ":5: pools.0.weight: no pool that serves 'm' has a weight above 0",
    ),
    "a weight on one of two": (
        MINIMAL.replace("models: [m]", "models: [m]\n    weight: 1")
        + "  - {name: o, models: [m]}\n",
        ":8: pools.1.models: 'm' is also served by chat: expected weights on both",
    ),
    "a route to nowhere": (
        MINIMAL + "routes:\n  - {pool: x}\n",
        ":8: routes.0.pool: there is no pool 'x', expected one of chat",
    ),
    "a route by a model of another pool": (
        MINIMAL + "routes:\n  - match: {model: n}\n    pool: chat\n",
        ":8: routes.0.match.model: pool 'chat' does not serve 'n', it serves m",
    ),
    "a route by what no request can be": (
        MINIMAL
        + "routes:\n  - match: {prompt_tokens_min: 9, prompt_tokens_max: 8}\n    pool: chat\n",
        ":8: routes.0.match: prompt_tokens_min 9 is above prompt_tokens_max 8",
    ),
    "a share above all": (
        MINIMAL + "routes:\n  - match: {known_reuse_min: 1.5}\n    pool: chat\n",
        ":8: routes.0.match.known_reuse_min: ",
    ),
    "a route behind one that takes all": (
        MINIMAL + "routes:\n  - {pool: chat}\n  - {match: {tenant: a}, pool: chat}\n",
        ":9: routes.1: is never reached: routes[0] takes all that it matches",
    ),
    "a route inside a wider one": (
        MINIMAL
        + "routes:\n  - {match: {header: {X-Team: s}, prompt_tokens_min: 5}, pool: chat}\n"
        + "  - {match: {header: {x-team: s, x-b: c}, prompt_tokens_min: 7}, pool: chat}\n",
        ":9: routes.1: is never reached",
    ),
}


@pytest.mark.parametrize(("text", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_wrong_file_is_refused_with_its_line(write, text: str, expected: str) -> None:
    path = write(text)

    with pytest.raises(ConfigError) as caught:
        load(path, environ={})

    assert expected in str(caught.value)
    assert path in str(caught.value)


def test_a_wrong_environment_variable_is_named(write) -> None:
    with pytest.raises(ConfigError, match="environment variable WARMLANE_SERVER__DRAIN: "):
        load(write(MINIMAL), environ={"WARMLANE_SERVER__DRAIN": "3"})


def test_a_list_is_said_by_a_variable_as_a_whole(write) -> None:
    workers = "[{id: w0, url: 'http://h:1'}]"
    environ = {"WARMLANE_POOLS": f"[{{name: other, models: [m], workers: {workers}}}]"}

    settings, _ = load(write(MINIMAL), environ=environ)

    assert [pool.name for pool in settings.pools] == ["other"]
    with pytest.raises(ConfigError, match="variable WARMLANE_POOLS__0__NAME: pools: is a list"):
        load(write(MINIMAL), environ={"WARMLANE_POOLS__0__NAME": "x"})


OTHERS = ["WARMLANE_ADMIN_TOKEN", "WARMLANE_SERVICE_HOST", "WARMLANE_PORT_8080_TCP_ADDR"]


@pytest.mark.parametrize("name", [*OTHERS, "WARMLANE_RUNNER__PORT", "WARMLANE_INDEX_PORT"])
def test_variables_that_are_not_the_configurations_are_left_alone(write, name: str) -> None:
    assert load(write(MINIMAL), environ={name: "tcp://10.0.0.1:1"})[0].server.port == 9000


UNREADABLE = {"a folder": None, "not UTF-8": b"\xff\xfe"}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.yaml"
    path.mkdir() if content is None else path.write_bytes(content)

    with pytest.raises(ConfigError, match="cannot read the configuration: ") as caught:
        load(str(path), environ={})

    assert str(caught.value).count(str(path)) == 1
    assert "Errno" not in str(caught.value)


def test_without_a_file_the_option_is_named() -> None:
    with pytest.raises(ConfigError, match="no --config FILE: pools: is required"):
        load(None, environ={})


def test_a_secret_in_place_of_its_variables_name_is_not_shown(write) -> None:
    key = "sk-this-is-the-key-itself"
    text = MINIMAL + f"tenants: [{{name: a, key_env: {key}}}]\n"

    with pytest.raises(ConfigError, match="expected the name of an environment variable") as caught:
        load(write(text), environ={})

    assert key not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read"):
        load(str(tmp_path / "nowhere.yaml"), environ={})


GOOD_URLS = [
    "http://h",
    "http://h:1",
    "https://h.example:443",
    "http://[::1]:18001",
    "http://[::1]",
]
BAD_URLS = [
    "http://h/\\",
    "h:1",
    "ftp://h",
    "http://",
    "http://h:0",
    "http://h:99999",
    "::1",
    "http://::1:80",
    "",
]


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_worker_url_with_scheme_and_host_is_taken(url: str) -> None:
    assert check_worker_url(url) == url


@pytest.mark.parametrize("url", BAD_URLS)
def test_any_other_worker_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST"):
        check_worker_url(url)


IGNORED = {
    "tenants[acme]": (MINIMAL + "tenants: [{name: acme, weight: 2}]\n"),
}


@pytest.mark.parametrize(("name", "text"), IGNORED.items(), ids=IGNORED)
def test_what_is_without_effect_and_harms_nobody_is_warned_of(write, name: str, text: str) -> None:
    settings, _ = load(write(text), environ={})

    errors, warnings = unsupported(settings)

    assert errors == []
    assert [warning.split(":")[0] for warning in warnings] == [name]


def test_the_defaults_are_all_supported(write) -> None:
    settings, _ = load(write(MINIMAL), environ={})

    assert unsupported(settings) == ([], [])


ALLOWED = {
    "weights": MINIMAL.replace("models: [m]", "models: [m]\n    weight: 95")
    + "  - {name: o, models: [m], weight: 5}\n",
    "a fallback that serves more": MINIMAL.replace("models: [m]", "models: [m]\n    fallback: o")
    + "  - {name: o, models: [m, n]}\n",
    "a route that names the second pool": MINIMAL
    + "  - {name: o, models: [m]}\nroutes: [{match: {tenant: a}, pool: o}]\n",
    "routes of which none takes all of another": MINIMAL
    + "  - {name: o, models: [m, n]}\nroutes:\n"
    + "  - {match: {tenant: a, prompt_tokens_min: 5}, pool: chat}\n"
    + "  - {match: {tenant: a}, pool: chat}\n"
    + "  - {match: {tenant: a}, pool: o}\n"
    + "  - {match: {known_reuse_max: 0.5}, pool: o}\n"
    + "  - {match: {known_reuse_max: 0.8}, pool: o}\n",
    "a shared index": MINIMAL.replace("port: 9000", "processes: 4")
    + "index: {backend: redis, url: 'redis://h:6379/0'}\n",
    "publishers by rank, one that is listened for": MINIMAL.replace(
        '8101/"', '8101/", kv_events: ["tcp://*:5557", "tcp://[::1]:5558"], kv_topic: kv'
    ),
    "tenants behind a trusted proxy": MINIMAL.replace(
        "port: 9000", "access: {trusted_peers: [10.0.0.0/8, '::1']}"
    )
    + "tenants: [{name: a, weight: 3, priority: -1}]\n",
}


@pytest.mark.parametrize("text", ALLOWED.values(), ids=ALLOWED)
def test_what_goes_together_is_taken_without_a_word(write, text: str) -> None:
    settings, _ = load(write(text), environ={})

    assert unsupported(settings) == ([], [])


GOOD_REDIS = [
    "redis://h",
    "redis://:pw@h:6379/2",
    "rediss://u:pw@h.example:6380",
    "unix:///run/valkey.sock?db=1",
    "redis+sentinel://:pw@a:26379,b:26379/main/0",
    "redis+sentinel://a:26379/main",
]
BAD_REDIS = [
    "h:6379",
    "redis://",
    "redis://h:0",
    "redis://h:port",
    "unix://",
    "redis+sentinel://a/main",
    "redis+sentinel://a:26379",
    "http://:secret@h",
    "",
]


@pytest.mark.parametrize("url", GOOD_REDIS)
def test_a_redis_url_of_every_kind_is_taken(url: str) -> None:
    assert check_redis_url(url) == url


@pytest.mark.parametrize("url", BAD_REDIS)
def test_any_other_redis_url_is_refused_without_repeating_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="expected redis://HOST") as caught:
        check_redis_url(url)

    assert "secret" not in str(caught.value)


def test_the_schema_is_closed_everywhere() -> None:
    schema = Settings.model_json_schema()

    sections = [schema, *schema["$defs"].values()]
    assert all(s["additionalProperties"] is False for s in sections if s["type"] == "object")


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("server: {tls: {cert: /no/c, key: /no/k}}", ["server.tls.cert", "server.tls.key"]),
        ("tenants: [{name: a, keys_file: /no/file}]", ["tenants[a].keys_file"]),
        ("tokenizer: /no", ["pools[chat].tokenizer"]),
        ("template: /no/file", ["pools[chat].template"]),
        ("worker_ca: /no/file", ["pools[chat].worker_ca"]),
        ("weight: 1", []),
    ],
)
def test_files_without_which_a_start_here_fails_are_named(
    tmp_path: Path, section: str, keys: list[str]
) -> None:
    of_pool = "" if section.startswith(("server", "tenants")) else f", {section}"
    worker = 'workers: [{id: w0, url: "https://h:1"}]'
    text = f"pools: [{{name: chat, models: [m], {worker}{of_pool}}}]\n"
    path = tmp_path / "config.yaml"
    path.write_text(text if of_pool else text + section)

    warnings = files_not_here(load(str(path), environ={})[0])

    assert [warning.split(": ")[0] for warning in warnings] == keys


VARIABLES = {
    "server: {access: {admin_token_env: NOT_SET_A}}": ["server.access.admin_token_env"],
    "tenants: [{name: a, key_env: NOT_SET_B}]": ["tenants[a].key_env"],
    "api_key_env: NOT_SET_C": ["pools[chat].api_key_env"],
    "security: {salt_secret_env: NOT_SET_D}": [],
}


@pytest.mark.parametrize(("section", "keys"), VARIABLES.items(), ids=VARIABLES)
def test_variables_without_which_a_start_here_fails_are_named(
    write, section: str, keys: list[str]
) -> None:
    pools = MINIMAL.split("\n", 1)[1]
    of_pool = pools.replace("models: [m]", f"models: [m]\n    {section}")
    text = of_pool if section.startswith("api_key") else pools + section
    settings, _ = load(write(text), environ={})

    assert [warning.split(": ")[0] for warning in variables_not_here(settings)] == keys


def test_a_list_that_is_too_short_is_told_in_words_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("pools: []\n")

    with pytest.raises(ConfigError, match=r":1: pools: expected 1 at least$"):
        load(str(path), environ={})
