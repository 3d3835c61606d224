"""The address of a buffer, which may be read-only: ctypes' own functions refuse those, and numpy is slow to import."""

from __future__ import annotations

from ctypes import Structure, byref, c_int, c_ssize_t, c_void_p, py_object, pythonapi


class _Buffer(Structure):
    """Py_buffer of Python's C interface."""

    _fields_ = (
        ("buf", c_void_p), ("obj", py_object), ("len", c_ssize_t), ("itemsize", c_ssize_t), ("readonly", c_int),
        ("ndim", c_int), ("format", c_void_p), ("shape", c_void_p), ("strides", c_void_p), ("suboffsets", c_void_p),
        ("internal", c_void_p),
    )  # fmt: skip


def address_of(data: memoryview) -> int:
    """The address of a view's first byte; valid as long as its memory."""
    view = _Buffer()
    pythonapi.PyObject_GetBuffer(py_object(data), byref(view), 0)
    try:
        return view.buf or 0
    finally:
        pythonapi.PyBuffer_Release(byref(view))
