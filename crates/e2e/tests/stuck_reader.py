"""Lists a directory into the page of a mapped file, once it is told to.

Usage: stuck_reader.py DIR FILE. The file system of FILE may not answer then.
"""

import ctypes
import mmap
import os
import sys

GETDENTS64 = 217 if os.uname().machine == "x86_64" else 61
libc = ctypes.CDLL(None, use_errno=True)
directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
file = os.open(sys.argv[2], os.O_RDWR)
page = mmap.mmap(file, 4096)
room = ctypes.c_char.from_buffer(page)
print("ready", flush=True)
sys.stdin.readline()
sys.exit(libc.syscall(GETDENTS64, directory, ctypes.byref(room), 4096) <= 0)
