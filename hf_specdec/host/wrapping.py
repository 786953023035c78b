"""Wrapping methods of the host so that it can be undone, and acting once one of its modules is imported."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# wrapper(original, self or cls, args, kwargs): called in place of the method
Wrapper = Callable[[Callable, Any, tuple, dict[str, Any]], Any]

_MARK = "_specdec_wrapping"
# our wrappers, since one cannot be found below a wrapper that does not say what it wraps
_made: dict[tuple[type, str], _Wrapping] = {}
_lock = threading.RLock()


class _Wrapping:
    """One wrapper over one method. Where others have wrapped it in turn, it can only be switched off."""

    def __init__(self, owner: type, name: str, wrapper: Wrapper) -> None:
        self.active = True
        self._own = name in vars(owner)
        self._attribute = inspect.getattr_static(owner, name)
        self.original = original = getattr(self._attribute, "__func__", self._attribute)

        @functools.wraps(original)
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(original, this, args, kwargs) if self.active else original(this, *args, **kwargs)

        setattr(method, _MARK, self)
        self._method: Any = method
        setattr(owner, name, classmethod(method) if isinstance(self._attribute, classmethod) else method)

    def undo(self, owner: type, name: str) -> None:
        """Put the original back, unless somebody else's wrapper stands over this one."""
        self.active = False
        if _function(owner, name) is not self._method:
            return
        _made.pop((owner, name), None)
        if self._own:
            setattr(owner, name, self._attribute)
        else:
            delattr(owner, name)


def _function(owner: type, name: str) -> Any:
    """A method as a plain function."""
    attribute = inspect.getattr_static(owner, name)
    return getattr(attribute, "__func__", attribute)


def _ours(owner: type, name: str) -> _Wrapping | None:
    """Our wrapper of a method, wherever it stands among those of others."""
    function = _function(owner, name)
    while function is not None:
        found = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
        # functools.wraps copies the mark to wrappers over ours; it names the same object there
        if isinstance(found, _Wrapping):
            return found
        function = getattr(function, "__wrapped__", None)
    made = _made.get((owner, name))
    # (where the original stands there again, somebody has put it back)
    return made if made is not None and _function(owner, name) is not made.original else None


def wrap(owner: type, name: str, wrapper: Wrapper) -> None:
    """Call `wrapper` in place of a method, a class method too. Does nothing where that has been done.

    Args:
        owner: the class.
        name: the method.
        wrapper: called with the original (a plain function), `self` or `cls`, the positional arguments and the others.
    """
    with _lock:
        ours = _ours(owner, name)
        if ours is None:
            _made[owner, name] = _Wrapping(owner, name, wrapper)
        else:
            ours.active = True


def unwrap(owner: type, name: str) -> None:
    """Undo `wrap`. Wrappers that others have put over ours stay, and ours passes calls on."""
    with _lock:
        ours = _ours(owner, name)
        if ours is not None:
            ours.undo(owner, name)


# ---------------------------------------------------------------- once a module is imported


class _Loader(Loader):
    """Loads a module as its own loader does, and then acts."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _fire(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    """Finds modules that are waited for, by means of the other finders."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], Any]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()


def once_imported(module: str, action: Callable[[], Any]) -> None:
    """Act once a module has been imported: at once if it has, else at the end of its import."""
    with _lock:
        waits = module not in sys.modules
        if waits:
            _finder.waiting.setdefault(module, []).append(action)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
    if not waits:
        importlib.import_module(module)  # waits where another thread is importing it
        action()


def _fire(module: str) -> None:
    with _lock:
        actions = _finder.waiting.pop(module, [])
        if not _finder.waiting:
            _step_aside()
    for action in actions:
        action()


def forget_imports() -> None:
    """Wait for no module any more."""
    with _lock:
        _finder.waiting.clear()
        _step_aside()


def _step_aside() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
