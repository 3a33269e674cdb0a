#!/usr/bin/env python3
"""What the kernel would give back if it merged equal pages of forks (KSM): the experiment of docs/decisions/0026.

    scripts/merge-forks.py [--program PROGRAM] [--rounds N] [--seconds N]

Each round makes a cluster of a leader in a machine and two followers that are forks of it, writes to the leader for a
while (pgbench, tpcb-like), waits until the followers have replayed all of it, and has the kernel look for equal pages
then, three times through all of them. The forks have written the same log to the same pages. Root only; needs a kernel
with KSM, in which nobody else uses it, and which tells what of a process it has merged (Linux 6.7).
"""

import argparse
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time

KSM = pathlib.Path("/sys/kernel/mm/ksm")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
FOLLOWERS = ("follower-1", "follower-2")
SCALE = 5
CLIENTS = 2
LOOKS = 3
# How much the kernel looks at between two pauses of a millisecond: as fast as it can.
PAGES_TO_SCAN = 20000


class Cluster:
    """A cluster in machines, which ends with the block."""

    def __init__(self, program):
        self.program = program
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="merge-"))
        self.place.chmod(0o755)

    def __enter__(self):
        self.run("up", "--detach", "--port=0", "--replicas=0", "--runtime=vm", "--vm-memory=512MB", "--vm-disk=4GB",
                 "--vm-checkpoints=on")
        # Its forks have what its file says.
        made_of = self.place / "data" / "machines" / "leader" / "machine.toml"
        made_of.write_text(f"merge_equal_pages = true\n{made_of.read_text()}")
        return self

    def __exit__(self, *_):
        subprocess.run([self.program, "down"], env=self.environment(), check=False, capture_output=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def environment(self):
        return os.environ | {"ONECOPY_DIR": str(self.place / "data")}

    def run(self, *arguments):
        done = subprocess.run([self.program, *arguments], env=self.environment(), text=True, check=False,
                              capture_output=True)
        if done.returncode:
            raise SystemExit(f"onecopy {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def guest(self, machine, command):
        return self.run("vm", "exec", machine, "--", "sh", "-c", command)

    def client(self, machine, command):
        """Runs one of PostgreSQL's client programs in a guest, as the cluster's superuser."""
        password = (self.place / "data" / "secrets" / "superuser").read_text().strip()
        access = f"PGPASSWORD={password} PGHOST=127.0.0.1 PGUSER=postgres PGDATABASE=postgres"
        return self.guest(machine, f"{access} /usr/lib/postgresql/17/bin/{command}")

    def sql(self, machine, statement):
        return self.client(machine, f"psql -XAtqc {shlex.quote(statement)}").strip()

    def qemu(self, machine):
        return int((self.place / "data" / "machines" / machine / "run" / "qemu.pid").read_text())


def memory_mib(process, *kinds):
    """What a process has of these kinds of memory."""
    lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kinds)) / 1024


def private_mib(process):
    """Memory that is this process's alone."""
    return memory_mib(process, "Private_Clean:", "Private_Dirty:")


def kernel_seconds():
    """Processor time of the kernel's thread."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(") ")
        except OSError:
            continue
        if head.endswith("(ksmd"):
            fields = rest.split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit("this kernel has no ksmd")


def setting(name, value=None):
    if value is None:
        return int((KSM / name).read_text())
    (KSM / name).write_text(str(value))
    return value


def measure(program, seconds):
    """One round: MiB private to the forks before and after, MiB given back, and what that cost."""
    with Cluster(program) as cluster:
        cluster.client("leader", f"pgbench -i -q -s {SCALE}")
        cluster.run("scale", "2", "--mode=fork")
        cluster.client("leader", f"pgbench -n -c {CLIENTS} -T {seconds}")
        end = cluster.sql("leader", "SELECT pg_current_wal_lsn()")
        for follower in FOLLOWERS:
            while cluster.sql(follower, f"SELECT pg_last_wal_replay_lsn() >= '{end}'::pg_lsn") != "t":
                time.sleep(0.5)
        processes = [cluster.qemu(follower) for follower in FOLLOWERS]
        before, used = sum(map(private_mib, processes)), kernel_seconds()
        setting("pages_to_scan", PAGES_TO_SCAN)
        setting("sleep_millisecs", 1)
        looked, begun = setting("full_scans"), time.monotonic()
        setting("run", 1)
        while setting("full_scans") < looked + LOOKS:
            time.sleep(0.2)
        # Those that have merged within one guest count, too.
        merged = sum(memory_mib(process, "KSM:") for process in processes)
        given_back = setting("pages_sharing") * PAGE_MIB
        figures = {
            "private_mib": before,
            "merged_mib": merged,
            "given_back_mib": given_back,
            "after_mib": sum(map(private_mib, processes)),
            "scan_s": time.monotonic() - begun,
            "kernel_s": kernel_seconds() - used,
        }
        setting("run", 2)
        return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/onecopy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    options = parser.parse_args()
    if not KSM.exists():
        raise SystemExit("this kernel has no KSM")
    if setting("run") != 0:
        raise SystemExit("somebody uses KSM here already")
    before = {name: setting(name) for name in ("pages_to_scan", "sleep_millisecs")}
    rounds = []
    try:
        for number in range(1, options.rounds + 1):
            rounds.append(measure(options.program, options.seconds))
            told = ", ".join(f"{name} {value:.1f}" for name, value in rounds[-1].items())
            print(f"round {number}: {told}", flush=True)
    finally:
        setting("run", 2)
        setting("run", 0)
        for name, value in before.items():
            setting(name, value)
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        print(f"{name}: {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
