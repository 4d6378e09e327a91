"""Which kernel headers bcc is given, over made-up /usr/src and /lib/modules folders."""

import os

import pytest

from mgpu.errors import NotCapable
from mgpu.probes import headers

ARCH = headers._arch()


def whole(root, name, marker=""):
    """Headers in one folder, as Ubuntu and Fedora have them."""
    folder = root / "usr/src" / name
    write(folder / "include/linux/types.h", marker)
    write(folder / "include/generated/autoconf.h", marker)
    write(folder / "arch" / ARCH / "include/asm/page.h", marker)
    return folder


def split(root, version, flavour="amd64"):
    """Debian's two folders."""
    common = root / f"usr/src/linux-headers-{version}-common"
    write(common / "include/linux/types.h", "common")
    write(common / "include/uapi/linux/bpf.h", "common")
    write(common / "arch" / ARCH / "include/asm/page.h", "common")
    own = root / f"usr/src/linux-headers-{version}-{flavour}"
    write(own / "include/generated/autoconf.h", "own")
    write(own / "include/linux/version.h", "own")
    write(own / "arch" / ARCH / "include/generated/asm/x.h", "own")
    return own


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_headers_is_one_line_with_the_remedy(tmp_path):
    with pytest.raises(NotCapable) as refused:
        headers.prepare(tmp_path / "run", tmp_path)
    assert "no kernel headers are installed" in str(refused.value)
    assert "linux-headers-amd64" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_whole_folder_is_taken_as_it_is(tmp_path):
    folder = whole(tmp_path, "linux-headers-5.15.0-100-generic")
    assert headers.prepare(tmp_path / "run", tmp_path) == folder
    assert not (tmp_path / "run").exists()


def test_the_running_kernels_own_come_first(tmp_path):
    whole(tmp_path, "linux-headers-99.0.0-1-generic")
    own = whole(tmp_path, "own")
    modules = tmp_path / "lib/modules" / os.uname().release
    modules.mkdir(parents=True)
    (modules / "build").symlink_to(own)
    assert headers.prepare(tmp_path / "run", tmp_path) == modules / "build"


def test_the_newest_by_number_not_by_letter(tmp_path):
    whole(tmp_path, "linux-headers-6.9.0-1-generic")
    newest = whole(tmp_path, "linux-headers-6.10.0-1-generic")
    assert headers.prepare(tmp_path / "run", tmp_path) == newest


def test_half_a_package_is_passed_over(tmp_path):
    folder = whole(tmp_path, "linux-headers-6.1.0-1-generic")
    write(tmp_path / "usr/src/linux-headers-6.2.0-1-generic/include/linux/types.h", "")
    assert headers.prepare(tmp_path / "run", tmp_path) == folder


def test_debians_two_packages_are_joined(tmp_path):
    split(tmp_path, "6.1.0-32")
    joined = headers.prepare(tmp_path / "run", tmp_path)
    assert joined == tmp_path / "run/headers"
    assert (joined / "include/linux/types.h").read_text() == "common"
    assert (joined / "include/linux/version.h").read_text() == "own"
    assert (joined / "include/uapi/linux/bpf.h").read_text() == "common"
    assert (joined / "include/generated/autoconf.h").read_text() == "own"
    assert (joined / f"arch/{ARCH}/include/asm/page.h").read_text() == "common"
    assert (joined / f"arch/{ARCH}/include/generated/asm/x.h").read_text() == "own"


def test_joined_once_and_anew_for_another_version(tmp_path):
    split(tmp_path, "6.1.0-32")
    joined = headers.prepare(tmp_path / "run", tmp_path)
    (joined / "mark").touch()
    headers.prepare(tmp_path / "run", tmp_path)
    assert (joined / "mark").exists()
    split(tmp_path, "6.1.0-33")
    headers.prepare(tmp_path / "run", tmp_path)
    assert not (joined / "mark").exists()


def test_what_a_killed_join_left_is_begun_anew(tmp_path):
    split(tmp_path, "6.1.0-32")
    write(tmp_path / "run/headers/include/linux/types.h", "stale")
    joined = headers.prepare(tmp_path / "run", tmp_path)
    assert (joined / "include/linux/types.h").read_text() == "common"


def test_common_alone_is_not_enough(tmp_path):
    own = split(tmp_path, "6.1.0-32")
    (own / "include/generated/autoconf.h").unlink()
    with pytest.raises(NotCapable):
        headers.prepare(tmp_path / "run", tmp_path)
