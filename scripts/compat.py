#!/usr/bin/env python3
"""Runs the test suites of other projects' drivers directly and through the router, and prints what differs.

    scripts/compat.py [--short] [SUITE]...

Each suite runs against one PostgreSQL server and against a cluster that `onecopy up` has made, with the same roles,
databases and settings. A difference is a test whose outcome is not the same. docs/compatibility.md lists those that are
known, with their reasons; one that is not listed fails the run, and so does one that is listed and did not differ.
The suites come from their projects' registries, in the versions below, into target/compat.
"""

import argparse
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "target" / "compat"
LIST = ROOT / "docs" / "compatibility.md"

PGX = "5.7.2"
ASYNCPG = "0.32.0"
DJANGO = "5.2.8"
SQLALCHEMY = "2.0.44"
TOKIO_POSTGRES = "0.7.18"
PGJDBC = "42.7.4"

# What a whole suite may take against one server, in seconds: one that hangs is ended and counts as differing.
SUITE_SECONDS = 1800


class Failure(Exception):
    """What ends the run, with its remedy."""


def run(*command, **options):
    """Runs a command that must succeed; its output is shown only when it does not."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options,
    )
    if done.returncode:
        raise Failure(f"{' '.join(str(word) for word in command)} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def need(program, name):
    if not shutil.which(program):
        raise Failure(f"no {program} on the PATH: install {name}")


def say(text):
    print(text, flush=True)


# --- servers ---------------------------------------------------------------------------------------------------------


class Target:
    """Where a suite connects as the superuser `postgres`: a server, or the router before a cluster."""

    def __init__(self, name, port, password):
        self.name, self.port, self.password = name, port, password

    def environment(self, database):
        """libpq's variables."""
        return {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "PGPASSWORD": self.password,
            "PGDATABASE": database,
        }

    def psql(self, database, text):
        """Runs statements, one transaction each."""
        run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", env=os.environ | self.environment(database), input=text)


def as_server_account(*command):
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "postgres", "--", *command] if os.geteuid() == 0 else list(command)


def server_programs():
    """The directory of the newest PostgreSQL among those that the cluster would take."""
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("1[5-8]/bin/postgres"))
    if not found:
        raise Failure("no PostgreSQL 15 to 18 under /usr/lib/postgresql: run make setup")
    return found[0].parent


class Server:
    """One PostgreSQL server with the settings that a cluster's leader has."""

    def __init__(self, place):
        self.programs, self.data = server_programs(), place / "server"
        self.password = secrets.token_hex(8)
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)
        self.data.mkdir()
        password = place / "password"
        password.write_text(self.password + "\n", encoding="utf-8")
        if os.geteuid() == 0:
            shutil.chown(self.data, "postgres")
            shutil.chown(password, "postgres")
        initdb = [self.programs / "initdb", "-D", self.data, "-U", "postgres", "-A", "scram-sha-256",
                  "--pwfile", password]
        run(*as_server_account(*initdb, "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"))

    def start(self, port):
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.data}"
        options += " -c max_connections=200 -c fsync=off"
        log = self.data / "log"
        run(*as_server_account(self.programs / "pg_ctl", "-D", self.data, "-w", "-l", log, "-o", options, "start"))
        return Target("server", port, self.password)

    def said_of_memory(self):
        return ""

    def stop(self):
        run(*as_server_account(self.programs / "pg_ctl", "-D", self.data, "-m", "immediate", "stop"))


class Cluster:
    """A leader and a follower behind the router."""

    def __init__(self, place):
        self.program = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug" / "onecopy"
        if not self.program.exists():
            raise Failure(f"{self.program} is not built: run make build")
        self.place = place / "cluster"

    def start(self, port):
        run(self.program, "up", "--dir", self.place, "--replicas", "1", "--port", port, "--metrics-port", "0",
            "--pg-bindir", server_programs(), "--detach")
        return Target("router", port, (self.place / "secrets" / "superuser").read_text(encoding="utf-8").strip())

    def said_of_memory(self):
        """What the process with the router has in memory (VmRSS, proc_pid_status(5)), and the most that it had."""
        process = json.loads(run(self.program, "status", "--dir", self.place, "--json"))["process_id"]
        status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        now, most = (int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1]) / 1024
                     for name in ("VmRSS", "VmHWM"))
        return f"; the router's memory: {now:.0f} MiB, at most {most:.0f} MiB"

    def stop(self):
        run(self.program, "down", "--dir", self.place)


# --- suites ----------------------------------------------------------------------------------------------------------


def from_pip(project, version):
    """The source distribution of a Python project, unpacked."""
    place = WORK / f"{project}-{version}"
    if not place.exists():
        say(f"loading {project} {version}")
        loaded = WORK / "loaded"
        run(WORK / "venv/bin/pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", loaded,
            f"{project}=={version}")
        with tarfile.open(next(loaded.glob(f"{project}-{version}.tar.gz"))) as archive:
            archive.extractall(WORK, filter="data")
    return place


def python(*packages):
    """The interpreter of the suites' own environment, with what they need in it."""
    interpreter = WORK / "venv/bin/python"
    if not interpreter.exists():
        run(sys.executable, "-m", "venv", WORK / "venv")
    run(interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return interpreter


def suite_process(command, directory, environment):
    """Runs a suite; returns what it printed. Its exit code says only that some test failed."""
    with subprocess.Popen([str(word) for word in command], cwd=directory, env=os.environ | environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=SUITE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nended after {SUITE_SECONDS} s\n"
    return output


def junit(path):
    """Outcomes of a JUnit file. A test that another one's failure has left out is not in it."""
    outcomes = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        kinds = {child.tag for child in case}
        outcomes[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def pytest(interpreter, target, directory, environment, *arguments):
    """Runs a suite by pytest."""
    report = WORK / f"{directory.name}-{target.name}.xml"
    report.unlink(missing_ok=True)
    output = suite_process([interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                            f"--junitxml={report}", *arguments], directory, environment)
    if not report.exists():
        raise Failure(f"pytest made no report:\n{output[-4000:]}")
    return junit(report), output


def pgx(target, short):
    """Go: the driver, its connections, its pool and its driver of database/sql."""
    place = WORK / f"pgx-{PGX}"
    need("go", "Go 1.21 or newer")
    if not place.exists():
        say(f"loading pgx {PGX}")
        loaded = json.loads(run("go", "mod", "download", "-json", f"github.com/jackc/pgx/v5@v{PGX}", cwd=WORK))
        shutil.copytree(loaded["Dir"], place, copy_function=shutil.copyfile)
        for entry in [place, *place.rglob("*")]:
            entry.chmod(0o755 if entry.is_dir() else 0o644)
    target.psql("postgres", "create database pgx_test")
    setup = ((place / "testsetup/postgresql_setup.sql").read_text(encoding="utf-8")
             .replace("`whoami`", "`echo pgx_socket`"))
    target.psql("pgx_test", setup)
    dsn = f"host=127.0.0.1 port={target.port} user=postgres password={target.password} dbname=pgx_test"
    # The parts share a database and are not written to run at once.
    packages = ["./pgconn"] if short else [".", "./pgconn", "./pgxpool", "./stdlib"]
    output = suite_process(["go", "test", "-json", "-count=1", "-p", "1", *packages], place,
                           {"PGX_TEST_DATABASE": dsn, "PGX_TEST_TCP_CONN_STRING": dsn})
    outcomes = {}
    for line in output.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("Action") in ("pass", "fail", "skip") and "Test" in event:
            part = event["Package"].rsplit("/", 1)[-1]
            name = f"{'pgx' if part == 'v5' else part}.{event['Test']}"
            outcomes[name] = {"pass": "passed", "fail": "failed", "skip": "skipped"}[event["Action"]]
    return outcomes, output


def asyncpg(target, short):
    """Python, the extended protocol with binary values, its own connection pool."""
    interpreter = python("pip", "setuptools", "wheel", "pytest", "distro", f"asyncpg=={ASYNCPG}")
    place = from_pip("asyncpg", ASYNCPG)
    # What is installed is tested, not the directory beside the tests.
    shutil.rmtree(place / "asyncpg", ignore_errors=True)
    arguments = ["tests/test_prepare.py", "tests/test_transaction.py"] if short else [
        "tests",
        # It asserts a time.
        "--deselect=tests/test_introspection.py::TestIntrospection::test_introspection_on_large_db",
    ]
    return pytest(interpreter, target, place, target.environment("postgres"), *arguments)


def django(target, short):
    """Python: an ORM's own view of transactions, schema changes and constraints."""
    interpreter = python(f"django=={DJANGO}", "psycopg[binary,pool]==3.2.13", "unittest-xml-reporting==3.2.0")
    place = from_pip("django", DJANGO)
    (place / "tests/compat_settings.py").write_text(f"""
DATABASES = {{name: {{"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": {target.port},
    "USER": "postgres", "PASSWORD": "{target.password}", "NAME": "django_" + name}} for name in ("default", "other")}}
SECRET_KEY = "x"
USE_TZ = False
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
TEST_RUNNER = "xmlrunner.extra.djangotestrunner.XMLTestRunner"
TEST_OUTPUT_DIR = "{WORK}"
TEST_OUTPUT_FILE_NAME = "django-{target.name}.xml"
""", encoding="utf-8")
    labels = ["backends", "transactions"] if short else [
        "backends", "basic", "transactions", "transaction_hooks", "select_for_update", "get_or_create", "bulk_create",
        "schema", "migrations", "prefetch_related", "aggregation", "annotations", "constraints", "postgres_tests",
    ]
    report = WORK / f"django-{target.name}.xml"
    report.unlink(missing_ok=True)
    output = suite_process([interpreter, "runtests.py", "--settings=compat_settings", "--parallel=1", "--noinput",
                            *labels], place / "tests", {})
    # It is written at the end.
    if not report.exists() or not report.stat().st_size:
        raise Failure(f"Django's tests made no report:\n{output[-4000:]}")
    return junit(report), output


def sqlalchemy(target, short):
    """Python: the conformance suite of SQLAlchemy's dialects."""
    interpreter = python(f"sqlalchemy=={SQLALCHEMY}", "psycopg[binary]==3.2.13", "pytest")
    place = from_pip("sqlalchemy", SQLALCHEMY)
    target.psql("postgres", "create database sqlalchemy_test")
    target.psql("sqlalchemy_test", "create schema test_schema; create extension hstore; create extension citext;"
                "alter database sqlalchemy_test set default_text_search_config = 'pg_catalog.english'")
    # One of its tests replaces single capital letters of the address, those in the password included.
    password = secrets.token_hex(16)
    target.psql("postgres", f"create role tester superuser login password '{password}'")
    address = f"postgresql+psycopg://tester:{password}@127.0.0.1:{target.port}/sqlalchemy_test"
    parts = ["test/dialect/test_suite.py"]
    if not short:
        parts += ["test/dialect/postgresql", "test/engine", "test/orm/test_transaction.py", "test/orm/test_session.py"]
    return pytest(interpreter, target, place, {}, "--dburi", address, "-p", "no:warnings", *parts)


def tokio_postgres(target, _short):
    """Rust: pipelined messages, cancellation by dropping, COPY in both formats."""
    place = WORK / f"tokio-postgres-{TOKIO_POSTGRES}"
    if not place.exists():
        described = json.loads(run("cargo", "metadata", "--locked", "--format-version", "1", cwd=ROOT))
        ours = next(package for package in described["packages"] if package["name"] == "tokio-postgres")
        if ours["version"] != TOKIO_POSTGRES:
            raise Failure(f"Cargo.lock has tokio-postgres {ours['version']}: "
                          "change TOKIO_POSTGRES in scripts/compat.py")
        shutil.copytree(pathlib.Path(ours["manifest_path"]).parent, place)
        # A package below a workspace belongs to it, unless it is one of its own.
        with (place / "Cargo.toml").open("a", encoding="utf-8") as manifest:
            manifest.write("\n[workspace]\n")
        shutil.copytree(place / "tests", place / "tests-as-published")
    target.psql("postgres", "set password_encryption = 'scram-sha-256'; "
                "create role pass_user password 'password' login;"
                "create role scram_user password 'password' login; create extension if not exists hstore;"
                "create extension if not exists citext; create extension if not exists ltree")
    # Port, role and password stand in the tests themselves.
    for path in (place / "tests-as-published").rglob("*.rs"):
        text = path.read_text(encoding="utf-8")
        if path.name != "parse.rs":
            text = (text.replace("5433", str(target.port))
                    .replace("user=postgres", f"user=postgres password={target.password}"))
        (place / "tests" / path.relative_to(place / "tests-as-published")).write_text(text, encoding="utf-8")
    features = ("with-bit-vec-0_8,with-chrono-0_4,with-eui48-1,with-geo-types-0_7,with-serde_json-1,with-uuid-1,"
                "with-time-0_3")
    output = suite_process(["cargo", "test", "--test", "test", "--features", features, "--", "--test-threads=1"], place,
                           {"CARGO_TARGET_DIR": str(WORK / "tokio-postgres-target")})
    if "test result:" not in output and "ended after" not in output:
        raise Failure(f"the tests of tokio-postgres did not run:\n{output[-4000:]}")
    words = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}
    found = re.findall(r"^test (\S+)(?: - should panic)? \.\.\. (?:.*\n)*?(?:.*?)\b(ok|FAILED|ignored)$", output,
                       re.MULTILINE)
    return {name: words[word] for name, word in found}, output


def pgjdbc(target, short):
    """Java: JDBC, its own caches of prepared statements, cursors, COPY, large objects."""
    place = WORK / f"postgresql-{PGJDBC}-jdbc-src"
    need("mvn", "Maven")
    if not place.exists():
        say(f"loading pgjdbc {PGJDBC}")
        run("mvn", "--batch-mode", "dependency:copy", f"-Dartifact=org.postgresql:postgresql:{PGJDBC}:tar.gz:jdbc-src",
            f"-DoutputDirectory={WORK / 'loaded'}", cwd=WORK)
        with tarfile.open(WORK / "loaded" / f"{place.name}.tar.gz") as archive:
            archive.extractall(WORK, filter="data")
    target.psql("postgres", "create role test superuser login password 'test'")
    target.psql("postgres", "create database test owner test")
    target.psql("test", "create extension hstore; create extension citext; create extension sslinfo")
    reports = place / "target/surefire-reports"
    shutil.rmtree(reports, ignore_errors=True)
    properties = {
        "server": "127.0.0.1", "port": target.port, "database": "test", "username": "test", "password": "test",
        "privilegedUser": "postgres", "privilegedPassword": target.password, "maven.test.failure.ignore": "true",
        "skipShadeDependencies": "true", "test": "PreparedStatementTest,NotifyTest" if short else "*Test",
    }
    output = suite_process(["mvn", "--batch-mode", *(f"-D{key}={value}" for key, value in properties.items()), "test"],
                           place, {})
    outcomes = {}
    for report in sorted(reports.glob("TEST-*.xml")):
        outcomes |= junit(report)
    return outcomes, output


SUITES = {
    "pgx": pgx,
    "asyncpg": asyncpg,
    "django": django,
    "sqlalchemy": sqlalchemy,
    "tokio-postgres": tokio_postgres,
    "pgjdbc": pgjdbc,
}


# --- the comparison --------------------------------------------------------------------------------------------------


def listed():
    """Known differences, suite and test, from the tables of docs/compatibility.md; and which of them may not show."""
    known, not_always = set(), set()
    for line in LIST.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] in SUITES:
            entries = {(cells[0], name) for name in re.findall(r"`([^`]+)`", cells[1])}
            known |= entries
            if cells[2].startswith("not always"):
                not_always |= entries
    return known, not_always


def compare(name, direct, routed):
    """What one suite's tests did differently: test, outcome directly, outcome through the router."""
    found = []
    for test in sorted(direct.keys() | routed.keys()):
        outcomes = direct.get(test, "not run"), routed.get(test, "not run")
        if outcomes[0] != outcomes[1]:
            found.append((name, test, *outcomes))
    return found


def free_port():
    import socket  # pylint: disable=import-outside-toplevel

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_suite(name, short, place):
    """A new server and a new cluster for each suite: what one leaves does not reach the next."""
    results = {}
    for kind, make in (("direct", Server), ("router", Cluster)):
        started = time.monotonic()
        server = make(place)
        target = server.start(free_port())
        try:
            outcomes, output = SUITES[name](target, short)
            memory = server.said_of_memory()
        finally:
            server.stop()
        (WORK / f"{name}-{kind}.log").write_text(output, encoding="utf-8")
        counts = {word: sum(outcome == word for outcome in outcomes.values())
                  for word in ("passed", "failed", "skipped")}
        say(f"{name} {kind}: " + ", ".join(f"{count} {word}" for word, count in counts.items())
            + f" in {time.monotonic() - started:.0f} s{memory}")
        results[kind] = outcomes
    if not any(outcome == "passed" for outcome in results["direct"].values()):
        raise Failure(f"{name}: no test passed directly: see {WORK}/{name}-direct.log")
    return compare(name, results["direct"], results["router"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a part of each suite: what belongs to `make nightly`")
    parser.add_argument("suites", nargs="*", metavar="SUITE",
                        help=f"one of {', '.join(SUITES)}; all of them when left out")
    options = parser.parse_args()
    if unknown := set(options.suites) - SUITES.keys():
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    WORK.mkdir(parents=True, exist_ok=True)
    # Servers that run are stopped then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (known, not_always), unlisted, seen, failures = listed(), [], set(), []
    for name in options.suites or SUITES:
        place = pathlib.Path(run("mktemp", "-d", "-t", "compat.XXXXXX").strip())
        try:
            for _, test, direct, routed in run_suite(name, options.short, place):
                seen.add((name, test))
                is_known = (name, test) in known
                say(f"  {'known' if is_known else 'DIFFERS'}: {name} {test}: "
                    f"{direct} directly, {routed} through the router")
                if not is_known:
                    unlisted.append((name, test))
        except Failure as failure:
            failures.append(str(failure))
            say(f"{name}: {failure}")
        finally:
            shutil.rmtree(place, ignore_errors=True)
    ran = set(options.suites or SUITES)
    stale = set() if options.short else {entry for entry in known - not_always - seen if entry[0] in ran}
    for suite, test in sorted(stale):
        say(f"  LISTED, does not differ: {suite} {test}")
    say(f"compat: {len(seen)} differences, {len(unlisted)} of them not listed; {len(stale)} listed that do not differ; "
        f"{len(failures)} suites could not run")
    return 1 if unlisted or stale or failures else 0


if __name__ == "__main__":
    sys.exit(main())
