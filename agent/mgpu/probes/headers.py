"""Kernel headers for bcc: any installed ones serve, as the programs read no kernel struct."""

import os
import platform
import re
import shutil
from pathlib import Path
from typing import List, Optional, Tuple

from mgpu.errors import NotCapable

ARCH = {"x86_64": "x86", "aarch64": "arm64"}


def prepare(run_dir: Path, root: Path = Path("/")) -> Path:
    """A folder that can be bcc's BCC_KERNEL_SOURCE: that of the running kernel, else the newest.

    Debian splits the headers over two packages; then a folder of links under ``run_dir`` joins
    them. Raises NotCapable when no headers are installed.
    """
    build = root / "lib/modules" / os.uname().release / "build"
    candidates = [build] if build.is_dir() else []
    candidates += sorted(root.glob("usr/src/linux-headers-*"), key=_version, reverse=True)
    for folder in candidates:
        if _is_whole(folder):
            return folder
        common = _common_of(folder)
        if common is not None:
            return _joined(folder.resolve(), common, run_dir / "headers")
    raise NotCapable(
        "tracker cuda",
        "no kernel headers are installed, which compiling the eBPF programs needs",
        "install linux-headers-amd64 (Debian), linux-headers-generic (Ubuntu) or kernel-devel",
    )


def _version(folder: Path) -> Tuple[List[int], str]:
    return [int(number) for number in re.findall(r"\d+", folder.name)], folder.name


def _arch() -> str:
    return ARCH.get(platform.machine(), platform.machine())


def _is_whole(folder: Path) -> bool:
    return all(
        (folder / part).exists()
        for part in ("include/linux/types.h", "include/generated/autoconf.h", "arch/" + _arch())
    )


def _common_of(folder: Path) -> Optional[Path]:
    """Debian's folder of the headers common to all flavours of this version."""
    resolved = folder.resolve()
    common = resolved.parent / re.sub(r"-[a-z0-9]+$", "-common", resolved.name)
    generated = resolved / "include/generated/autoconf.h"
    if common != resolved and generated.exists() and (common / "include/linux").is_dir():
        return common
    return None


def _joined(flavour: Path, common: Path, target: Path) -> Path:
    """A folder of links: common's include and arch, overlaid by the flavour's."""
    stamp = target / f".{flavour.name}"
    if stamp.exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    for part in ("include", f"arch/{_arch()}/include"):
        for source in (common / part, flavour / part):
            _link_tree(source, target / part)
    stamp.touch()
    return target


def _link_tree(source: Path, target: Path) -> None:
    """Links to the entries of ``source``; a folder that both sides have is merged one level on."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir()) if source.is_dir() else []:
        place = target / entry.name
        if place.is_symlink() and place.is_dir() and entry.is_dir():
            first = place.resolve()
            place.unlink()
            _link_tree(first, place)
        if place.is_dir() and not place.is_symlink():
            _link_tree(entry, place)
        else:
            if place.is_symlink():
                place.unlink()
            place.symlink_to(entry)
