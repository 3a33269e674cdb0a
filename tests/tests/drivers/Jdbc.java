import java.sql.*;
import java.util.Properties;

/** What a program with JDBC does, against the URL that is its argument. Prints "all right" at the end. */
public class Jdbc {
    static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    static int number(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement(); ResultSet rows = statement.executeQuery(sql)) {
            check(rows.next(), sql);
            return rows.getInt(1);
        }
    }

    static void batches(Connection connection, boolean bytes) throws SQLException {
        try (PreparedStatement insert = connection.prepareStatement("INSERT INTO items VALUES (?, ?, ?)")) {
            for (int id = 1; id <= 500; id++) {
                insert.setInt(1, id);
                insert.setString(2, "item " + id);
                // In its simple mode the driver has no way to send bytes.
                insert.setBytes(3, bytes ? new byte[] {0, (byte) id, -1} : null);
                insert.addBatch();
            }
            int[] counts = insert.executeBatch();
            check(counts.length == 500, "counts of a batch");
        }
    }

    static void preparedStatements(Connection connection, boolean bytes) throws SQLException {
        // The driver prepares on the server after five executions.
        try (PreparedStatement select = connection.prepareStatement("SELECT name, body FROM items WHERE id = ?");
                PreparedStatement update = connection.prepareStatement("UPDATE items SET name = name || ? WHERE id = ?")) {
            for (int id = 1; id <= 30; id++) {
                update.setString(1, "!");
                update.setInt(2, id);
                check(update.executeUpdate() == 1, "an update");
                select.setInt(1, id);
                try (ResultSet rows = select.executeQuery()) {
                    check(rows.next() && rows.getString(1).equals("item " + id + "!"), "its own write");
                    check(!bytes || rows.getBytes(2)[1] == (byte) id, "bytes");
                }
            }
        }
    }

    static void transactions(Connection connection) throws SQLException {
        connection.setAutoCommit(false);
        try (Statement statement = connection.createStatement()) {
            statement.executeUpdate("UPDATE items SET name = 'rolled back' WHERE id = 1");
            connection.rollback();
            statement.executeUpdate("UPDATE items SET name = 'committed' WHERE id = 1");
            Savepoint savepoint = connection.setSavepoint();
            statement.executeUpdate("UPDATE items SET name = 'taken back' WHERE id = 1");
            connection.rollback(savepoint);
            connection.commit();
            try (ResultSet rows = statement.executeQuery("SELECT name FROM items WHERE id = 1")) {
                check(rows.next() && rows.getString(1).equals("committed"), "what was committed");
            }
            connection.commit();
            try {
                statement.executeUpdate("INSERT INTO items VALUES (1, NULL, NULL)");
                throw new AssertionError("a duplicate key was accepted");
            } catch (SQLException error) {
                check(error.getSQLState().equals("23505"), error.getSQLState());
            }
            connection.rollback();
        }
        connection.setAutoCommit(true);
    }

    static void readOnly(Connection connection) throws SQLException {
        for (boolean automatic : new boolean[] {true, false}) {
            connection.setReadOnly(true);
            connection.setAutoCommit(automatic);
            check(number(connection, "SELECT count(*) FROM items") == 500, "a read-only count");
            try (Statement statement = connection.createStatement()) {
                statement.executeUpdate("UPDATE items SET name = 'no'");
                throw new AssertionError("a read-only connection wrote");
            } catch (SQLException error) {
                check(error.getSQLState().equals("25006"), error.getSQLState());
            }
            if (!automatic) {
                connection.rollback();
                try (Statement statement = connection.createStatement()) {
                    statement.setFetchSize(33);
                    int count = 0;
                    try (ResultSet rows = statement.executeQuery("SELECT id FROM items ORDER BY id")) {
                        while (rows.next()) {
                            count++;
                            check(rows.getInt(1) == count, "rows in order");
                        }
                    }
                    check(count == 500, "all rows in parts");
                }
                connection.commit();
            }
            connection.setAutoCommit(true);
            connection.setReadOnly(false);
        }
    }

    static void isolation(Connection connection) throws SQLException {
        int[] levels = {Connection.TRANSACTION_READ_COMMITTED, Connection.TRANSACTION_REPEATABLE_READ,
            Connection.TRANSACTION_SERIALIZABLE};
        for (int level : levels) {
            connection.setTransactionIsolation(level);
            check(connection.getTransactionIsolation() == level, "isolation level " + level);
        }
    }

    static void metadata(Connection connection) throws SQLException {
        try (ResultSet columns = connection.getMetaData().getColumns(null, "public", "items", null)) {
            int count = 0;
            while (columns.next()) {
                count++;
            }
            check(count == 3, "columns");
        }
        check(connection.isValid(5), "isValid");
        // The driver asks once: on a busy machine that may be before the statement runs.
        boolean cancelled = false;
        for (int tries = 0; tries < 3 && !cancelled; tries++) {
            try (Statement statement = connection.createStatement()) {
                statement.setQueryTimeout(1);
                statement.executeQuery("SELECT pg_sleep(30)");
            } catch (SQLException error) {
                check(error.getSQLState().equals("57014"), error.getSQLState());
                cancelled = true;
            }
        }
        check(cancelled, "a statement beyond its timeout went on");
        check(number(connection, "SELECT 1") == 1, "after a cancelled statement");
    }

    public static void main(String[] arguments) throws Exception {
        for (String mode : new String[] {"extended", "simple", "extendedForPrepared", "extendedCacheEverything"}) {
            Properties properties = new Properties();
            properties.setProperty("user", System.getenv("PGUSER"));
            properties.setProperty("password", System.getenv("PGPASSWORD"));
            properties.setProperty("preferQueryMode", mode);
            // By default the driver declares only explicit transactions.
            properties.setProperty("readOnlyMode", "always");
            try (Connection connection = DriverManager.getConnection(arguments[0], properties)) {
                try (Statement statement = connection.createStatement()) {
                    statement.execute("DROP TABLE IF EXISTS items");
                    statement.execute("CREATE TABLE items (id int PRIMARY KEY, name text, body bytea)");
                }
                batches(connection, !mode.equals("simple"));
                preparedStatements(connection, !mode.equals("simple"));
                transactions(connection);
                readOnly(connection);
                isolation(connection);
                metadata(connection);
            } catch (SQLException error) {
                throw new AssertionError(mode + ": " + error.getSQLState(), error);
            }
        }
        System.out.println("all right");
    }
}
