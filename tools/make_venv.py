"""Makes the project's virtual environment: `python3 tools/make_venv.py FOLDER`; what `make` runs first.

Standard library only, and syntax that Python 3.6 reads, because a Python that is too old must get as far as being
told so. Safe to repeat and to interrupt; progress on standard output, pip's own words in FOLDER/install.log.
"""

import os
import shutil
import subprocess
import sys
import time

SUPPORTED = ((3, 10), (3, 11), (3, 12))
# Machines bring any pip: editable installs need 21.3, and only a pinned one resolves alike everywhere.
TOOLS = ("pip==26.3", "setuptools==84.2.1")
PACKAGES = ("-e", "client", "-e", "loadtest", "-e", "bench", "-e", ".[triton,fast,gpu,tracing,loadtest,test,docs]")
HEARTBEAT_S = 15.0
TRIES = 3


def main(folder):
    python = os.path.join(folder, "bin", "python")
    # An environment that works is kept, whichever Python runs this; `make clean` makes room for another one.
    if usable_version(python) not in SUPPORTED:
        refusal = refuse(sys.version_info[:2], sys.platform, os.uname().machine)
        if refusal:
            print(refusal, file=sys.stderr)
            return 2
        create(folder, python)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    log = os.path.join(folder, "install.log")
    open(log, "w").close()
    if not run("bringing pip up to date", [*pip, *TOOLS], log):
        return 1
    # Without build isolation the pinned setuptools above builds our packages, and nothing is downloaded for it.
    install = [*pip, "--no-build-isolation", "--prefer-binary", "-c", "constraints.txt", *PACKAGES]
    return 0 if run("installing the pinned packages (minutes the first time)", install, log) else 1


def refuse(version, platform, machine):
    """Why this interpreter or machine cannot be used, in one line with what to do; None when it can."""
    if platform != "linux" or machine != "x86_64":
        return f"This is {machine} on {platform}: the Triton binary in nvidia-pytriton is for Linux on x86-64 only."
    if tuple(version) in SUPPORTED:
        return None
    suited = [name for name in ("python3.12", "python3.11", "python3.10") if works(name)]
    advice = f"run: make PYTHON={suited[0]}" if suited else "install Python 3.12 and run: make PYTHON=python3.12"
    return (
        f"Python {version[0]}.{version[1]} cannot be used: Triton's Python backend needs numpy < 2, "
        f"which has no wheels for 3.13 and newer, and the code needs 3.10. Use 3.10, 3.11 or 3.12; {advice}"
    )


def works(name):
    return usable_version(shutil.which(name) or "") in SUPPORTED


def usable_version(python):
    """(major, minor) of an interpreter that starts; None of one that does not."""
    try:
        code = "import sys; print(*sys.version_info[:2])"
        said = subprocess.check_output([python, "-c", code], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in said.split())


def create(folder, python):
    """A fresh environment with some pip in it."""
    print(f"creating {folder} with Python {sys.version.split()[0]}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode == 0:
        return
    # Debian keeps ensurepip in a package of its own: the interpreter's pip can do its work.
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.check_call([sys.executable, "-m", "venv", "--without-pip", folder])
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", "--target", site.decode().strip(), "pip"])


def run(what, command, log):
    """Run with signs of life; True when it succeeded. A failed download is tried again."""
    started = time.time()
    print(what, flush=True)
    for attempt in range(1, TRIES + 1):
        with open(log, "a") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            while True:
                try:
                    code = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    print(f"  ... {time.time() - started:.0f} s", flush=True)
        if code == 0:
            return True
        print(f"  try {attempt} of {TRIES} failed", flush=True)
    with open(log) as output:
        errors = [line for line in output if not line.startswith("WARNING")]
    print("".join(errors[-15:]) + "all of pip's words are in " + log, file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
