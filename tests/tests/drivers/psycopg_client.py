"""What a program with psycopg 3 does, against the server that the PG* variables name. Prints "all right" at the end."""

import threading

import psycopg
from psycopg import IsolationLevel, errors
from psycopg.rows import dict_row

with psycopg.connect(autocommit=True) as connection:
    connection.execute(
        "CREATE TABLE items (id int PRIMARY KEY, name text, price numeric, tags text[], seen timestamptz)"
    )
    with connection.cursor() as cursor:
        rows = [(n, f"item {n}", n * 1.5, ["a", str(n)], "2001-02-03 04:05:06+00") for n in range(1, 101)]
        cursor.executemany("INSERT INTO items VALUES (%s, %s, %s, %s, %s)", rows)
        assert cursor.rowcount == 100, cursor.rowcount
    connection.prepare_threshold = 2
    for n in range(1, 21):
        row = connection.execute("SELECT name, tags, price FROM items WHERE id = %s", (n,)).fetchone()
        assert row[0] == f"item {n}" and row[1] == ["a", str(n)] and float(row[2]) == n * 1.5, row
        done = connection.execute("UPDATE items SET price = price + 1 WHERE id = %s", (n,), prepare=True)
        assert done.rowcount == 1
    binary = connection.cursor(binary=True, row_factory=dict_row)
    assert binary.execute("SELECT id, seen FROM items WHERE id = %s", (7,)).fetchone()["seen"].year == 2001
    with connection.cursor() as cursor:
        with cursor.copy("COPY items (id, name) FROM STDIN") as copy:
            for n in range(1000, 2000):
                copy.write_row((n, "copied"))
        with cursor.copy("COPY (SELECT id FROM items ORDER BY id) TO STDOUT") as copy:
            assert sum(1 for _ in copy.rows()) == 1100

with psycopg.connect() as connection:
    with connection.transaction():
        connection.execute("UPDATE items SET name = 'outer' WHERE id = 1")
        try:
            with connection.transaction():
                connection.execute("UPDATE items SET name = 'inner' WHERE id = 1")
                raise ValueError("take it back")
        except ValueError:
            pass
    assert connection.execute("SELECT name FROM items WHERE id = 1").fetchone() == ("outer",)
    try:
        connection.execute("INSERT INTO items (id) VALUES (1)")
        raise AssertionError("a duplicate key was accepted")
    except errors.UniqueViolation as error:
        assert error.diag.constraint_name == "items_pkey", error.diag.constraint_name
    connection.rollback()

    for read_only in (False, True):
        connection.read_only = read_only
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        with connection.cursor(name="held") as cursor:
            cursor.itersize = 37
            cursor.execute("SELECT id FROM items ORDER BY id")
            assert sum(1 for _ in cursor) == 1100
        assert connection.execute("SHOW transaction_isolation").fetchone() == ("repeatable read",)
        connection.commit()
    try:
        connection.execute("UPDATE items SET name = 'no'")
        raise AssertionError("a read-only transaction wrote")
    except errors.ReadOnlySqlTransaction:
        connection.rollback()
    connection.read_only = None
    connection.isolation_level = None

    with connection.pipeline() as pipeline:
        cursors = [connection.execute("UPDATE items SET price = %s WHERE id = %s", (n, n)) for n in range(1, 51)]
        total = connection.execute("SELECT sum(price) FROM items WHERE id <= 50")
        pipeline.sync()
        assert all(cursor.rowcount == 1 for cursor in cursors)
        assert total.fetchone()[0] == 50 * 51 // 2
    connection.commit()
    try:
        with connection.pipeline() as pipeline:
            connection.execute("UPDATE items SET price = 0 WHERE id = 1")
            connection.execute("SELECT 1 / 0")
            connection.execute("UPDATE items SET price = 0 WHERE id = 2")
        raise AssertionError("an error in a pipeline was lost")
    except errors.DivisionByZero:
        connection.rollback()
    assert connection.execute("SELECT min(price) FROM items WHERE id <= 2").fetchone()[0] == 1
    connection.commit()


def add(times):
    with psycopg.connect() as mine:
        done = 0
        while done < times:
            try:
                with mine.transaction():
                    price = mine.execute("SELECT price FROM items WHERE id = 100").fetchone()[0]
                    mine.execute("UPDATE items SET price = %s WHERE id = 100", (price + 1,))
                done += 1
            except errors.SerializationFailure:
                pass


with psycopg.connect(autocommit=True) as connection:
    connection.execute("UPDATE items SET price = 0 WHERE id = 100")
    # It reads what other sessions have committed since.
    connection.execute("SET onecopy.freshness = 'strict'")
    threads = [threading.Thread(target=add, args=(25,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert connection.execute("SELECT price FROM items WHERE id = 100").fetchone() == (100,)

    sleeper = psycopg.connect(autocommit=True)
    cancelled = threading.Event()

    def cancel():
        # On a busy machine the first request may come before the statement does.
        pause = 0.5
        while not cancelled.wait(pause):
            sleeper.cancel()
            pause = 20

    canceller = threading.Thread(target=cancel)
    canceller.start()
    try:
        sleeper.execute("SELECT pg_sleep(120)")
        raise AssertionError("a cancelled statement went on")
    except errors.QueryCanceled:
        cancelled.set()
        canceller.join()
        assert sleeper.execute("SELECT 1").fetchone() == (1,)

    connection.execute("LISTEN news")
    sleeper.execute("NOTIFY news, 'hello'")
    assert next(connection.notifies()).payload == "hello"

print("all right")
