"""Which device a file lies on, by a name that survives a reboot.

``st_dev`` alone does not: numbers and names such as ``sdb`` go by the order of discovery. The name is
made of the first of these that there is:

1. the block device behind the file, a partition counting as its whole disk: its world-wide id (NVMe,
   SCSI) or the UUID of the mapping (LVM, dm-crypt, RAID);
2. the same device's serial number, else its place on the bus (its path in ``/sys``), with its size and
   this machine's id: another machine may have a disk of that name;
3. where no block device is behind the mount (overlay, tmpfs, NFS, ZFS) or ``/sys`` is missing: type and
   source of the file system from ``/proc/self/mountinfo``, with this machine's id.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_UNIQUE = ("wwid", "device/wwid", "dm/uuid", "md/uuid")
_SERIAL = ("serial", "device/serial")
_MACHINE_ID = Path("/etc/machine-id")
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")


def device_identity(path: str | os.PathLike[str]) -> str:
    """Name of the device that holds ``path``, see above; takes some 100 us.

    Raises:
        OSError: there is no such file, or ``/proc`` is missing.
    """
    block = block_device(os.stat(path).st_dev)
    if block is None:
        fs_type, source = mount_of(os.path.realpath(path), _MOUNTS.read_bytes().decode(errors="replace"))
        block = _source_device(source)
        if block is None:
            return f"mount {fs_type} {source} of {_word(_MACHINE_ID)}"
    return disk_identity(block)


def block_device(device: int) -> Path | None:
    """Directory in ``/sys`` of the disk with this device number, or with this partition."""
    try:
        target = os.readlink(_BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}")
    except OSError:
        return None
    block = Path(os.path.normpath(_BLOCK_DEVICES / target))
    return block.parent if (block / "partition").exists() else block


def disk_identity(block: Path) -> str:
    """Identity of the disk whose directory in ``/sys`` this is."""
    for name in _UNIQUE:
        if value := _word(block / name):
            return f"{name} {value}"
    serial = next(filter(None, (_word(block / name) for name in _SERIAL)), "")
    where = f"serial {serial}" if serial else f"at {block}"
    return f"{where} of {_word(block / 'size')} sectors in {_word(_MACHINE_ID)}"


def mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """Type and source of the file system that an absolute path without links lies on.

    Args:
        path: the path.
        mountinfo: text of ``/proc/self/mountinfo``.
    """
    best, found = -1, ("unknown", "unknown")
    # Only these ends of lines: names of mounts may hold anything that splitlines() splits at.
    for line in filter(None, mountinfo.split("\n")):
        # 27 1 254:0 / /mnt/my\040disk rw,relatime shared:1 - ext4 /dev/vda rw
        head, _, tail = line.partition(" - ")
        point = _unescape(head.split(" ")[4]).rstrip("/")
        # Of several mounts on one directory the last is the one that is seen.
        if len(point) >= best and (path == point or path.startswith(point + "/")):
            fs_type, source = tail.split(" ")[:2]
            best, found = len(point), (fs_type, _unescape(source))
    return found


def _source_device(source: str) -> Path | None:
    """The block device that a mount names as its source: btrfs has device numbers of its own."""
    try:
        info = os.stat(source)
    except (OSError, ValueError):
        return None
    return block_device(info.st_rdev) if stat.S_ISBLK(info.st_mode) else None


def _word(path: Path) -> str:
    """What a small file says, in one line; nothing if it is not there."""
    try:
        return " ".join(path.read_text(errors="replace").split())
    except OSError:
        return ""


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
