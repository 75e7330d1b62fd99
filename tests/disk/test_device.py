from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashd.disk import device
from flashd.disk.device import block_device, device_identity, disk_identity, mount_of

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 27 0:40 /@data /data rw,relatime shared:5 master:2 - btrfs /dev/sda1 rw,ssd
31 27 8:17 / /mnt/my\040disk rw - xfs /dev/disk\040b rw
32 27 0:50 / /mnt rw - tmpfs none rw
33 32 0:51 / /mnt rw - nfs4 box:/export rw
34 27 0:52 / /odd\u2028\rname rw - fuse me rw
""".replace("\\u2028\\r", "\u2028\r")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", ("ext4", "/dev/nvme0n1p2")),
        ("/srv/models/a", ("ext4", "/dev/nvme0n1p2")),
        ("/data", ("btrfs", "/dev/sda1")),
        ("/data/model", ("btrfs", "/dev/sda1")),
        ("/database", ("ext4", "/dev/nvme0n1p2")),
        ("/mnt/my disk/model", ("xfs", "/dev/disk b")),
        ("/odd\u2028\rname/x", ("fuse", "me")),
        ("/mnt/other", ("nfs4", "box:/export")),  # mounted over the tmpfs
    ],
)
def test_the_mount_of_a_path(path: str, expected: tuple[str, str]) -> None:
    assert mount_of(path, MOUNTS) == expected


def test_no_mount_at_all() -> None:
    assert mount_of("/a", "") == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"wwid": "eui.0025388501\n", "serial": "S1\n"}, "wwid eui.0025388501"),
        ({"device/wwid": "t10.ATA     Disk 1   \n"}, "device/wwid t10.ATA Disk 1"),
        ({"wwid": "\n", "dm/uuid": "CRYPT-LUKS2-1f\n"}, "dm/uuid CRYPT-LUKS2-1f"),
        ({"serial": "disk0", "size": "2048\n"}, "serial disk0 of 2048 sectors in 77"),
        ({"device/serial": "0x1\n", "size": "9\n"}, "serial 0x1 of 9 sectors in 77"),
    ],
)
def test_what_names_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: str
) -> None:
    (tmp_path / "machine-id").write_text("77\n")
    monkeypatch.setattr(device, "_MACHINE_ID", tmp_path / "machine-id")
    assert disk_identity(tree(tmp_path / "block" / "sda", files)) == expected


def test_a_disk_without_a_name_goes_by_its_place_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tree(tmp_path / "pci0" / "vda", {"size": "16\n"})
    names = set()
    for machine in ("one", "two"):
        (tmp_path / "machine-id").write_text(machine)
        monkeypatch.setattr(device, "_MACHINE_ID", tmp_path / "machine-id")
        names.add(disk_identity(disk))
    assert names == {f"at {disk} of 16 sectors in {machine}" for machine in ("one", "two")}


def test_a_partition_counts_as_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tree(tmp_path / "devices" / "pci0" / "sdb", {"wwid": "x", "sdb1/partition": "1", "sdb1/size": "8"})
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (links / "8:16").symlink_to("../../devices/pci0/sdb")
    (links / "8:17").symlink_to("../../devices/pci0/sdb/sdb1")
    monkeypatch.setattr(device, "_BLOCK_DEVICES", links)
    assert block_device(os.makedev(8, 16)) == block_device(os.makedev(8, 17)) == disk
    assert block_device(os.makedev(8, 18)) is None


def test_a_file_has_the_identity_of_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    (tmp_path / "link").symlink_to(path)
    name = device_identity(tmp_path)
    assert name
    assert name == device_identity(path) == device_identity(tmp_path / "link")
    assert name != device_identity("/proc")
    with pytest.raises(FileNotFoundError):
        device_identity(tmp_path / "none")


def test_without_block_devices_the_mount_is_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_BLOCK_DEVICES", tmp_path / "none")
    assert device_identity(tmp_path).startswith("mount ")
    assert device_identity("/proc").startswith("mount proc proc of ")
