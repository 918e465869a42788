"""Kernels by device. A row of `dispatch.TABLE` names a function here; nothing is imported before it is chosen."""
