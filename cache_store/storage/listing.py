"""Folders, which object stores do not have, out of the names of everything that lies in one."""

from collections.abc import Iterable


def entries_by_folder(names: Iterable[str]) -> dict[str, set[str]]:
    """What lies directly in each folder, "" being the top; names of folders end in a slash.

    An object that only marks a folder is named as the folder is, and is no entry.
    """
    folders: dict[str, set[str]] = {}
    for name in filter(None, names):
        entry, is_new = name, True
        while entry and is_new:
            folder, _, last = entry.rstrip("/").rpartition("/")
            is_new = folder not in folders
            folders.setdefault(folder, set()).add(last + "/" * entry.endswith("/"))
            entry = folder and f"{folder}/"
    for folder in filter(None, folders):
        above, _, last = folder.rpartition("/")
        folders[above].discard(last)
    return folders
