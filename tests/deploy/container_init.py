"""The first process of a container, as root in new namespaces: root file system, network, program.

Started by `tests/deploy/site.py` with one argument, a JSON file. Everything it makes is gone when
it ends, since nothing else holds its namespaces.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def connect(name: str, address: str, bridge_namespace: str) -> None:
    """Give it one interface on the site's bridge."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", name)
    run("ip", "link", "set", name, "netns", bridge_namespace)
    inside = ("nsenter", f"--net={bridge_namespace}", "ip", "link", "set", name)
    run(*inside, "master", "site0")
    run(*inside, "up")
    run("ip", "addr", "add", f"{address}/16", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")


def make_root(work: Path, hidden: str, kept: str, readable: str) -> Path:
    """This machine's files without the repository, in a layer whose changes nobody else sees."""
    run("mount", "-t", "tmpfs", "tmpfs", str(work))
    root, upper, scratch = work / "root", work / "upper", work / "scratch"
    for folder in (root, upper, scratch):
        folder.mkdir()
    layers = f"lowerdir=/,upperdir={upper},workdir={scratch}"
    run("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
    # The interpreter may live in a home folder.
    for folder in (Path(readable), *Path(readable).parents):
        inside = root / folder.relative_to("/")
        inside.chmod(inside.stat().st_mode | 0o055)
    run("mount", "-t", "tmpfs", "tmpfs", f"{root}{hidden}")
    bind(root, Path(kept), kept, read_only=True)
    run("mount", "--rbind", "/dev", f"{root}/dev")
    return root


def bind(root: Path, source: Path, target: str, *, read_only: bool) -> None:
    place = inside(root, target)
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    run("mount", "--bind", str(source), str(place))
    if read_only:
        run("mount", "-o", "remount,bind,ro", str(place))


def inside(root: Path, target: str) -> Path:
    """Follow the links of a path as a process whose root this is does."""
    place = root
    for part in Path(target).parts[1:]:
        place /= part
        while place.is_symlink():
            link = os.readlink(place)
            place = root / link.lstrip("/") if link.startswith("/") else place.parent / link
    return place


def main() -> int:
    told = json.loads(Path(sys.argv[1]).read_text())
    connect(told["interface"], told["address"], told["bridge_namespace"])
    root = make_root(Path(told["work"]), told["hidden"], told["kept"], told["readable"])
    # Outer folders before what is mounted within them.
    for target, source, read_only in sorted(told["mounts"]):
        bind(root, Path(source), target, read_only=read_only)
    if told["read_only"]:
        run("mount", "-o", "remount,bind,ro", str(root))
    uid, _, gid = told["user"].partition(":")
    confine = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
    if uid != "0":
        confine += ["--inh-caps=-all", "--bounding-set=-all"]
    # The program is process 1 of its own, as in a container: no signal has a default effect there.
    # The two are found by root's PATH, which the program does not get.
    unshare, chroot = (shutil.which(name) or name for name in ("unshare", "chroot"))
    alone = [unshare, "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc"]
    command = [*alone, chroot, str(root), *confine, *told["argv"]]
    return subprocess.run(command, env=told["env"], check=False).returncode


if __name__ == "__main__":
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    sys.exit(main())
