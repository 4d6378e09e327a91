"""agent.conf: defaults, forms, refusals, and the two texts that describe it."""

import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import config
from mgpu.config import KEYS, Config, Listen
from mgpu.errors import ConfigInvalid
from mgpu.model import Enforcer, Policy
from mgpu.placement import Strategy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "packaging/agent.conf").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| `\w+` \|", line) and line.count("|") == 6
]


def parse(line):
    return Config.parse(f"[agent]\n{line}\n")


def refusal(text):
    with pytest.raises(ConfigInvalid) as caught:
        Config.parse(text, "/etc/mgpu/agent.conf")
    line = str(caught.value)
    assert "\n" not in line and line.isprintable() and len(line) < 300
    return line


def test_defaults_are_those_of_the_design():
    made = Config()
    assert made.socket == Path("/run/mgpu/agent.sock")
    assert made.group == "mgpu"
    assert made.state == Path("/var/lib/mgpu/state.db")
    assert made.metrics_listen == Listen("127.0.0.1", 19735)
    assert made.bpf_root == Path("/sys/fs/bpf/mgpu")
    assert made.policy is Policy.FIXED_SHARE
    assert (made.card_placement, made.node_placement) == (Strategy.BINPACK, Strategy.SPREAD)
    assert (made.tracker, made.enforce) == ("auto", None)


def test_an_empty_file_and_a_bare_section_give_the_defaults():
    assert Config.parse("") == Config.parse("[agent]\n") == Config()


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("socket = /tmp/a.sock", "socket", Path("/tmp/a.sock")),
        ("socket=/tmp//x/../a.sock", "socket", Path("/tmp/a.sock")),
        ("group = 0", "group", "0"),
        ("metrics_listen =", "metrics_listen", None),
        ("metrics_listen = 0.0.0.0:9", "metrics_listen", Listen("0.0.0.0", 9)),
        ("metrics_listen = [::1]:19735", "metrics_listen", Listen("::1", 19735)),
        ("metrics_listen = localhost:0", "metrics_listen", Listen("localhost", 0)),
        ("policy = native-burst-share", "policy", Policy.NATIVE_BURST_SHARE),
        ("card_placement = spread", "card_placement", Strategy.SPREAD),
        ("enforce = observe", "enforce", Enforcer.OBSERVE),
        ("enforce = auto", "enforce", None),
        ("reserve_mib = 512", "reserve_mib", 512),
        ("reconcile_interval_s = 0.5", "reconcile_interval_s", 0.5),
        ("reconcile_interval_s = 3  # seconds", "reconcile_interval_s", 3.0),
        ("context_mib = 0 ; none", "context_mib", 0),
        ("libcuda_paths = auto", "libcuda_paths", ()),
        ("libcuda_paths = /a/l, /b/l", "libcuda_paths", (Path("/a/l"), Path("/b/l"))),
        ("guard =", "guard", ()),
        ("guard = /a.slice/, /b-*.scope ,", "guard", ("/a.slice", "/b-*.scope")),
        ("node_mode = 0660", "node_mode", 0o660),
        ("node_mode = 660", "node_mode", 0o660),
        ("bpf_source = auto", "bpf_source", None),
        ("bpf_source = /x", "bpf_source", Path("/x")),
    ],
)  # fmt: skip
def test_values(line, key, value):
    assert parse(line) == replace(Config(), **{key: value})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("socket = run/agent.sock", "not an absolute path"),
        ("socket =", "not an absolute path"),
        ("socket = /" + "a" * 107, "longer than the 107 bytes"),
        ("socket = /" + "é" * 54, "longer than the 107 bytes"),
        ("state = ~/state.db", "not an absolute path"),
        ("metrics_listen = 19735", "not an address and port"),
        ("metrics_listen = 127.0.0.1:65536", "not an address and port"),
        ("metrics_listen = 127.0.0.1:http", "not an address and port"),
        ("metrics_listen = ::1:19735", "not an address and port"),
        ("metrics_listen = off", "not an address and port"),
        ("group = a b", "not the name or number"),
        ("group =", "not the name or number"),
        ("policy = 0", "no such choice"),
        ("card_placement = best", "no such choice"),
        ("tracker = rm", "no such choice"),
        ("enforce = Kill", "no such choice"),
        ("log_level = trace", "no such choice"),
        ("simulation = true", "no such choice"),
        ("reserve_mib = 1.5", "not a whole number"),
        ("reserve_mib = -1", "not a whole number"),
        ("reserve_mib = 1048577", "not a whole number"),
        ("reserve_mib = ٣", "not a whole number"),
        ("reserve_mib = " + "9" * 5000, "not a whole number"),
        ("context_mib = yes", "not a whole number"),
        ("reconcile_interval_s = 0", "not a number"),
        ("reconcile_interval_s = fast", "not a number"),
        ("reconcile_interval_s = inf", "not a number"),
        ("reconcile_interval_s = nan", "not a number"),
        ("reconcile_interval_s = 1e1", "not a number"),
        ("reconcile_interval_s = 3601", "not a number"),
        ("node_mode = 0888", "not an octal mode"),
        ("node_mode = rw", "not an octal mode"),
        ("libcuda_paths = auto, /a", "not an absolute path"),
        ("guard = kubepods", "no path below the root"),
        ("guard = /", "no path below the root"),
        ("guard = /a/../b", "no path below the root"),
    ],
)  # fmt: skip
def test_wrong_values_name_file_line_key_and_value(line, why):
    said = refusal(f"# first\n[agent]\n{line}\n")
    key = line.split(" ")[0]
    assert said.startswith(f"/etc/mgpu/agent.conf line 3, {key} = '")
    assert why in said
    assert "; " in said.partition(why)[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\nsockt = /x\n", "line 2, 'sockt': no such key; did you mean socket?"),
        ("[agent]\nzzz = 1\n", "line 2, 'zzz': no such key; docs/configuration.md lists the keys"),
        ("[agent]\nSocket = /x\n", "line 2, 'Socket': no such key; did you mean socket?"),
        ("[agents]\n", "line 1, '[agents]': no such section; the only one is [agent]"),
        ("[agent\n", "line 1, '[agent': no such section; the only one is [agent]"),
        ("socket = /x\n", "line 1, 'socket': before any section; put [agent] above it"),
        ("[agent]\ngroup = a\n\ngroup = b\n", "line 4, group: given twice; keep one of the two"),
        ("[agent]\nsocket\n", "line 2, 'socket': not a setting; write: key = value"),
        ("[agent]\n= 3\n", "line 2, '= 3': not a setting; write: key = value"),
        ("[agent]\nsocket: /x\n", "line 2, 'socket: /x': not a setting; write: key = value"),
    ],
)
def test_wrong_form(text, said):
    assert refusal(text) == f"/etc/mgpu/agent.conf {said}"


@given(st.text())
def test_any_text_is_a_configuration_or_one_line(text):
    try:
        Config.parse(f"[agent]\n{text}")
    except ConfigInvalid as error:
        assert str(error).isprintable() and len(str(error)) < 300


@given(st.sampled_from(sorted(KEYS)), st.text(alphabet=st.characters(blacklist_characters="\n#;")))
def test_any_value_is_taken_or_refused_in_one_line(key, value):
    try:
        parse(f"{key} = {value}")
    except ConfigInvalid as error:
        assert f"line 2, {key}" in str(error)


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "agent.conf"
    path.write_bytes(b"\xef\xbb\xbf[agent]\r\ngroup = video\r\n")
    assert Config.load(path).group == "video"


def test_missing_file(tmp_path):
    with pytest.raises(ConfigInvalid) as caught:
        Config.load(tmp_path / "agent.conf")
    assert "cannot be read (No such file or directory)" in str(caught.value)


def test_the_default_file_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "agent.conf")
    assert Config.load() == Config()
    (tmp_path / "agent.conf").write_text("[agent]\ngroup = video\n")
    assert Config.load().group == "video"


@pytest.mark.parametrize("kind", ["directory", "dangling link", "socket"])
def test_what_is_no_readable_file(tmp_path, kind, monkeypatch):
    path = tmp_path / "agent.conf"
    if kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(str(path), 0o140600)
    else:
        path.symlink_to(tmp_path / "gone")
    monkeypatch.setattr(config, "DEFAULT_PATH", path)
    for named in (path, None):
        with pytest.raises(ConfigInvalid) as caught:
            Config.load(named)
        assert "cannot be read" in str(caught.value)


def test_unreadable_to_this_user(tmp_path):
    path = tmp_path / "agent.conf"
    path.touch(0o000)
    was = os.geteuid()
    try:
        if was == 0:
            os.seteuid(65534)  # root reads every file
        with pytest.raises(ConfigInvalid) as caught:
            Config.load(path)
    finally:
        os.seteuid(was)
    assert "cannot be read (Permission denied)" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[agent]\ngroup = \xff\n", "line 2: not UTF-8 text"),
        (b"#" * 70000, "larger than 65536 bytes"),
        (b"[agent]\ngroup = a\x00b\n", "line 2, group = 'a\\x00b'"),
        (b"[agent]\nsocket = /a\x00b\n", "line 2, socket = '/a\\x00b'"),
    ],
)
def test_files_of_something_else(tmp_path, data, said):
    path = tmp_path / "agent.conf"
    path.write_bytes(data)
    with pytest.raises(ConfigInvalid) as caught:
        Config.load(path)
    assert said in str(caught.value)


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(ConfigInvalid):
        Config.load(Path("/dev/zero"))


def test_what_a_reload_leaves_to_a_restart():
    old = Config()
    new = replace(old, group="video", policy=Policy.NATIVE_BURST_SHARE, bpf_root=Path("/x"))
    assert old.waiting_for_restart(new) == ["group", "bpf_root"]
    assert old.waiting_for_restart(old) == []


def test_every_field_is_a_key():
    assert list(KEYS) == [item.name for item in fields(Config)]


def test_the_page_has_every_key_once_with_its_default_and_when_it_takes_effect():
    assert sorted(row[0].strip("`") for row in ROWS) == sorted(KEYS)
    for name, default, values, changed_by, meaning in ROWS:
        key = KEYS[name.strip("`")]
        assert key.parse(default.strip("`")) == key.default, name
        assert changed_by == ("reload" if key.live else "restart"), name
        assert values and meaning


def test_the_page_quotes_a_refusal():
    assert refusal("[agent]\n\n\n\n\n\nsockt = /x\n") in PAGE


def test_the_default_file_is_all_defaults_and_names_every_key():
    assert Config.parse(EXAMPLE) == Config()
    uncommented = re.sub(r"^#(\w+ =)", r"\1", EXAMPLE, flags=re.MULTILINE)
    assert Config.parse(uncommented) == Config()
    assert sorted(re.findall(r"^#(\w+) =", EXAMPLE, re.MULTILINE)) == sorted(KEYS)


def test_the_default_file_marks_what_needs_a_restart():
    for paragraph in EXAMPLE.split("[agent]")[1].split("\n\n"):
        for name in re.findall(r"^#(\w+) =", paragraph, re.MULTILINE):
            assert ("(restart)" in paragraph) is not KEYS[name].live, name
