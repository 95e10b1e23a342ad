"""A folder in which only this user can write, inside a folder in which others can write, too."""

import os
import stat
from pathlib import Path


def user_folder(root: Path, *, make: bool = True) -> Path:
    """Return this user's folder inside a folder that all users share, such as the folder for temporary files.

    Makes it if it does not exist, unless ``make`` is False. Raises ``PermissionError`` if others can write to it.
    """
    folder = root / f"lockstep-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    elif not os.path.lexists(folder):
        return folder
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others can write there: {folder}")
    return folder
