"""Makes the environment in .venv with the pinned versions, where it is missing or a pin changed.

`scripts/_env` runs it with any Python >= 3.11, before anything is installed: standard library only.
`uv` installs, from PATH or as a wheel from the package index; `pip` where it cannot be had. Both
take the indexes, wheel folders and certificates that pip is configured with.

requirements/locked.txt   everything but PyTorch, with hashes, which uv and pip verify
requirements/torch.txt    PyTorch and what only its CUDA build needs, without hashes: there are
                          several builds of one version, and the CPU build needs no CUDA packages
requirements/uv.txt       uv, with hashes
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKED, TORCH, UV = (ROOT / "requirements" / f"{name}.txt" for name in ("locked", "torch", "uv"))
STAMP = VENV / ".geo_ray_stamp"
UNFINISHED = VENV / ".geo_ray_unfinished"

# Packages come without byte code. What every process of a run imports is compiled at once, by both
# cores that a small machine has; the rest, most of the files, is when it is first imported.
IMPORTED = "import ray, sklearn.datasets, torch"
COMPILED = (
    *("ray", "pyarrow", "botocore", "boto3", "pydantic", "grpc", "google", "aiohttp", "yarl"),
    *("opencensus", "opentelemetry", "prometheus_client", "rich", "_pytest", "hypothesis"),
)

UV_VARIABLES = {  # what pip calls it, and the variable that tells uv the same
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}

# By path, not by import hook: in the folder that holds the clone, a hook is asked after the clone's
# own folder, which Python takes for a package without content.
EDITABLE = ("--no-deps", "--no-build-isolation", "-C", "editable_mode=compat", "-e", ".")

started = time.monotonic()


def say(text: str) -> None:
    """Prints a line with the seconds since the start."""
    print(f"  {time.monotonic() - started:4.0f} s  {text}", file=sys.stderr, flush=True)


def run(command: list[str], env: Mapping[str, str] | None = None) -> None:
    """Runs a command; a terminal gets its progress as it is, a file its lines with seconds."""
    if sys.stderr.isatty():
        subprocess.run(command, check=True, cwd=ROOT, env=env, close_fds=False, stdout=sys.stderr)
        return
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        close_fds=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            if line.strip() and not re.match(r" [-+~] \S+==", line):  # uv's list of everything
                say("  " + line.rstrip())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


# ------------------------------------------------------------------ what pip knows


def pip_settings(listing: str) -> dict[str, str]:
    """Reads what `pip config list` prints: variables before [install] before [global]."""
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                settings[key.removeprefix(section)] = str(ast.literal_eval(value)).strip()
    return settings


def uv_command(uv: str, settings: Mapping[str, str]) -> list[str]:
    """Says how uv installs into .venv."""
    command = [uv, "pip", "install", "--python", str(PYTHON)]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        command.append("--no-index")
    return command


def uv_environment(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Tells uv, which does not read pip's settings, what they say; its own variables win.

    Of all indexes the best version is taken, as pip does: PyTorch's own has a CPU build that counts
    as newer, and old copies of other packages.
    """
    result = dict(environ)
    result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    for name, variable in UV_VARIABLES.items():
        if name not in settings or (name == "index-url" and "UV_INDEX_URL" in environ):
            continue
        joint = "," if variable == "UV_FIND_LINKS" else " "
        result.setdefault(variable, joint.join(settings[name].split()))
    return result


# ------------------------------------------------------------------ making


def wanted() -> str:
    """Digests all that decides what the environment holds."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", LOCKED, TORCH, UV, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_ready() -> bool:
    """Says whether .venv is complete and has the versions wanted."""
    return STAMP.is_file() and STAMP.read_text() == wanted() and PYTHON.exists()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits until no other command makes this environment.

    Commands inherit the lock: nobody else begins while one lives whose parent was killed.
    """
    lock = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(lock, True)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another command makes .venv; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have none
            say(f"no lock here ({error}): begin no second command before this one is ready")
        yield
    finally:
        os.close(lock)


def has_other_python() -> bool:
    """Says whether .venv is of another Python, or of one that is gone."""
    config = VENV / "pyvenv.cfg"
    version = f"{sys.version_info.major}.{sys.version_info.minor}."
    return config.exists() and (
        not PYTHON.exists() or not re.search(rf"^version = {version}", config.read_text(), re.M)
    )


def make_empty() -> None:
    """Makes .venv with nothing but pip, or leaves what is in a finished one."""
    if UNFINISHED.exists() or has_other_python():
        say("the .venv that is here is unfinished or of another Python: begun anew")
        shutil.rmtree(VENV)
    VENV.mkdir(exist_ok=True)
    UNFINISHED.touch()
    STAMP.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", str(VENV)])


def version_of(uv: str) -> str:
    """Returns what a uv calls itself; nothing if it does not run here."""
    try:
        shown = subprocess.run([uv, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return " ".join(shown.stdout.split()[:2])


def find_uv() -> str | None:
    """Returns the uv on PATH, or the pinned one after installing it; None where there is none."""
    uv = shutil.which("uv")
    if uv and version_of(uv):
        return uv
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        run([*pip, "--require-hashes", "-r", str(UV)])
    except subprocess.CalledProcessError:
        return None
    uv = str(VENV / "bin" / "uv")
    return uv if version_of(uv) else None


def install_with_uv(uv: str) -> None:
    """Installs everything with uv."""
    listing = subprocess.run(
        [str(PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = pip_settings(listing.stdout)
    env = uv_environment(settings, os.environ)
    install = uv_command(uv, settings)
    run([*install, "-r", str(LOCKED), "-c", str(TORCH), "torch"], env)
    run([*install, *EDITABLE], env)


def install_with_pip() -> None:
    """Installs everything with pip."""
    install = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    if not sys.stderr.isatty():
        install += ["--progress-bar", "off"]
    run([*install, "--require-hashes", "--no-deps", "-r", str(LOCKED)])
    run([*install, "-c", str(TORCH), "torch"])
    run([*install, *EDITABLE])


def import_first() -> None:
    """Imports what every run does, which proves that it can be and leaves its byte code."""
    site = next((VENV / "lib").glob("python*")) / "site-packages"
    folders = [str(site / name) for name in COMPILED if (site / name).is_dir()]
    compiler = [str(PYTHON), "-m", "compileall", "-qq", *folders]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(compiler, close_fds=False):
        run([str(PYTHON), "-c", IMPORTED], env)


def make() -> None:
    """Makes the environment, with a line for each phase."""
    version = sys.version.split()[0]
    print(f"Making the environment in .venv with Python {version}, once:", file=sys.stderr)
    make_empty()
    count = len(re.findall(r"^[\w.-]+==(?!.*win32)", LOCKED.read_text(), re.M))
    uv = find_uv()
    if uv:
        say(f"{version_of(uv)} installs PyTorch and {count} packages")
        try:
            install_with_uv(uv)
        except subprocess.CalledProcessError:
            uv = None
    if not uv:
        say("uv cannot be had or could not do it (see above)")
        say(f"pip installs PyTorch and {count} packages; a few minutes")
        install_with_pip()
    say("first import of PyTorch and Ray")
    import_first()
    STAMP.write_text(wanted())
    UNFINISHED.unlink()
    say("ready")


def main() -> int:
    """Makes the environment unless it is ready; returns the exit status."""
    if is_ready():
        return 0
    try:
        with alone():
            if not is_ready():
                make()
    except subprocess.CalledProcessError as error:
        print(
            "The environment could not be made (see above). Packages come from where pip is "
            f"configured to look; `{' '.join(error.cmd[:4])} ...` failed.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The next command makes the environment anew.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
