"""How to install an optional part, for error messages."""


def install_hint(extra: str) -> str:
    """The commands that install an extra, from a package index and from a clone."""
    return f"pip install 'icmixup[{extra}]', or pip install '.[{extra}]' in a clone"
