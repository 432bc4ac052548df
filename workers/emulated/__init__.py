"""Emulated accelerators: workers that take the time of another device; every figure from them is an emulated one."""
