"""A real Slurm of one node, this machine, for as long as a test needs it: munged, slurmctld and slurmd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo", "squeue", "srun")
PATIENCE_S = 300

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={root}
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES State=UP OverSubscribe=FORCE:4
"""


@dataclass(frozen=True)
class Slurm:
    """The running cluster, reached by its commands in `environment`."""

    environment: Mapping[str, str]

    def submit(self, *arguments: str, **variables: str) -> str:
        """Submit a job and return its number."""
        return self._said("sbatch", "--parsable", *arguments, **variables)

    def until_ended(self, job: str) -> tuple[str, int]:
        """Wait for a job's end; return its state and exit code."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            facts = dict(word.partition("=")[::2] for word in self._said("scontrol", "show", "job", job).split())
            if facts["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return facts["JobState"], int(facts["ExitCode"].partition(":")[0])
            time.sleep(0.2)
        raise TimeoutError(f"job {job} has not ended")

    def signal(self, job: str, name: str) -> None:
        """Send a signal to the job's steps, as `--signal` does before its time is up."""
        self._said("scancel", "--signal", name, job)

    def _said(self, *command: str, **variables: str) -> str:
        environment = {**self.environment, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def running_slurm(root: Path) -> Iterator[Slurm]:
    """Run Slurm in `root`; skip the test if it is not installed."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"needs Slurm (Debian's slurm-wlm): {', '.join(missing)} not found")
    environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
    configure(root)
    with ExitStack() as stack:
        for command in commands(root):
            daemon = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(end, daemon)
        slurm = Slurm(environment)
        wait_for_node(environment)
        yield slurm


def configure(root: Path) -> None:
    munge = root / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    config = CONFIG.format(
        host=socket.gethostname().partition(".")[0],
        user=subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
        root=root,
        cores=os.cpu_count(),
        controller_port=free_port(),
        node_port=free_port(),
    )
    (root / "slurm.conf").write_text(config)


def commands(root: Path) -> Iterator[list[str]]:
    munge = root / "munge"
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    yield ["munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items())]
    yield ["slurmctld", "-D"]
    yield ["slurmd", "-D"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_node(environment: Mapping[str, str]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        asked = ["sinfo", "-h", "-o", "%T"]
        if subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise TimeoutError("the node of the test's Slurm is not idle")


def end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
