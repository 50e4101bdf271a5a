"""Neither program imports the other, so that each says in its own module what a host without a compiler needs."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from cache_store.errors import ConfigError
from precompute.encoders import wan
from trainer.model import language_model

cpu = torch.device("cpu")
refusals = (wan.refuse_without_compiler, (cpu,)), (language_model.refuse_uncompilable, ("inductor", cpu))
for refuse, arguments in refusals:
    try:
        refuse(*arguments)
    except ConfigError as error:
        print(error)
"""


def test_both_programs_say_the_same_of_a_host_without_a_compiler(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    precompute, trainer = done.stdout.splitlines()
    assert trainer == precompute.replace("encoder.compile", "run.compile")
    assert "install a C++ compiler" in trainer
