"""The order of base classes: a mixin works only in front of the class whose methods it extends."""

from __future__ import annotations


def check_in_front(cls: type, mixin: type, base: str) -> None:
    """Raise TypeError if the base class comes first: its methods would be used, and nothing mixed."""
    ahead = cls.__mro__[: cls.__mro__.index(mixin)]
    if any(other.__name__ == base and not issubclass(other, mixin) for other in ahead):
        raise TypeError(
            f"{cls.__name__} would not mix its batches: {mixin.__name__} must come before {base}, "
            f"class {cls.__name__}({mixin.__name__}, {base})"
        )
